"""A store that fails as it is told to: any store, with named faults in front of it.

What each fault does to each operation; ``-`` means that it has none there::

    fault          put                      get_into               contains  remove          scan
    IO_ERROR       raises, nothing kept     raises, target as was  raises    raises at end   raises
    NO_SPACE       raises, nothing kept     -                      -         -               -
    SHORT_WRITE    keeps its beginning      -                      -         -               -
    TORN_WRITE     keeps it, tail zero      -                      -         -               -
    FLIPPED_WRITE  keeps it, a byte wrong   -                      -         -               -
    SHORT_READ     -                        a part, then raises    -         -               -
    FLIPPED_READ   -                        True, a byte wrong     -         -               -
    LOST           says it kept it          says absent            absent    leaves it       -
    SLOW           pause(slow_s), then as without a fault, everywhere
    HANG           pause(hang_s), then as without a fault, everywhere

IO_ERROR raises `StoreUnavailableError`, NO_SPACE `NoSpaceError`, and SHORT_READ
`CorruptFrameError`, as the disk does when a file ends early. LOST leaves whatever was stored
before. HANG writes its target when it comes back, however late: nobody has the buffer by then, and
a caller that reuses it is what this fault is there to find. Faults of a read show only where there
is something to read: a frame that is absent stays absent.

What is damaged always differs from what was given, so that a checksum must notice. Where the damage
lies follows from the frame's key and from how many frames were damaged before.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import count
from typing import Protocol

from kvstow.errors import CorruptFrameError, InvariantError, NoSpaceError, StoreError, StoreUnavailableError
from kvstow.stores.base import FrameName, Store, StoredFrame

# What a device writes whole or not at all.
_SECTOR_BYTES = 512


class StoreOperation(StrEnum):
    """What is asked of a store."""

    PUT = "put"
    GET = "get"
    CONTAINS = "contains"
    REMOVE = "remove"
    SCAN = "scan"


class StoreFault(StrEnum):
    """What goes wrong; the module says what each does."""

    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    SHORT_WRITE = "short_write"
    TORN_WRITE = "torn_write"
    FLIPPED_WRITE = "flipped_write"
    SHORT_READ = "short_read"
    FLIPPED_READ = "flipped_read"
    LOST = "lost"
    SLOW = "slow"
    HANG = "hang"


_EVERYWHERE = frozenset({StoreFault.IO_ERROR, StoreFault.SLOW, StoreFault.HANG})
_ON_NAMES = _EVERYWHERE | {StoreFault.LOST}

FAULTS_OF: Mapping[StoreOperation, frozenset[StoreFault]] = {
    StoreOperation.PUT: _ON_NAMES
    | {StoreFault.NO_SPACE, StoreFault.SHORT_WRITE, StoreFault.TORN_WRITE, StoreFault.FLIPPED_WRITE},
    StoreOperation.GET: _ON_NAMES | {StoreFault.SHORT_READ, StoreFault.FLIPPED_READ},
    StoreOperation.CONTAINS: _ON_NAMES,
    StoreOperation.REMOVE: _ON_NAMES,
    StoreOperation.SCAN: _EVERYWHERE,
}
"""The faults that an operation can have."""


class FaultSource(Protocol):
    """Decides what goes wrong, and when."""

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        """The fault of one operation that is about to happen, one of `FAULTS_OF` it, or None.

        Args:
            operation: what is asked. A ``remove`` of many names asks once for each.
            name: the frame it is about; None for a scan.
        """
        ...


class NoFaults:
    """Nothing goes wrong. Any thread may call it."""

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        return None


class SeededFaults:
    """Faults drawn at given rates: the same ones for the same seed and order of operations.

    Any thread may call it; with several the order is theirs, and so no longer the seed's alone.

    Args:
        rng: where the draws come from, one for each operation whatever its outcome.
        rates: how likely each fault is, 0..1, at an operation that can have it.

    Attributes:
        counts: how often each fault was given out.

    Raises:
        ValueError: the rates of some operation's faults are negative or sum to more than 1.
    """

    def __init__(self, rng: random.Random, rates: Mapping[StoreFault, float]) -> None:
        self.counts: Counter[StoreFault] = Counter()
        self._rng = rng
        self._lock = threading.Lock()
        # In the order of the enum: a set's order must not decide what a seed means.
        self._rates = {
            operation: [(fault, rates[fault]) for fault in StoreFault if fault in faults and fault in rates]
            for operation, faults in FAULTS_OF.items()
        }
        for operation, drawn in self._rates.items():
            total = sum(rate for _, rate in drawn)
            if total > 1 or any(rate < 0 for _, rate in drawn):
                raise ValueError(f"rates of {operation} sum to {total}: {drawn}; each >= 0, together <= 1")

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        with self._lock:
            left = self._rng.random()
            for fault, rate in self._rates[operation]:
                if left < rate:
                    self.counts[fault] += 1
                    return fault
                left -= rate
        return None


class FaultyStore:
    """A `kvstow.stores.base.Store` in front of another. Any thread may call it, as many as ``inner`` takes.

    No lock is held while ``pause`` runs, so it may switch to another thread or fiber.

    Args:
        inner: keeps the frames; closed with this one.
        faults: asked before every operation, and for every name of a ``remove``.
        pause: waits for so many seconds, in whatever time the test lives in.
        slow_s: how long SLOW pauses: longer than usual, within every deadline.
        hang_s: how long HANG pauses: far beyond every deadline.

    Attributes:
        name: the inner store's, so that nobody who looks at it sees a difference.
        inner: the store behind, for a test that asks what is really kept.
    """

    def __init__(
        self,
        inner: Store,
        faults: FaultSource,
        pause: Callable[[float], None],
        *,
        slow_s: float = 1.0,
        hang_s: float = 3600.0,
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self._faults = faults
        self._pause = pause
        self._slow_s = slow_s
        self._hang_s = hang_s
        self._damaged = count()

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Store ``frame``, or what a fault leaves of it; see `kvstow.stores.base.Store.put`."""
        match self._fault(StoreOperation.PUT, name):
            case StoreFault.LOST:
                return
            case StoreFault.NO_SPACE:
                raise NoSpaceError(f"{_told(StoreOperation.PUT, name)}: no space for {len(frame)} bytes")
            case StoreFault.SHORT_WRITE:
                frame = _aligned_copy(frame[: self._place(name, len(frame))])
            case StoreFault.TORN_WRITE:
                frame = self._torn(name, frame)
            case StoreFault.FLIPPED_WRITE:
                frame = _aligned_copy(frame)
                self._flip(name, frame)
        self.inner.put(name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target``, or as a fault has it; see `kvstow.stores.base.Store.get_into`."""
        match self._fault(StoreOperation.GET, name):
            case StoreFault.LOST:
                return False
            case StoreFault.SHORT_READ:
                return self._read_short(name, target)
            case StoreFault.FLIPPED_READ:
                found = self.inner.get_into(name, target)
                if found:
                    self._flip(name, target)
                return found
        return self.inner.get_into(name, target)

    def contains(self, name: FrameName) -> bool:
        """Whether a frame is stored under ``name``, or what a fault says."""
        if self._fault(StoreOperation.CONTAINS, name) is StoreFault.LOST:
            return False
        return self.inner.contains(name)

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget the frames that no fault keeps; the first error is raised after the others are gone."""
        first: StoreError | None = None
        for name in names:
            try:
                if self._fault(StoreOperation.REMOVE, name) is not StoreFault.LOST:
                    self.inner.remove([name])
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first

    def scan(self) -> Iterator[StoredFrame]:
        """What the inner store lists; a fault comes before the first."""
        self._fault(StoreOperation.SCAN, None)
        yield from self.inner.scan()

    def close(self) -> None:
        """Close the inner store. Never fails on purpose. Idempotent."""
        self.inner.close()

    def _fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        """Ask, do what is the same for every operation, and give what is left for it to do."""
        fault = self._faults.next_fault(operation, name)
        if fault is None:
            return None
        if fault not in FAULTS_OF[operation]:
            raise InvariantError(
                f"{fault} cannot happen to a {operation}; give one of {sorted(FAULTS_OF[operation])}"
            )
        if fault is StoreFault.IO_ERROR:
            raise StoreUnavailableError(f"{_told(operation, name)}: EIO, as told to; check the fault source")
        if fault is StoreFault.SLOW:
            self._pause(self._slow_s)
        elif fault is StoreFault.HANG:
            self._pause(self._hang_s)
        return fault

    def _read_short(self, name: FrameName, target: memoryview) -> bool:
        whole = _aligned_copy(target)
        if not self.inner.get_into(name, whole):
            return False
        moved = self._place(name, len(target))
        target[:moved] = whole[:moved]
        raise CorruptFrameError(
            f"{_told(StoreOperation.GET, name)}: {moved} bytes read, {len(target)} wanted; "
            "remove the frame and recompute"
        )

    def _torn(self, name: FrameName, frame: memoryview) -> memoryview:
        # Cut before the last byte that is not zero: a tail that is zero anyway would be no damage.
        used_bytes = len(bytes(frame).rstrip(b"\0"))
        cut = self._place(name, used_bytes) // _SECTOR_BYTES * _SECTOR_BYTES
        torn = _aligned_copy(frame)
        torn[cut:] = bytes(len(frame) - cut)
        return torn

    def _flip(self, name: FrameName, frame: memoryview) -> None:
        if len(frame):
            frame[self._place(name, len(frame))] ^= 0x40

    def _place(self, name: FrameName, size_bytes: int) -> int:
        """A place below ``size_bytes``, another one each time; 0 when there is none."""
        seed = name.key + next(self._damaged).to_bytes(8, "little")
        drawn = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        return drawn % size_bytes if size_bytes else 0


def _aligned_copy(content: memoryview) -> memoryview:
    """``content`` in page-aligned memory of its own, so that O_DIRECT is used as on the good path."""
    # mmap refuses a length of 0.
    copy = memoryview(mmap.mmap(-1, max(1, len(content))))[: len(content)]
    copy[:] = content
    return copy


def _told(operation: StoreOperation, name: FrameName | None) -> str:
    what = "all" if name is None else f"chunk {name.ref.index} of group {name.ref.group}"
    return f"injected fault: {operation} of {what}"
