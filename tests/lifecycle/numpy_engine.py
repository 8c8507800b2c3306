"""An engine's memory in numpy, and a self-test of one rank over it: real threads, arena and codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from kvstow.clock import SystemClock
from kvstow.codec.base import Codec
from kvstow.codec.reference import ReferenceCodec
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, Layout, RegionId, Segment
from kvstow.lifecycle.executors import ThreadExecutor
from kvstow.lifecycle.self_test import SelfTest, Tested
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.base import Store
from kvstow.stores.framing import frame_bytes

NAMESPACE = NamespaceDigest(b"n" * 32)
BLOCKS, TOKENS, ROW_BYTES, PADDING = 16, 4, 24, 72
PAGE_BYTES = TOKENS * ROW_BYTES + PADDING
LAYERS = 3
KINDS = (GroupKind.PAGED, GroupKind.WINDOW, GroupKind.STATE)
CHUNK_TOKENS = 4 * TOKENS


class NumpyEngine:
    """Groups of layers that lie over each other in one pool, interleaved, with padding behind each page.

    ``pool`` is [blocks, layers, page bytes]; a layer's tensor shows the page without its padding.

    Attributes:
        layout: what a worker is told; tests tell it something else.
    """

    def __init__(self) -> None:
        self.pool = np.zeros((BLOCKS, LAYERS, PAGE_BYTES), np.uint8)
        self.tensors = [
            {f"layers.{layer}.{kind}": self.view(layer) for layer in range(LAYERS)} for kind in KINDS
        ]
        segments = tuple(
            Segment(
                f"layers.{layer}",
                RegionId(0),
                layer * PAGE_BYTES,
                LAYERS * PAGE_BYTES,
                TOKENS * ROW_BYTES,
            )
            for layer in range(LAYERS)
        )
        self.layout = Layout(
            tuple(
                Group(
                    GroupId(index),
                    kind,
                    TOKENS,
                    BLOCKS,
                    "uint8",
                    segments,
                    2 * TOKENS * (kind is GroupKind.WINDOW),
                )
                for index, kind in enumerate(KINDS)
            ),
            CHUNK_TOKENS,
        )

    def view(self, layer: int) -> np.ndarray:
        return self.pool[:, layer, : TOKENS * ROW_BYTES].reshape(BLOCKS, TOKENS, ROW_BYTES)

    def with_segment(self, group: int, index: int, **changes: int) -> Layout:
        """The layout with one segment told wrongly."""
        groups = list(self.layout.groups)
        segments = list(groups[group].segments)
        segments[index] = msgspec.structs.replace(segments[index], **changes)
        groups[group] = msgspec.structs.replace(groups[group], segments=tuple(segments))
        return Layout(tuple(groups), self.layout.chunk_tokens)

    # ---- what a self-test asks of an engine ----------------------------------------------

    def names(self, group: GroupId) -> Sequence[str]:
        return list(self.tensors[group])

    def read(self, group: GroupId, tensor: int, block: BlockId) -> np.ndarray:
        return self._tensor(group, tensor)[block].reshape(-1).copy()

    def write(self, group: GroupId, tensor: int, block: BlockId, content: np.ndarray) -> None:
        part = self._tensor(group, tensor)[block]
        part[:] = content.reshape(part.shape)

    def peek(self, region: RegionId, start: int, stop: int) -> bytes:
        return self.pool.reshape(-1)[start:stop].tobytes()

    def _tensor(self, group: GroupId, tensor: int) -> np.ndarray:
        return list(self.tensors[group].values())[tensor]


class Rig:
    """One rank's parts and its self-test; `run` may be called once.

    Args:
        engine: the memory.
        layout: what the worker is told, if not the engine's own.
        disk: the worker's, or None.
        wrap: puts something between the worker and a group's codec.
        wrap_arena: puts something in the place of the arena.
    """

    def __init__(
        self,
        engine: NumpyEngine,
        layout: Layout | None = None,
        disk: Store | None = None,
        wrap: Callable[[Codec], Codec] = lambda codec: codec,
    ) -> None:
        layout = layout or engine.layout
        frames = [frame_bytes(layout.payload_bytes(GroupId(index))) for index in range(len(layout.groups))]
        self.arena = Arena((2,) * len(frames), frames, 1)
        self.recorder = Recorder()
        clock = SystemClock()
        self.executors = Executors(*(ThreadExecutor(f"self-test-{kind}", 1, 64) for kind in "slrw"))
        codecs = [wrap(ReferenceCodec(group, [engine.pool.reshape(-1)])) for group in layout.groups]
        worker = Worker(
            Rank(0),
            NAMESPACE,
            layout,
            codecs,
            self.arena,
            disk,
            WorkerLimits(load_timeout_s=10.0, save_timeout_s=10.0, shutdown_s_max=0.0, load_parts=1),
            self.executors,
            clock,
            self.recorder,
        )
        names = [codec.name for codec in codecs]
        self._with_disk = disk is not None
        self._test = SelfTest(worker, layout, engine, self.arena, self.executors.writer, names, clock)

    def run(self, s_max: float = 10.0) -> Tested:
        return self._test.run(with_disk=self._with_disk, s_max=s_max)

    def close(self) -> None:
        for executor in (
            self.executors.saver,
            self.executors.loader,
            self.executors.readers,
            self.executors.writer,
        ):
            executor.close(1.0)
        self.arena.close()


@contextmanager
def rig(engine: NumpyEngine, *args: object, **options: object) -> Iterator[Rig]:
    made = Rig(engine, *args, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
