"""Slots that every rank of an engine sees: of groups of which all ranks hold the same bytes.

The first rank makes the memory and is the only one that writes it; the others map it to read. It
has no name (memfd), so it is gone with the last process that has it, however that ends. How the
others get it: `kvstow.stores.handover`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from itertools import accumulate

from kvstow.errors import ConfigError, InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.framing import HEADER_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedSlots:
    """The slots of some groups, in memory of several processes. Any thread may use it.

    What a slot holds and when it may be reused is the directory's decision, as in
    `kvstow.stores.arena.Arena`: a frame is READY, and read, only after every rank has reported.

    Attributes:
        slots: frames held, by group.
        frame_bytes: bytes of one frame, by group.
        is_first: whether this rank is the one that writes them.
        size_bytes: length of the mapping.
        descriptor: the memory's, to be handed over.
        mapping: the memory; for `kvstow.stores.arena.Arena`.
    """

    def __init__(
        self,
        descriptor: int,
        slots: Mapping[GroupId, int],
        frame_bytes: Mapping[GroupId, int],
        *,
        first: bool,
    ) -> None:
        """Map ``descriptor``, which is taken over; use `make` or `attach`.

        Raises:
            ConfigError: the system does not give so much memory.
            InvariantError: the sizes make no sense together, or with the memory.
        """
        self.descriptor = descriptor
        self.slots = dict(slots)
        self.frame_bytes = dict(frame_bytes)
        self.is_first = first
        self.size_bytes = _size_bytes(self.slots, self.frame_bytes)
        group_bytes = [count * self.frame_bytes[group] for group, count in self.slots.items()]
        self._starts = dict(zip(self.slots, (0, *accumulate(group_bytes)), strict=False))
        found_bytes = os.fstat(descriptor).st_size
        if found_bytes != self.size_bytes:
            raise InvariantError(f"shared slots of {self.size_bytes} bytes in memory of {found_bytes}")
        access = mmap.PROT_READ | mmap.PROT_WRITE if first else mmap.PROT_READ
        try:
            self.mapping = mmap.mmap(descriptor, self.size_bytes, flags=mmap.MAP_SHARED, prot=access)
        except OSError as error:
            raise ConfigError(
                f"arena: the system does not map {self.size_bytes} bytes ({error}); lower the arena budget"
            ) from error
        self._view = memoryview(self.mapping)
        self._closed = False

    @classmethod
    def make(cls, slots: Mapping[GroupId, int], frame_bytes: Mapping[GroupId, int]) -> SharedSlots:
        """Memory for the first rank to fill; pages are given by the system when first touched.

        Args:
            slots: frames to hold, by group.
            frame_bytes: bytes of one frame, by group; multiples of `HEADER_BYTES`.

        Raises:
            ConfigError: the system does not give so much memory.
            InvariantError: the sizes make no sense together.
        """
        size_bytes = _size_bytes(slots, frame_bytes)
        try:
            descriptor = os.memfd_create("kvstow-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.truncate(descriptor, size_bytes)
                # Nobody can take memory away from under a reader.
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                return cls(descriptor, slots, frame_bytes, first=True)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ConfigError(
                f"arena: the system does not give {size_bytes} bytes of shared memory ({error}); "
                "lower the arena budget"
            ) from error

    @classmethod
    def attach(
        cls, descriptor: int, slots: Mapping[GroupId, int], frame_bytes: Mapping[GroupId, int]
    ) -> SharedSlots:
        """The first rank's memory, to read. ``descriptor`` is taken over, also when this fails.

        Raises:
            ConfigError: the system does not map so much memory.
            InvariantError: the sizes are not those of the memory.
        """
        try:
            return cls(descriptor, slots, frame_bytes, first=False)
        except BaseException:
            os.close(descriptor)
            raise

    def frame(self, group: GroupId, slot: int) -> memoryview:
        """The memory of one slot: bytes [frame bytes of the group], writable on the first rank only.

        The view stays valid until it is dropped, also past `close`.

        Raises:
            InvariantError: there is no such group or slot, or this is closed.
        """
        if self._closed:
            raise InvariantError("the shared slots are closed")
        if not 0 <= slot < self.slots.get(group, 0):
            raise InvariantError(f"group {group} slot {slot} is outside the shared slots {self.slots}")
        size = self.frame_bytes[group]
        start = self._starts[group] + slot * size
        return self._view[start : start + size]

    def close(self) -> bool:
        """Give up this process' share; whether no view is in use any more. Idempotent.

        Memory that a view still shows is given up when the last view is dropped.
        """
        if self._closed:
            return True
        self._closed = True
        os.close(self.descriptor)
        self._view.release()
        try:
            self.mapping.close()
        except BufferError:
            return False
        return True


def _size_bytes(slots: Mapping[GroupId, int], frame_bytes: Mapping[GroupId, int]) -> int:
    for group, count in slots.items():
        size = frame_bytes.get(group, 0)
        if count <= 0 or size <= 0 or size % HEADER_BYTES:
            raise InvariantError(f"group {group}: {count} shared slots of {size} bytes")
    if not slots:
        raise InvariantError("no group to share slots of")
    return sum(count * frame_bytes[group] for group, count in slots.items())
