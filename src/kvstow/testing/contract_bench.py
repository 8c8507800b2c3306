"""How fast a store or a codec is: the benchmark beside its contract.

Every figure comes with a memcpy of the same bytes, measured in turn with it in the same run, so that
two figures may be compared across machines by their ratio to it. What is stored is touched in rounds
over many frames: with enough of them nothing comes from a cache.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from kvstow.clock import Clock, SystemClock
from kvstow.codec.base import Codec, Region
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, RegionId, Segment
from kvstow.stores.base import Store
from kvstow.testing.samples import blank_frame, sample_frame, sample_name

Bytes = npt.NDArray[np.uint8]
MakeCodec = Callable[[Group, Sequence[Region]], Codec]

# Half of what is bound moves, in random order: neighbours in a payload are none in the engine.
_POOL_PER_PAYLOAD = 2


class Figure(msgspec.Struct, frozen=True):
    """What one operation took.

    Attributes:
        subject: the store's or codec's name.
        operation: what was measured.
        size_bytes: bytes that one operation moves; 0 for a scan, which moves none.
        median_s: seconds of one operation; for a scan, of one frame that it lists.
        memcpy_s: seconds of one memcpy of as many bytes, in the same run; 0 for a scan.
    """

    subject: str
    operation: str
    size_bytes: int
    median_s: float
    memcpy_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Operations in a second; for a scan, frames listed."""
        return 1 / self.median_s

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6) in a second."""
        return self.size_bytes / self.median_s / 1e6

    @property
    def memcpy_mb_per_s(self) -> float:
        """The same of the memcpy; 0 where there was none."""
        return self.size_bytes / self.memcpy_s / 1e6 if self.memcpy_s else 0.0

    @property
    def to_memcpy(self) -> float:
        """Speed as a share of the memcpy's: 1 is as fast, 0.5 half as fast."""
        return self.memcpy_s / self.median_s


def bench_store(
    store: Store, frames: int, payload_bytes: int, rounds: int = 5, clock: Clock | None = None
) -> list[Figure]:
    """Put, get and scan, with nothing else going on. Blocks until done.

    Args:
        store: an empty store with room for ``frames`` frames; they are removed at the end.
        frames: how many to have at once; as much memory again is taken for buffers.
        payload_bytes: length of each frame's payload.
        rounds: how often each frame is put and got.
        clock: what to measure with; the system's if it is not given.

    Returns:
        ``put``, ``get`` and ``scan``, in this order.
    """
    timer = _Timer(clock)
    names = [sample_name(index) for index in range(frames)]
    given = [sample_frame(name, payload_bytes) for name in names]
    taken = [blank_frame(payload_bytes) for _ in names]
    scans: list[float] = []
    for _ in range(rounds):
        # A put of a new frame, not of one that replaces another.
        store.remove(names)
        for name, frame, other in zip(names, given, taken, strict=True):
            timer.take("put", partial(store.put, name, frame))
            timer.take("memcpy of put", partial(_memcpy, other, frame))
        scans.append(timer.seconds(lambda: sum(1 for _ in store.scan())) / frames)
        for name, frame, other in zip(names, given, taken, strict=True):
            timer.take("get", partial(store.get_into, name, other))
            timer.take("memcpy of get", partial(_memcpy, frame, other))
    store.remove(names)
    size_bytes = len(given[0])
    return [
        *(
            Figure(store.name, way, size_bytes, timer.median_s(way), timer.median_s(f"memcpy of {way}"))
            for way in ("put", "get")
        ),
        Figure(store.name, "scan", 0, statistics.median(scans)),
    ]


def bench_codec(
    make: MakeCodec,
    payload_bytes: int,
    block_bytes: int = 24 << 10,
    segments: int = 30,
    rounds: int = 5,
    clock: Clock | None = None,
) -> list[Figure]:
    """Gather and scatter of blocks in random order. Blocks until done.

    Args:
        make: binds the codec to a group and to regions, which are numpy arrays.
        payload_bytes: about how much to move at once, rounded down to whole blocks of all segments;
            larger than the caches, or they are what is measured.
        block_bytes: length of a block in one segment.
        segments: tensors of a layer that share a block table, each in a region of its own.
        rounds: how often to measure each way.
        clock: what to measure with; the system's if it is not given.

    Returns:
        ``gather`` and ``scatter``, in this order.
    """
    timer = _Timer(clock)
    count = max(1, payload_bytes // (segments * block_bytes))
    group = _group(count * _POOL_PER_PAYLOAD, block_bytes, segments)
    regions = [np.ones(group.num_blocks * block_bytes, np.uint8) for _ in range(segments)]
    codec = make(group, regions)
    size_bytes = count * group.block_bytes
    payload, other = (memoryview(np.ones(size_bytes, np.uint8).data) for _ in range(2))
    rng = random.Random(0)
    for _ in range(rounds):
        blocks = [BlockId(block) for block in rng.sample(range(group.num_blocks), count)]
        timer.take("gather", partial(codec.gather, blocks, payload))
        timer.take("memcpy of gather", partial(_memcpy, other, payload))
        timer.take("scatter", partial(codec.scatter, blocks, payload))
        timer.take("memcpy of scatter", partial(_memcpy, payload, other))
    return [
        Figure(codec.name, way, size_bytes, timer.median_s(way), timer.median_s(f"memcpy of {way}"))
        for way in ("gather", "scatter")
    ]


class _Timer:
    """Seconds of what was done, by what it is called."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock or SystemClock()
        self._seen: dict[str, list[float]] = {}

    def seconds(self, action: Callable[[], object]) -> float:
        start_s = self._clock.monotonic_s()
        action()
        return self._clock.monotonic_s() - start_s

    def take(self, what: str, action: Callable[[], object]) -> None:
        self._seen.setdefault(what, []).append(self.seconds(action))

    def median_s(self, what: str) -> float:
        return statistics.median(self._seen[what])


def _memcpy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _group(num_blocks: int, block_bytes: int, segments: int) -> Group:
    return Group(
        GroupId(0),
        GroupKind.PAGED,
        16,
        num_blocks,
        "uint8",
        tuple(
            Segment(f"layers.{layer}", RegionId(layer), 0, block_bytes, block_bytes)
            for layer in range(segments)
        ),
    )
