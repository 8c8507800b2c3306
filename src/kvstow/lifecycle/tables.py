"""One group's part of the directory: its frames, their copies and pins, its slots and disk places."""

from __future__ import annotations

from enum import Enum

from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.eviction import RecencyOrder
from kvstow.lifecycle.messages import NO_SLOT, Slot


class Copy(Enum):
    """The state of one tier's copy of a frame, over all ranks together."""

    NONE = 0
    FILLING = 1
    READY = 2
    DOOMED = 3  # bad, but still being read: the slot is free when the last pin goes


GONE = (Copy.NONE, Copy.DOOMED)


class Entry:
    """One frame: its copies and its pins.

    Attributes:
        spent: see `kvstow.lifecycle.tails`; set with `GroupTable.mark_spent`.
        stranded, refused: see `GroupTable.may_leave_arena`.
    """

    __slots__ = ("arena", "disk", "pins", "promoting", "ref", "refused", "slot", "spent", "stranded")

    def __init__(self, ref: ChunkRef) -> None:
        self.ref = ref
        self.slot: Slot = NO_SLOT
        self.arena = Copy.NONE
        self.disk = Copy.NONE
        self.promoting = False
        self.pins = 0
        self.spent = False
        self.stranded = False
        self.refused = False

    @property
    def is_gone(self) -> bool:
        """Whether there is no copy, nor one being made."""
        return self.arena in GONE and self.disk in GONE

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads a copy or makes one."""
        return not self.pins and Copy.FILLING not in (self.arena, self.disk)


class GroupTable:
    """All frames of one group.

    Args:
        group: the group.
        rule: what a resume needs of it.
        slots: arena slots on every rank.
        disk_frames: places on disk on every rank.
    """

    def __init__(self, group: GroupId, rule: ResumeRule, slots: int, disk_frames: int) -> None:
        self.group = group
        self.rule = rule
        self.is_paged = rule.kind is GroupKind.PAGED
        self.entries: dict[ChunkId, Entry] = {}
        # By parent, whether or not the parent is here: one that was dropped may come back.
        self.followers: dict[ChunkId, int] = {}
        self.spent_followers: dict[ChunkId, int] = {}
        self.arena_followers: dict[ChunkId, int] = {}  # those that have a slot
        self.stranded: list[ChunkRef] = []
        self.free_slots = [Slot(slot) for slot in range(slots - 1, -1, -1)]
        self.slots = slots
        self.disk_frames_max = disk_frames
        self.disk_frames = 0
        self.arena_order = RecencyOrder()
        self.disk_order = RecencyOrder()
        self.quarantined: dict[Slot, int] = {}

    def entry(self, ref: ChunkRef) -> Entry:
        """The entry of ``ref``, made if it is not there."""
        entry = self.entries.get(ref.chunk)
        if entry is None:
            entry = Entry(ref)
            self.entries[ref.chunk] = entry
            _add(self.followers, ref.parent, 1)
        return entry

    def forget_if_empty(self, entry: Entry) -> None:
        """Delete an entry that has no copy left."""
        if entry.arena is not Copy.NONE or entry.disk is not Copy.NONE or entry.pins:
            return
        self.mark_spent(entry, spent=False)
        del self.entries[entry.ref.chunk]
        _add(self.followers, entry.ref.parent, -1)

    def mark_spent(self, entry: Entry, *, spent: bool) -> None:
        """Note whether any image can be reached from ``entry``."""
        if entry.spent is not spent:
            entry.spent = spent
            _add(self.spent_followers, entry.ref.parent, 1 if spent else -1)

    def is_followed(self, chunk: ChunkId) -> bool:
        """Whether a chunk follows ``chunk`` that is not spent."""
        return self.followers.get(chunk, 0) > self.spent_followers.get(chunk, 0)

    def may_leave_arena(self, chunk: ChunkId) -> bool:
        """Not pinned, and not the last copy of a chunk that others build on.

        One whose followers are on disk only, for its own write failed or was left out, is stranded: it
        is to be written now, once. If that fails too it goes when its turn comes: else it would keep
        its slot for as long as they keep their places.
        """
        entry = self.entries[chunk]
        if entry.pins:
            return False
        if entry.disk is Copy.READY or not self._is_built_on(chunk):
            return True
        if chunk in self.arena_followers:
            return False
        if not entry.stranded:
            entry.stranded = True
            self.stranded.append(entry.ref)
        return entry.refused

    def may_leave_disk(self, chunk: ChunkId) -> bool:
        """Not pinned, and not the last copy of a chunk that others build on."""
        entry = self.entries[chunk]
        return not entry.pins and (entry.arena is Copy.READY or not self._is_built_on(chunk))

    def _is_built_on(self, chunk: ChunkId) -> bool:
        # A window or an image needs none before it to be of use.
        return self.is_paged and chunk in self.followers

    def take_slot(self, entry: Entry, *, promoting: bool) -> None:
        """Give ``entry`` a free slot, to be filled."""
        entry.slot = self.free_slots.pop()
        entry.arena = Copy.FILLING
        entry.promoting = promoting
        _add(self.arena_followers, entry.ref.parent, 1)

    def release_slot(self, entry: Entry, busy_ranks: int = 0) -> None:
        """Take the arena copy from ``entry``; its slot is free, or waits for ``busy_ranks``."""
        if busy_ranks:
            self.quarantined[entry.slot] = busy_ranks
        else:
            self.free_slots.append(entry.slot)
        entry.slot = NO_SLOT
        entry.arena = Copy.NONE
        entry.promoting = False
        _add(self.arena_followers, entry.ref.parent, -1)

    def slot_freed(self, slot: Slot) -> None:
        """A reader that kept ``slot`` busy on one rank came back."""
        left = self.quarantined.get(slot, 0) - 1
        if left > 0:
            self.quarantined[slot] = left
        elif self.quarantined.pop(slot, None) is not None:
            self.free_slots.append(slot)


def _add(counts: dict[ChunkId, int], chunk: ChunkId, change: int) -> None:
    count = counts.get(chunk, 0) + change
    if count:
        counts[chunk] = count
    else:
        del counts[chunk]
