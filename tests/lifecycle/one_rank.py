"""One rank's worker over real memory, arena and disk, whose tasks run when a test says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvstow.clock import ManualClock
from kvstow.codec.reference import ReferenceCodec
from kvstow.keys.ids import ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, Layout, RegionId, Segment
from kvstow.lifecycle.messages import (
    JobId,
    LoadItem,
    LoadJob,
    RequestId,
    SaveItem,
    SaveJob,
    Slot,
    Tier,
    WorkOrder,
)
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.framing import frame_bytes
from kvstow.stores.shared_slots import SharedSlots
from kvstow.testing.executors import SteppedExecutor

BLOCKS, BLOCK_BYTES, PER_CHUNK = 16, 96, 2
R = RequestId("r")
NAMESPACE = NamespaceDigest(b"n" * 32)


def small_layout(kinds: Sequence[GroupKind], *, replicated: bool = False) -> Layout:
    """Groups over the same two layers; a window is one block long."""
    segments = tuple(
        Segment(f"layer.{layer}", RegionId(0), layer * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)
        for layer in range(2)
    )
    groups = tuple(
        Group(GroupId(index), kind, 4, BLOCKS, "uint8", segments, 4 * (kind is GroupKind.WINDOW), replicated)
        for index, kind in enumerate(kinds)
    )
    return Layout(groups, chunk_tokens=4 * PER_CHUNK)


class OneRank:
    """A worker over real memory, arena and disk, whose tasks run when the test says.

    With ``shared`` it is one of several ranks that hold the same bytes, and the slots are those.
    """

    def __init__(
        self,
        disk: object,
        kinds: Sequence[GroupKind] = (GroupKind.PAGED,),
        shared: SharedSlots | None = None,
    ) -> None:
        layout = small_layout(kinds, replicated=shared is not None)
        self.memory = np.arange(2 * BLOCKS * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8)
        self.original = self.memory.copy()
        frames = [frame_bytes(layout.payload_bytes(GroupId(index))) for index in range(len(kinds))]
        self.arena = Arena((4,) * len(kinds), frames, 1, shared)
        self.clock = ManualClock()
        self.recorder = Recorder()
        self.saver, self.loader = SteppedExecutor(), SteppedExecutor()
        self.readers, self.writer = SteppedExecutor(), SteppedExecutor()
        rank = 0 if shared is None or shared.is_first else 1
        self.worker = Worker(
            Rank(rank),
            NamespaceDigest(bytes([rank]) * 32) if rank else NAMESPACE,
            layout,
            [ReferenceCodec(group, [self.memory]) for group in layout.groups],
            self.arena,
            disk,  # type: ignore[arg-type]
            WorkerLimits(load_timeout_s=10.0, save_timeout_s=5.0, shutdown_s_max=1.0, load_parts=1),
            Executors(self.saver, self.loader, self.readers, self.writer),
            self.clock,
            self.recorder,
            NAMESPACE,
        )

    def run(self) -> None:
        while self.saver.run_all() + self.loader.run_all() + self.readers.run_all() + self.writer.run_all():
            pass

    def block(self, block: int) -> bytes:
        """The bytes of one block in engine memory, over both layers."""
        return b"".join(
            self.memory[start : start + BLOCK_BYTES].tobytes()
            for start in ((layer * BLOCKS + block) * BLOCK_BYTES for layer in range(2))
        )

    def wipe(self) -> None:
        self.memory[:] = 0xEE

    def save(
        self, ref: ChunkRef, slot: int, blocks: Iterable[int], *, write: bool = False, job: int = 1
    ) -> None:
        item = SaveItem(ref, Slot(slot), tuple(map(BlockId, blocks)), JobId(100 * write))
        self.worker.submit(WorkOrder(saves=(SaveJob(JobId(job), R, (item,)),)))

    def snapshot(self, items: Iterable[SaveItem], job: int = 1) -> None:
        self.worker.copy_snapshots(WorkOrder(snapshots=(SaveJob(JobId(job), R, tuple(items)),)))

    def load(self, items: Iterable[LoadItem], job: int = 9, request: RequestId = R) -> None:
        self.worker.submit(WorkOrder(loads=(LoadJob(JobId(job), request, tuple(items)),)))

    def outcome(self):
        """What `poll` gives, with the one load report (or None) in front."""
        reports, finished, sent = self.worker.poll()
        loads = [load for report in reports for load in report.loads]
        return (loads[0] if loads else None), finished, sent


def arena_item(ref: ChunkRef, slot: int, blocks: Iterable[int], skip: int = 0) -> LoadItem:
    return LoadItem(ref, Tier.ARENA, Slot(slot), tuple(map(BlockId, blocks)), skip)


def disk_item(ref: ChunkRef, slot: int, blocks: Iterable[int]) -> LoadItem:
    return LoadItem(ref, Tier.DISK, Slot(slot), tuple(map(BlockId, blocks)))
