"""The scheduler's index: which frames are where, in what state, pinned by whom.

It is the truth for node-local tiers: it hands out arena slots and disk places and decides what
is evicted, so a lookup is a dictionary walk with no I/O. It runs in the scheduler's process, on
its thread, and calls nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstow.errors import ConfigError, InvariantError
from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.lifecycle.boundary import BoundarySearch, Denied
from kvstow.lifecycle.eviction import RecencyOrder
from kvstow.lifecycle.inventory import adopt
from kvstow.lifecycle.messages import NO_SLOT, Hello, Slot, Tier
from kvstow.lifecycle.tables import Copy, Entry, GroupTable
from kvstow.lifecycle.tails import Tails
from kvstow.metrics import Metric, Recorder


class Directory:
    """Index, space and pins of the node-local tiers of one engine.

    Args:
        recorder: counts evictions and what is in use.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tables: list[GroupTable] = []
        self._tails = Tails(())
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
        adoptions = adopt(hellos)
        for index, rule in enumerate(hellos[0].rules):
            slots = min(hello.arena_slots[index] for hello in hellos)
            frames = min(hello.disk_frames[index] for hello in hellos)
            table = GroupTable(GroupId(index), rule, slots, frames)
            for ref in adoptions[index].keep:
                table.entry(ref).disk = Copy.READY
                table.disk_order.add(ref.chunk)
            table.disk_frames = len(adoptions[index].keep)
            self._removes.extend(adoptions[index].remove)
            self._tables.append(table)
        self._tails = Tails(self._tables)
        self._tails.find()

    # ---- lookup ------------------------------------------------------------------------

    def held_until(
        self, chunks: Sequence[ChunkId], start: int, stop: int, denied: Denied
    ) -> tuple[int, bool]:
        """The largest boundary up to ``stop`` at which every group has what it needs.

        What lies before chunk ``start`` is the engine's own and not asked for; the image of a
        STATE group at the boundary always is.

        Returns:
            The boundary, in chunks, ``start`` if there is none above it; and whether it would be
            larger if the copies on their way from disk into the arena were there (ask again).
            Changes nothing.
        """
        search = BoundarySearch(self._tables, chunks, start, denied, disk_usable=self.disk_usable)
        return search.run(stop)

    def is_kept(self, group: GroupId, chunk: ChunkId) -> bool:
        """Whether ``group`` has a copy of the frame that ``chunk`` names, or one being made."""
        entry = self._tables[group].entries.get(chunk)
        return entry is not None and not entry.is_gone

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

    def pin(self, chunks: Sequence[ChunkId], boundary: int) -> list[ChunkRef]:
        """Keep what exists of what a resume at ``boundary`` needs from eviction; undo with `unpin`."""
        pinned: list[ChunkRef] = []
        for table, needed in self._needed(chunks, boundary):
            for chunk in needed:
                entry = table.entries.get(chunk)
                if entry is not None:
                    entry.pins += 1
                    pinned.append(entry.ref)
        return pinned

    def unpin(self, refs: Iterable[ChunkRef]) -> None:
        """Undo one `pin`."""
        for ref in refs:
            table = self._tables[ref.group]
            entry = table.entries.get(ref.chunk)
            if entry is None or entry.pins <= 0:
                raise InvariantError(f"chunk {ref.chunk.hex()[:16]} is unpinned but not pinned")
            entry.pins -= 1
            if entry.arena is Copy.DOOMED and not entry.pins:
                table.release_slot(entry)
            table.forget_if_empty(entry)

    def touch(self, chunks: Sequence[ChunkId], boundary: int) -> None:
        """Note that what a resume at ``boundary`` needs was used together.

        Windows and images of other boundaries are not touched: those that nobody resumes at age.
        Nor are chunks that lead to no image.
        """
        for table, needed in self._needed(chunks, boundary):
            deepest_first = self._tails.of_use(needed)[::-1]
            table.arena_order.touch_prefix(deepest_first)
            table.disk_order.touch_prefix(deepest_first)

    def retire(self, chunks: Sequence[ChunkId]) -> None:
        """Note that a request has ended: where states are kept, what lies past its last goes first."""
        self._tails.retire(chunks)

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
        is_new = known is None or known.is_gone
        if is_new:
            self._tails.go_on(ref)  # first of all: what leads there must not make room for it
        if not table.free_slots and not self._evict_arena(table):
            return NO_SLOT
        entry = table.entry(ref)
        table.take_slot(entry, promoting=promoting)
        if is_new:
            # An image that made room may have been the last that these chunks led to.
            self._tails.go_on(ref)
        return entry.slot

    def arena_filled(self, ref: ChunkRef) -> None:
        """Every rank has the frame of ``ref`` in its slot: READY."""
        table = self._tables[ref.group]
        entry = self._filling_arena(table, ref)
        entry.arena = Copy.READY
        entry.promoting = False
        self._enter(table.arena_order, ref.chunk)

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
            entry.promoting = False
        else:
            table.release_slot(entry, busy_ranks)
        table.forget_if_empty(entry)

    def slot_freed(self, group: GroupId, slot: Slot) -> None:
        """A reader that kept ``slot`` busy on one rank came back."""
        self._tables[group].slot_freed(slot)

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
        self._enter(table.disk_order, ref.chunk)
        self.unpin((ref,))

    def disk_failed(self, ref: ChunkRef) -> None:
        """Some rank has not; whatever the others wrote is removed."""
        table = self._tables[ref.group]
        entry = self._filling_disk(table, ref)
        entry.disk = Copy.NONE
        entry.refused = entry.stranded
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
        self._left(table, entry)

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

    def take_stranded(self) -> list[ChunkRef]:
        """Frames that are to be written for the sake of those on disk that build on them; each once."""
        stranded = [ref for table in self._tables for ref in table.stranded]
        for table in self._tables:
            table.stranded.clear()
        return stranded

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

    def filling(self) -> int:
        """All copies that are being made, in all groups and tiers; 0 when nothing is in flight."""
        return sum(
            (entry.arena is Copy.FILLING) + (entry.disk is Copy.FILLING)
            for table in self._tables
            for entry in table.entries.values()
        )

    # ---- inside ------------------------------------------------------------------------

    def _needed(
        self, chunks: Sequence[ChunkId], boundary: int
    ) -> Iterator[tuple[GroupTable, Sequence[ChunkId]]]:
        """What a resume at ``boundary`` needs of each group; nothing at boundary 0."""
        for table in self._tables:
            needed = table.rule.needed(boundary)
            yield table, chunks[needed.start : needed.stop]

    def _evict_arena(self, table: GroupTable) -> bool:
        victim = table.arena_order.victim(table.may_leave_arena)
        if victim is None:
            return False
        entry = table.entries[victim]
        table.arena_order.discard(victim)
        table.release_slot(entry)
        self._left(table, entry)
        self._recorder.count(Metric.EVICTED_ARENA)
        return True

    def _evict_disk(self, table: GroupTable) -> bool:
        victim = table.disk_order.victim(table.may_leave_disk)
        if victim is None:
            return False
        entry = table.entries[victim]
        self._drop_disk(table, entry)
        self._left(table, entry)
        self._recorder.count(Metric.EVICTED_DISK)
        return True

    def _left(self, table: GroupTable, entry: Entry) -> None:
        """A copy of ``entry`` was given up."""
        table.forget_if_empty(entry)
        if not entry.is_gone:
            return
        chunk = entry.ref.chunk
        if table.is_paged:
            # The windows and images that the lost chunk names serve no boundary any more: each one
            # that needs them lies past the chunk. Those that later chunks name need no look: a
            # chunk is evicted after all that follow it, and when a bad one is dropped from under
            # them, it may be saved again, and they are of use as before.
            self._drop_idle(chunk, (GroupKind.WINDOW, GroupKind.STATE))
        elif table.rule.kind is GroupKind.STATE:
            # A boundary needs the images of all groups; then the chunks that led to it.
            self._drop_idle(chunk, (GroupKind.STATE,))
            self._tails.end(chunk)

    def _drop_idle(self, chunk: ChunkId, kinds: tuple[GroupKind, ...]) -> None:
        """Drop what groups of these kinds keep under ``chunk``, if nobody reads or makes it."""
        for table in self._tables:
            entry = table.entries.get(chunk) if table.rule.kind in kinds else None
            if entry is None or not entry.is_idle:
                continue
            if entry.arena is Copy.READY:
                table.arena_order.discard(chunk)
                table.release_slot(entry)
            if entry.disk is Copy.READY:
                self._drop_disk(table, entry)
            table.forget_if_empty(entry)

    def _enter(self, order: RecencyOrder, chunk: ChunkId) -> None:
        """A copy is READY: the most recent, unless nobody can resume with it."""
        order.add(chunk)
        if self._tails.is_spent(chunk):
            order.demote(chunk)

    def _drop_disk(self, table: GroupTable, entry: Entry) -> None:
        table.disk_order.discard(entry.ref.chunk)
        table.disk_frames -= 1
        entry.disk = Copy.NONE
        self._removes.append(entry.ref)

    @staticmethod
    def _filling_arena(table: GroupTable, ref: ChunkRef) -> Entry:
        entry = table.entries.get(ref.chunk)
        if entry is None or entry.arena is not Copy.FILLING:
            raise InvariantError(f"chunk {ref.chunk.hex()[:16]} ends an arena copy that never began")
        return entry

    @staticmethod
    def _filling_disk(table: GroupTable, ref: ChunkRef) -> Entry:
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
    for name in ("namespace", "chunk_tokens", "rules", "version"):
        for hello in hellos[1:]:
            mine, theirs = getattr(first, name), getattr(hello, name)
            if mine != theirs:
                raise ConfigError(
                    f"rank {hello.rank} has {name}={theirs!r}, rank {first.rank} has {mine!r}; "
                    "start every rank with the same model, settings and kvstow version"
                )
