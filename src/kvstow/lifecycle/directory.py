"""The scheduler's index: which chunks are where, in what state, pinned by whom.

It is the truth for node-local tiers: it hands out arena slots and disk places and decides what
is evicted, so a lookup is a dictionary walk with no I/O. It runs in the scheduler's process, on
its thread, and calls nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

from kvstow.errors import ConfigError, InvariantError
from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.eviction import RecencyOrder
from kvstow.lifecycle.inventory import adopt
from kvstow.lifecycle.messages import NO_SLOT, Hello, Slot, Tier
from kvstow.metrics import Metric, Recorder


class Copy(Enum):
    """The state of one tier's copy of a chunk, over all ranks together."""

    NONE = 0
    FILLING = 1
    READY = 2
    DOOMED = 3  # bad, but still being read: the slot is free when the last pin goes


_GONE = (Copy.NONE, Copy.DOOMED)


class _Entry:
    """One chunk of one group: its copies and its pins."""

    __slots__ = ("arena", "disk", "pins", "promoting", "ref", "slot")

    def __init__(self, ref: ChunkRef) -> None:
        self.ref = ref
        self.slot: Slot = NO_SLOT
        self.arena = Copy.NONE
        self.disk = Copy.NONE
        self.promoting = False
        self.pins = 0


class _GroupTable:
    """All chunks of one group."""

    def __init__(self, group: GroupId, slots: int, disk_frames: int) -> None:
        self.group = group
        self.entries: dict[ChunkId, _Entry] = {}
        # By parent, whether or not the parent is here: one that was dropped may come back.
        self.followers: dict[ChunkId, int] = {}
        self.free_slots = [Slot(slot) for slot in range(slots - 1, -1, -1)]
        self.slots = slots
        self.disk_frames_max = disk_frames
        self.disk_frames = 0
        self.arena_order = RecencyOrder()
        self.disk_order = RecencyOrder()
        self.quarantined: dict[Slot, int] = {}

    def entry(self, ref: ChunkRef) -> _Entry:
        """The entry of ``ref``, made if it is not there."""
        entry = self.entries.get(ref.chunk)
        if entry is None:
            entry = _Entry(ref)
            self.entries[ref.chunk] = entry
            self.followers[ref.parent] = self.followers.get(ref.parent, 0) + 1
        return entry

    def forget_if_empty(self, entry: _Entry) -> None:
        """Delete an entry that has no copy left."""
        if entry.arena is not Copy.NONE or entry.disk is not Copy.NONE or entry.pins:
            return
        del self.entries[entry.ref.chunk]
        left = self.followers[entry.ref.parent] - 1
        if left:
            self.followers[entry.ref.parent] = left
        else:
            del self.followers[entry.ref.parent]

    def may_leave_arena(self, chunk: ChunkId) -> bool:
        """Not pinned, and not the last copy of a chunk that others follow."""
        entry = self.entries[chunk]
        return not entry.pins and (entry.disk is Copy.READY or chunk not in self.followers)

    def may_leave_disk(self, chunk: ChunkId) -> bool:
        """Not pinned, and not the last copy of a chunk that others follow."""
        entry = self.entries[chunk]
        return not entry.pins and (entry.arena is Copy.READY or chunk not in self.followers)

    def release_slot(self, entry: _Entry, busy_ranks: int = 0) -> None:
        """Take the arena copy from ``entry``; its slot is free, or waits for ``busy_ranks``."""
        if busy_ranks:
            self.quarantined[entry.slot] = busy_ranks
        else:
            self.free_slots.append(entry.slot)
        entry.slot = NO_SLOT
        entry.arena = Copy.NONE
        entry.promoting = False


class Directory:
    """Index, space and pins of the node-local tiers of one engine.

    Args:
        recorder: counts evictions and what is in use.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tables: list[_GroupTable] = []
        self._removes: list[ChunkRef] = []
        self._world_size = 0
        self.disk_usable = True

    # ---- start -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether every rank has said hello. Until then every lookup is a miss."""
        return bool(self._tables)

    @property
    def world_size(self) -> int:
        """Ranks whose reports make a copy READY."""
        return self._world_size

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        """The groups that are kept."""
        return tuple(table.group for table in self._tables)

    def open(self, hellos: Sequence[Hello]) -> None:
        """Take over what the ranks have; lookups work from here on.

        Raises:
            ConfigError: ranks are missing, or disagree on what they keep.
        """
        _check_agreement(hellos)
        self._world_size = len(hellos)
        for index in range(len(hellos[0].frame_bytes)):
            group = GroupId(index)
            slots = min(hello.arena_slots[index] for hello in hellos)
            frames = min(hello.disk_frames[index] for hello in hellos)
            table = _GroupTable(group, slots, frames)
            adoption = adopt(hellos, group, frames)
            for ref in adoption.keep:
                table.entry(ref).disk = Copy.READY
                table.disk_order.add(ref.chunk)
            table.disk_frames = len(adoption.keep)
            self._removes.extend(adoption.remove)
            self._tables.append(table)

    # ---- lookup ------------------------------------------------------------------------

    def held_until(
        self, chunks: Sequence[ChunkId], start: int, stop: int, denied: AbstractSet[ChunkId]
    ) -> tuple[int, bool]:
        """How far ``chunks[start:stop]`` can be loaded, in every group.

        Returns:
            The index after the last loadable chunk, and whether the next one is on its way
            from disk into the arena (ask again). Changes nothing.
        """
        # A long prompt walks this loop hundreds of times: a name looked up once is not looked up there.
        ready, disk_usable = Copy.READY, self.disk_usable
        for table in self._tables:
            find = table.entries.get
            index = start
            for chunk in chunks[start:stop]:
                entry = find(chunk)
                if entry is None or (denied and chunk in denied):
                    break
                if entry.arena is not ready and not (
                    disk_usable and entry.disk is ready and not entry.promoting
                ):
                    break
                index += 1
            stop = index
        pending = stop < len(chunks) and any(
            (entry := table.entries.get(chunks[stop])) is not None and entry.promoting
            for table in self._tables
        )
        return stop, pending

    def is_kept(self, chunk: ChunkId) -> bool:
        """Whether every group has a copy of ``chunk``, or one being made."""
        for table in self._tables:
            entry = table.entries.get(chunk)
            if entry is None or (entry.arena in _GONE and entry.disk in _GONE):
                return False
        return True

    def tier_of(self, ref: ChunkRef) -> Tier | None:
        """The fastest tier with a READY copy of ``ref``."""
        entry = self._tables[ref.group].entries.get(ref.chunk)
        if entry is None:
            return None
        if entry.arena is Copy.READY:
            return Tier.ARENA
        return Tier.DISK if entry.disk is Copy.READY and self.disk_usable else None

    def slot_of(self, ref: ChunkRef) -> Slot:
        """The arena slot of ``ref``, or `NO_SLOT`."""
        entry = self._tables[ref.group].entries.get(ref.chunk)
        return entry.slot if entry is not None else NO_SLOT

    # ---- pins and recency --------------------------------------------------------------

    def pin_prefix(self, chunks: Sequence[ChunkId], stop: int) -> list[ChunkRef]:
        """Keep what exists of ``chunks[:stop]`` from eviction; undo with `unpin`."""
        pinned: list[ChunkRef] = []
        for table in self._tables:
            for chunk in chunks[:stop]:
                entry = table.entries.get(chunk)
                if entry is not None:
                    entry.pins += 1
                    pinned.append(entry.ref)
        return pinned

    def unpin(self, refs: Iterable[ChunkRef]) -> None:
        """Undo one `pin_prefix`."""
        for ref in refs:
            table = self._tables[ref.group]
            entry = table.entries.get(ref.chunk)
            if entry is None or entry.pins <= 0:
                raise InvariantError(f"chunk {ref.chunk.hex()[:16]} is unpinned but not pinned")
            entry.pins -= 1
            if entry.arena is Copy.DOOMED and not entry.pins:
                table.release_slot(entry)
            table.forget_if_empty(entry)

    def touch_prefix(self, chunks: Sequence[ChunkId], stop: int) -> None:
        """Note that ``chunks[:stop]`` were used together."""
        deepest_first = chunks[stop - 1 :: -1] if stop else ()
        for table in self._tables:
            table.arena_order.touch_prefix(deepest_first)
            table.disk_order.touch_prefix(deepest_first)

    # ---- arena space -------------------------------------------------------------------

    def reserve_arena(self, ref: ChunkRef, *, promoting: bool = False) -> Slot:
        """Take a slot for ``ref``, evicting if need be; its copy is FILLING from here.

        Returns:
            The slot, or `NO_SLOT` if none can be had or a copy exists already.
        """
        table = self._tables[ref.group]
        known = table.entries.get(ref.chunk)
        if known is not None and known.arena is not Copy.NONE:
            return NO_SLOT
        if not table.free_slots and not self._evict_arena(table):
            return NO_SLOT
        entry = table.entry(ref)
        entry.slot = table.free_slots.pop()
        entry.arena = Copy.FILLING
        entry.promoting = promoting
        return entry.slot

    def arena_filled(self, ref: ChunkRef) -> None:
        """Every rank has the frame of ``ref`` in its slot: READY."""
        table = self._tables[ref.group]
        entry = self._filling_arena(table, ref)
        entry.arena = Copy.READY
        entry.promoting = False
        table.arena_order.add(ref.chunk)

    def arena_failed(self, ref: ChunkRef, busy_ranks: int = 0) -> None:
        """Some rank has not: the slot is free again, or waits for those that may still use it.

        Args:
            ref: the chunk.
            busy_ranks: ranks on which a lost reader may still write the slot.
        """
        table = self._tables[ref.group]
        entry = self._filling_arena(table, ref)
        if entry.disk is Copy.FILLING and not busy_ranks:
            entry.arena = Copy.DOOMED  # a rank on which the save went well may be writing it
        else:
            table.release_slot(entry, busy_ranks)
        table.forget_if_empty(entry)

    def slot_freed(self, group: GroupId, slot: Slot) -> None:
        """A reader that kept ``slot`` busy on one rank came back."""
        table = self._tables[group]
        left = table.quarantined.get(slot, 0) - 1
        if left > 0:
            table.quarantined[slot] = left
        elif table.quarantined.pop(slot, None) is not None:
            table.free_slots.append(slot)

    # ---- disk space --------------------------------------------------------------------

    def reserve_disk(self, ref: ChunkRef) -> bool:
        """Take a place on disk for a chunk that is in the arena (or FILLING there).

        The arena copy is pinned until `disk_filled` or `disk_failed`.
        """
        table = self._tables[ref.group]
        entry = table.entries.get(ref.chunk)
        if entry is None or entry.arena not in (Copy.FILLING, Copy.READY) or entry.disk is not Copy.NONE:
            return False
        if table.disk_frames >= table.disk_frames_max and not self._evict_disk(table):
            return False
        table.disk_frames += 1
        entry.disk = Copy.FILLING
        entry.pins += 1
        return True

    def disk_filled(self, ref: ChunkRef) -> None:
        """Every rank has written ``ref``: READY."""
        table = self._tables[ref.group]
        entry = self._filling_disk(table, ref)
        entry.disk = Copy.READY
        table.disk_order.add(ref.chunk)
        self.unpin((ref,))

    def disk_failed(self, ref: ChunkRef) -> None:
        """Some rank has not; whatever the others wrote is removed."""
        table = self._tables[ref.group]
        entry = self._filling_disk(table, ref)
        entry.disk = Copy.NONE
        table.disk_frames -= 1
        self._removes.append(ref)
        self.unpin((ref,))

    def drop(self, ref: ChunkRef, tier: Tier) -> None:
        """Forget a READY copy that turned out bad or gone; whoever pins it may end in peace."""
        table = self._tables[ref.group]
        entry = table.entries.get(ref.chunk)
        if entry is None:
            return
        if tier is Tier.DISK and entry.disk is Copy.READY:
            self._drop_disk(table, entry)
        elif tier is Tier.ARENA and entry.arena is Copy.READY:
            table.arena_order.discard(ref.chunk)
            if entry.pins:
                entry.arena = Copy.DOOMED
            else:
                table.release_slot(entry)
        table.forget_if_empty(entry)

    def forget_all(self) -> bool:
        """Drop every copy that nobody uses; whether nothing is left."""
        for table in self._tables:
            for chunk in table.arena_order.oldest_first():
                if not table.entries[chunk].pins:
                    self.drop(table.entries[chunk].ref, Tier.ARENA)
            for chunk in table.disk_order.oldest_first():
                if not table.entries[chunk].pins:
                    self.drop(table.entries[chunk].ref, Tier.DISK)
        return not any(table.entries for table in self._tables)

    def take_removes(self) -> tuple[ChunkRef, ...]:
        """Frames that every rank is to delete from disk; each is named once."""
        removes = tuple(self._removes)
        self._removes.clear()
        return removes

    # ---- what is in use ----------------------------------------------------------------

    def arena_slots(self, group: GroupId) -> int:
        """Slots of ``group`` on every rank."""
        return self._tables[group].slots

    def arena_in_use(self, group: GroupId) -> int:
        """Slots of ``group`` that hold a frame, are being filled, or wait for a lost reader."""
        return self._tables[group].slots - len(self._tables[group].free_slots)

    def disk_in_use(self, group: GroupId) -> int:
        """Frames of ``group`` on disk or on the way there."""
        return self._tables[group].disk_frames

    def pins(self) -> int:
        """All pins held; 0 when nothing is in flight."""
        return sum(entry.pins for table in self._tables for entry in table.entries.values())

    # ---- inside ------------------------------------------------------------------------

    def _evict_arena(self, table: _GroupTable) -> bool:
        victim = table.arena_order.victim(table.may_leave_arena)
        if victim is None:
            return False
        entry = table.entries[victim]
        table.arena_order.discard(victim)
        table.release_slot(entry)
        table.forget_if_empty(entry)
        self._recorder.count(Metric.EVICTED_ARENA)
        return True

    def _evict_disk(self, table: _GroupTable) -> bool:
        victim = table.disk_order.victim(table.may_leave_disk)
        if victim is None:
            return False
        entry = table.entries[victim]
        self._drop_disk(table, entry)
        table.forget_if_empty(entry)
        self._recorder.count(Metric.EVICTED_DISK)
        return True

    def _drop_disk(self, table: _GroupTable, entry: _Entry) -> None:
        table.disk_order.discard(entry.ref.chunk)
        table.disk_frames -= 1
        entry.disk = Copy.NONE
        self._removes.append(entry.ref)

    @staticmethod
    def _filling_arena(table: _GroupTable, ref: ChunkRef) -> _Entry:
        entry = table.entries.get(ref.chunk)
        if entry is None or entry.arena is not Copy.FILLING:
            raise InvariantError(f"chunk {ref.chunk.hex()[:16]} ends an arena copy that never began")
        return entry

    @staticmethod
    def _filling_disk(table: _GroupTable, ref: ChunkRef) -> _Entry:
        entry = table.entries.get(ref.chunk)
        if entry is None or entry.disk is not Copy.FILLING:
            raise InvariantError(f"chunk {ref.chunk.hex()[:16]} ends a disk copy that never began")
        return entry


def _check_agreement(hellos: Sequence[Hello]) -> None:
    if not hellos:
        raise ConfigError("no rank said hello; the engine's executor must collect handshake metadata")
    first = hellos[0]
    ranks = sorted(hello.rank for hello in hellos)
    if ranks != list(range(first.world_size)):
        raise ConfigError(
            f"ranks {ranks} said hello, the engine has {first.world_size}: 0..{first.world_size - 1}"
        )
    for name in ("namespace", "chunk_tokens", "block_tokens", "version"):
        for hello in hellos[1:]:
            mine, theirs = getattr(first, name), getattr(hello, name)
            if mine != theirs:
                raise ConfigError(
                    f"rank {hello.rank} has {name}={theirs!r}, rank {first.rank} has {mine!r}; "
                    "start every rank with the same model, settings and kvstow version"
                )
