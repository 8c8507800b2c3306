"""The arena: DRAM that holds frames in slots, per group, and a few staging frames for readers.

One anonymous private mapping, so nothing outlives the process, however it ends; slots that all
ranks share lie in a second one (`kvstow.stores.shared_slots`). What a slot holds and when it may be
reused is the directory's decision; the arena only says where it is.

::

    | group 0: slot 0, slot 1, ... | group 1: slot 0, ... | ... | staging 0, staging 1, ... |

Slots are `frame_bytes` of their group apart; a staging frame is as long as the largest.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import threading
from collections.abc import Sequence
from itertools import accumulate
from types import TracebackType

from kvstow.errors import ConfigError, InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.framing import HEADER_BYTES
from kvstow.stores.shared_slots import SharedSlots

_log = logging.getLogger(__name__)

# linux/mman.h, since Linux 5.14; Python's mmap has no name for it.
_MADV_POPULATE_WRITE = 23


def frames_for(budget_bytes: int, frame_bytes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """How many frames each group gets from a budget.

    Groups without a share of their own get as many frames as each other, for a chunk needs one of
    each; those with one (images, few and large) get what it holds.

    Args:
        budget_bytes: what all frames may occupy.
        frame_bytes: bytes of one frame, by group.
        shares: the part of the budget that is for this group alone, by group; 0 for none. Where
            every group has one they take all of the budget between them.
    """
    own = sum(shares)
    if own and all(shares):
        shares = [share / own for share in shares]
    chunk_bytes = sum(size for size, share in zip(frame_bytes, shares, strict=True) if not share)
    chunks = int(budget_bytes * (1 - own)) // chunk_bytes if chunk_bytes else 0
    return tuple(
        int(budget_bytes * share) // size if share else chunks
        for size, share in zip(frame_bytes, shares, strict=True)
    )


def slots_for(
    budget_bytes: int,
    frame_bytes: Sequence[int],
    staging_frames: int,
    shares: Sequence[float] | None = None,
    copies: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """How many slots each group gets from a budget; see `frames_for`.

    Args:
        budget_bytes: all that the arenas of an engine may occupy, staging frames included.
        frame_bytes: bytes of one frame on one rank, by group.
        staging_frames: how many staging frames on all ranks, each as long as the longest frame.
        shares: by group, or None if no group has one.
        copies: on how many ranks a frame lies, by group, or None for one.

    Raises:
        ConfigError: the budget does not hold one frame of every group.
    """
    staging_bytes = staging_frames * max(frame_bytes)
    shares = shares or (0.0,) * len(frame_bytes)
    copies = copies or (1,) * len(frame_bytes)
    all_bytes = [size * count for size, count in zip(frame_bytes, copies, strict=True)]
    slots = frames_for(max(0, budget_bytes - staging_bytes), all_bytes, shares)
    if min(slots) < 1:
        chunk_bytes = sum(size for size, share in zip(all_bytes, shares, strict=True) if not share)
        needed_bytes = [int(size / share) + 1 for size, share in zip(all_bytes, shares, strict=True) if share]
        needed_bytes.append(int(chunk_bytes / max(1e-9, 1 - sum(shares))) + bool(sum(shares)))
        raise ConfigError(
            f"arena budget of {budget_bytes} bytes does not hold one frame of every group "
            f"({', '.join(map(str, all_bytes))} bytes) and {staging_frames} staging frames of "
            f"{max(frame_bytes)} bytes; use {staging_bytes + max(needed_bytes)} or more"
        )
    return slots


class StagingFrame:
    """A frame's worth of memory lent to one reader. Whoever holds it gives it back once.

    Attributes:
        frame: writable bytes [frame bytes of the group it was asked for].
    """

    def __init__(self, arena: Arena, index: int, frame: memoryview) -> None:
        self.frame = frame
        self._arena = arena
        self._index = index
        self._lent = True

    def release(self) -> None:
        """Give it back; nobody may touch `frame` afterwards. Any thread; does not block.

        Raises:
            InvariantError: it was given back before.
        """
        if not self._lent:
            raise InvariantError(f"staging frame {self._index} was released twice")
        self._lent = False
        self._arena._take_back(self._index)

    def __enter__(self) -> memoryview:
        return self.frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Arena:
    """Memory for frames. Any thread may call any method; only `acquire_staging` waits.

    Attributes:
        size_bytes: what this rank maps to write: staging, and shared slots if it is their first.
    """

    def __init__(
        self,
        slots: Sequence[int],
        frame_bytes: Sequence[int],
        staging_frames: int,
        shared: SharedSlots | None = None,
    ) -> None:
        """Map the memory; pages are given by the system when first touched (see `prefault`).

        Args:
            slots: frames to hold, by group.
            frame_bytes: bytes of one frame, by group; multiples of `HEADER_BYTES`.
            staging_frames: frames to lend to readers that have no slot.
            shared: holds the slots of some groups; taken over.

        Raises:
            ConfigError: the system does not give so much memory.
            InvariantError: the sizes make no sense together.
        """
        if len(slots) != len(frame_bytes) or not frame_bytes or min(*slots, staging_frames) < 0:
            raise InvariantError(f"slots={slots} and frame_bytes={frame_bytes} do not describe groups")
        for group, size in enumerate(frame_bytes):
            if size <= 0 or size % HEADER_BYTES:
                raise InvariantError(f"group {group}: frame of {size} bytes is no multiple of {HEADER_BYTES}")
        self._slots = tuple(slots)
        self._frame_bytes = tuple(frame_bytes)
        self._shared = shared
        elsewhere = shared.slots if shared is not None else {}
        if shared is not None:
            for group, count in elsewhere.items():
                mine, theirs = (slots[group], frame_bytes[group]), (count, shared.frame_bytes[group])
                if mine != theirs:
                    raise InvariantError(f"group {group}: slots and frame bytes {mine}, shared are {theirs}")
        group_bytes = [
            0 if group in elsewhere else count * size
            for group, (count, size) in enumerate(zip(slots, frame_bytes, strict=True))
        ]
        # One offset more than groups: the last is where staging begins.
        self._starts = (0, *accumulate(group_bytes))
        self._staging_bytes = max(frame_bytes)
        own_bytes = self._starts[-1] + staging_frames * self._staging_bytes
        if not own_bytes:
            raise InvariantError(f"slots={slots} and no staging frame: an arena holds one frame or more")
        self.size_bytes = own_bytes
        self._map = _mapping(own_bytes)
        # What this rank fills, to be brought in by `prefault`.
        self._filled = [self._map]
        if shared is not None:
            _advise(shared.mapping)
            if shared.is_first:
                self.size_bytes += shared.size_bytes
                self._filled.append(shared.mapping)
        self._view = memoryview(self._map)
        self._free_staging = list(range(staging_frames))
        self._staging_changed = threading.Condition()
        self._stop = threading.Event()
        self._prefaulter: threading.Thread | None = None
        self._closed = False

    def frame(self, group: GroupId, slot: int) -> memoryview:
        """The memory of one slot: bytes [frame bytes of the group], page aligned; see `fills`.

        The view stays valid until it is dropped, also past `close`.

        Raises:
            InvariantError: there is no such group or slot, or the arena is closed.
        """
        if self._closed:
            raise InvariantError("the arena is closed")
        if not (0 <= group < len(self._slots) and 0 <= slot < self._slots[group]):
            raise InvariantError(f"group {group} slot {slot} is outside the arena's slots {self._slots}")
        if self._shared is not None and group in self._shared.slots:
            return self._shared.frame(group, slot)
        size = self._frame_bytes[group]
        start = self._starts[group] + slot * size
        return self._view[start : start + size]

    def fills(self, group: GroupId) -> bool:
        """Whether this rank writes the slots of ``group``; else another does, and it only reads."""
        return self._shared is None or self._shared.is_first or group not in self._shared.slots

    def acquire_staging(self, group: GroupId, wait_s_max: float) -> StagingFrame | None:
        """Borrow a staging frame as long as a frame of ``group``.

        Args:
            group: whose frames it is to hold.
            wait_s_max: how long to wait for one that is lent out; 0 does not block.

        Returns:
            The frame, or None when none came free in time.

        Raises:
            InvariantError: there is no such group, or the arena is closed.
        """
        if not 0 <= group < len(self._frame_bytes):
            raise InvariantError(f"group {group} is not one of the arena's {len(self._frame_bytes)}")
        with self._staging_changed:
            self._staging_changed.wait_for(lambda: self._free_staging or self._closed, wait_s_max)
            if self._closed:
                raise InvariantError("the arena is closed")
            if not self._free_staging:
                return None
            index = self._free_staging.pop()
        start = self._starts[-1] + index * self._staging_bytes
        return StagingFrame(self, index, self._view[start : start + self._frame_bytes[group]])

    def prefault(self, step_bytes: int) -> None:
        """Have a thread of the arena's own bring in all pages, ``step_bytes`` at a time.

        Without it the first copy into each slot pays for its page faults. Never alters content, so
        slots may be in use meanwhile. Returns at once; `close` stops it.

        Args:
            step_bytes: how much to bring in per system call; small, so that others get their turn.

        Raises:
            InvariantError: it was called before, or ``step_bytes`` is no multiple of a page.
        """
        if self._prefaulter is not None or step_bytes <= 0 or step_bytes % mmap.PAGESIZE:
            raise InvariantError(f"prefault once, with a multiple of {mmap.PAGESIZE} bytes, not {step_bytes}")
        self._prefaulter = threading.Thread(
            target=self._populate, args=(step_bytes,), name="kvstow-prefault", daemon=True
        )
        self._prefaulter.start()

    def wait_prefaulted(self, wait_s_max: float) -> bool:
        """Wait for `prefault` to end; whether it has. Blocks up to ``wait_s_max``."""
        if self._prefaulter is None:
            return False
        self._prefaulter.join(wait_s_max)
        return not self._prefaulter.is_alive()

    def close(self) -> None:
        """Stop prefaulting and give the memory back. Idempotent.

        Memory that a view still shows (a reader that did not come back) is given back when the
        last view is dropped: it must never become somebody else's, nor vanish, under a copy.
        """
        with self._staging_changed:
            if self._closed:
                return
            self._closed = True
            self._staging_changed.notify_all()
        self._stop.set()
        if self._prefaulter is not None:
            self._prefaulter.join()
        self._view.release()
        freed = self._shared is None or self._shared.close()
        try:
            self._map.close()
        except BufferError:
            freed = False
        if not freed:
            _log.info("arena of %d bytes: views are still in use; freed with the last one", self.size_bytes)

    def _take_back(self, index: int) -> None:
        with self._staging_changed:
            self._free_staging.append(index)
            self._staging_changed.notify()

    def _populate(self, step_bytes: int) -> None:
        for mapping in self._filled:
            if not self._populate_one(mapping, step_bytes):
                return

    def _populate_one(self, mapping: mmap.mmap, step_bytes: int) -> bool:
        """Bring in the pages of one mapping; False if that was stopped."""
        size_bytes = len(mapping)
        # Pins the address; dropped at the end, or `close` could not unmap.
        anchor = ctypes.c_char.from_buffer(mapping)
        bring_in = _populate_write
        try:
            for start in range(0, size_bytes, step_bytes):
                length = min(step_bytes, size_bytes - start)
                if self._stop.is_set():
                    return False
                problem = bring_in(ctypes.addressof(anchor) + start, length)
                if problem == errno.EINVAL and bring_in is _populate_write:
                    bring_in = _lock_and_unlock
                    problem = bring_in(ctypes.addressof(anchor) + start, length)
                if problem:
                    _log.warning(
                        "prefault stopped at %d of %d bytes: %s; first copies will be slower",
                        start,
                        size_bytes,
                        errno.errorcode.get(problem, problem),
                    )
                    return False
            return True
        finally:
            del anchor


def _mapping(size_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"arena: the system does not map {size_bytes} bytes ({error}); lower the arena budget"
        ) from error
    _advise(mapping)
    return mapping


def _advise(mapping: mmap.mmap) -> None:
    # Huge pages: fewer faults and TLB misses. No dump: a crash must not write prompts to disk.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        try:
            mapping.madvise(getattr(mmap, advice))
        except (AttributeError, OSError) as error:
            _log.info("arena: %s is not available (%s)", advice, error)


_libc = ctypes.CDLL(None, use_errno=True)


# Through ctypes, which releases the GIL for the call; mmap.madvise does not.
def _populate_write(address: int, length: int) -> int:
    """Bring in pages for writing; the errno, or 0."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def _lock_and_unlock(address: int, length: int) -> int:
    """The same for kernels before 5.14: locking a private writable page brings it in, content kept."""
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)):
        return ctypes.get_errno()
    failed = _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(length))
    return ctypes.get_errno() if failed else 0
