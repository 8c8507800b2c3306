"""The directory and its evictions through any history, against a model that looks at everything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from directory_model import DirectoryModel, Frame, needed
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lifecycle_bench import PAGED, STATE, chunk_ids, hello, refs, window

from kvstow.errors import InvariantError
from kvstow.keys.ids import ChunkRef
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.messages import NO_SLOT, Held, Tier
from kvstow.metrics import Recorder

# Windows of a half, of one and a half, and of two and a half chunks.
LAYOUTS = [
    (PAGED,),
    (PAGED, STATE),
    (PAGED, window(12)),
    (PAGED, PAGED, window(4)),
    (PAGED, window(12), STATE),
    (PAGED, STATE, STATE),
    (PAGED, PAGED, STATE),
    (STATE, window(20), PAGED),
]
SHARED = chunk_ids("shared", 2)
PROMPTS = [SHARED + chunk_ids("a", 3), SHARED + chunk_ids("b", 2), chunk_ids("c", 4)]

GROUP = st.integers(0, 2)
# A prompt and one of its chunks, as numbers: they are what a failing example shows.
Place = tuple[int, int]
PLACE = st.integers(0, len(PROMPTS) - 1).flatmap(
    lambda prompt: st.tuples(st.just(prompt), st.integers(0, len(PROMPTS[prompt]) - 1))
)


class DirectoryMachine(RuleBasedStateMachine):
    """One directory of one rank: what a planner may ask of it, in any order."""

    @initialize(
        rules=st.sampled_from(LAYOUTS),
        slots=st.integers(1, 6),
        disk_frames=st.integers(0, 6),
        found=st.lists(st.tuples(PLACE, GROUP, st.integers(0, 3)), max_size=5),
        gone=st.lists(st.tuples(PLACE, GROUP), max_size=2),
    )
    def open(
        self,
        rules: Sequence[ResumeRule],
        slots: int,
        disk_frames: int,
        found: list[tuple[Place, int, int]],
        gone: list[tuple[Place, int]],
    ) -> None:
        self.refs = {
            ref.chunk + bytes([group]): ref
            for group in range(len(rules))
            for chunks in PROMPTS
            for ref in refs(chunks, group)
        }
        self.directory = Directory(Recorder())
        self.model = DirectoryModel(rules, (slots,) * len(rules), (disk_frames,) * len(rules))
        self.pinned: list[list[ChunkRef]] = []
        self.steps = 0
        # Deeper is later: as if a prompt had been read once more, and its beginning not from disk.
        inventory = {
            self.ref((prompt, index), group): float(touched_s + index)
            for (prompt, last), group, touched_s in found
            for index in range(last + 1)
        }
        for place, group in gone:
            inventory.pop(self.ref(place, group), None)
        held = [Held(ref, touched_s) for ref, touched_s in inventory.items()]
        self.directory.open([hello(slots=slots, disk_frames=disk_frames, rules=rules, inventory=held)])
        removed = self.directory.take_removes()
        kept = [ref for ref in inventory if self.directory.tier_of(ref) is Tier.DISK]
        assert sorted(map(repr, [*kept, *removed])) == sorted(map(repr, inventory))
        # As `adopt` orders them: a chunk is as recent as what follows it, and a little later.
        for ref in sorted(kept, key=lambda ref: (self.model.latest(ref, inventory), -ref.index)):
            frame = self.model.added(ref)
            frame.disk = "ready"
            self.model.used(frame, Tier.DISK)
        self.model.found_tails()
        for frame in self.model.frames.values():
            if self.kind(frame.ref) is GroupKind.PAGED and frame.ref.index:
                assert any(
                    other.ref.chunk == frame.ref.parent for other in self.model.of_group(frame.ref.group)
                )

    # ---- arena -----------------------------------------------------------------------------

    @rule(place=PLACE)
    def save(self, place: Place) -> None:
        """All of a prompt's beginning, in every group, from the first chunk on."""
        prompt, last = place
        for index in range(last + 1):
            for ref in self.in_every_group((prompt, index)):
                if not self.directory.is_kept(ref.group, ref.chunk):
                    self.reserve_for_save((prompt, index), ref)
                    frame = self.model.find(ref)
                    if frame is not None and frame.arena == "filling":
                        self.fill_arena(frame)
        self.touch(place)

    @rule(place=PLACE)
    def save_and_write(self, place: Place) -> None:
        self.save(place)
        self.write(place)

    @rule(place=PLACE, group=GROUP)
    def begin_save(self, place: Place, group: int) -> None:
        self.reserve_for_save(place, self.ref(place, group))

    @rule(place=PLACE, group=GROUP)
    def begin_save_and_write(self, place: Place, group: int) -> None:
        self.begin_save(place, group)
        self.begin_write(place, group)

    @precondition(lambda self: self.some(arena="", disk="ready"))
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        """As for a load: the frame stays pinned as long as it is read."""
        frame = self.pick(data, self.some(arena="", disk="ready"))
        prompt = next(number for number, chunks in enumerate(PROMPTS) if frame.ref.chunk in chunks)
        self.pinned.append(self.pin(prompt, frame.ref.index + 1))
        self.reserve(frame.ref, promoting=True)

    @precondition(lambda self: self.some(arena="filling"))
    @rule(data=st.data())
    def arena_filled(self, data: st.DataObject) -> None:
        self.fill_arena(self.pick(data, self.some(arena="filling")))

    @precondition(lambda self: self.some(arena="filling"))
    @rule(data=st.data(), busy=st.integers(0, 2))
    def arena_failed(self, data: st.DataObject, busy: int) -> None:
        frame = self.pick(data, self.some(arena="filling"))
        self.directory.arena_failed(frame.ref, busy)
        if frame.disk == "filling" and not busy:
            frame.arena = "doomed"
        else:
            self.model.arena_left(frame, busy)

    @precondition(lambda self: self.model.busy)
    @rule(data=st.data())
    def slot_freed(self, data: st.DataObject) -> None:
        group, slot = place = data.draw(st.sampled_from(sorted(self.model.busy)))
        self.directory.slot_freed(GroupId(group), slot)
        self.model.busy[place] -= 1
        if not self.model.busy[place]:
            del self.model.busy[place]

    # ---- disk ------------------------------------------------------------------------------

    @rule(place=PLACE)
    def write(self, place: Place) -> None:
        """All of a prompt's beginning that is in the arena."""
        prompt, last = place
        for index in range(last + 1):
            for ref in self.in_every_group((prompt, index)):
                frame = self.model.find(ref)
                if frame is not None and frame.arena == "ready" and not frame.disk:
                    self.begin_write((prompt, index), ref.group)
                    if frame.disk == "filling":
                        self.fill_disk(frame)

    @rule(place=PLACE, group=GROUP)
    def begin_write(self, place: Place, group: int) -> None:
        ref = self.ref(place, group)
        frame = self.model.find(ref)
        if frame is not None and frame.promoting:
            return  # a planner writes what it saved, and a promoted frame was on disk
        is_full = self.model.taken_places(ref.group) >= self.model.disk_frames[ref.group]
        victims = self.model.victims(ref.group, Tier.DISK) if is_full else []
        wanted = frame is not None and frame.arena in ("filling", "ready") and not frame.disk
        took = self.directory.reserve_disk(ref)
        assert took == (wanted and (not is_full or bool(victims)))
        self.evicted(Tier.DISK, victims if took else [])
        if took and frame is not None:
            frame.disk = "filling"
            frame.pins += 1

    @precondition(lambda self: self.some(disk="filling"))
    @rule(data=st.data())
    def disk_filled(self, data: st.DataObject) -> None:
        self.fill_disk(self.pick(data, self.some(disk="filling")))

    @precondition(lambda self: self.some(disk="filling"))
    @rule(data=st.data())
    def disk_failed(self, data: st.DataObject) -> None:
        frame = self.pick(data, self.some(disk="filling"))
        self.directory.disk_failed(frame.ref)
        assert self.directory.take_removes() == (frame.ref,)
        frame.pins -= 1
        frame.refused = frame.stranded
        self.model.disk_left(frame)

    @rule(usable=st.booleans())
    def disk_usable(self, usable: bool) -> None:
        self.directory.disk_usable = self.model.disk_usable = usable

    # ---- either ----------------------------------------------------------------------------

    @precondition(lambda self: self.model.frames)
    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def drop(self, data: st.DataObject, tier: Tier) -> None:
        self.drop_copy(self.pick(data, self.some()), tier)

    @precondition(lambda self: self.being_read())
    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def drop_under_readers(self, data: st.DataObject, tier: Tier) -> None:
        self.drop_copy(self.pick(data, self.being_read()), tier)

    @precondition(lambda self: len(self.pinned) < 3)
    @rule(place=PLACE)
    def pin_prefix(self, place: Place) -> None:
        prompt, index = place
        self.pinned.append(self.pin(prompt, index + 1))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin_prefix(self, data: st.DataObject) -> None:
        self.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(place=PLACE)
    def touch(self, place: Place) -> None:
        prompt, index = place
        self.directory.touch(PROMPTS[prompt], index + 1)
        self.model.touched(PROMPTS[prompt], index + 1)

    @rule(place=PLACE)
    def retire(self, place: Place) -> None:
        prompt, index = place
        self.directory.retire(PROMPTS[prompt][: index + 1])
        self.model.retired(PROMPTS[prompt][: index + 1])

    @precondition(lambda self: len(self.model.frames) > 9)
    @rule()
    def forget_all(self) -> None:
        idle = [frame for frame in self.model.frames.values() if not frame.pins]
        on_disk = {frame.ref for frame in idle if frame.has(Tier.DISK)}
        empty = self.directory.forget_all()
        assert set(self.directory.take_removes()) == on_disk
        for group in self.directory.group_ids:
            for tier in Tier:
                here = [frame for frame in idle if frame.ref.group == group and frame.has(tier)]
                for frame in sorted(here, key=lambda frame: frame.used[tier]):
                    self.copy_left(frame, tier)
                    self.companions_go(frame)
        assert empty == (not self.model.frames)

    @rule(place=PLACE)
    def misuse(self, place: Place) -> None:
        """Ends that never began are named, and change nothing."""
        ref = self.ref(place, 0)
        frame = self.model.find(ref)
        if frame is None or frame.arena != "filling":
            for end in (self.directory.arena_filled, self.directory.arena_failed):
                with pytest.raises(InvariantError, match="never began"):
                    end(ref)
        if frame is None or frame.disk != "filling":
            for end in (self.directory.disk_filled, self.directory.disk_failed):
                with pytest.raises(InvariantError, match="never began"):
                    end(ref)
        if frame is None or not frame.pins:
            with pytest.raises(InvariantError, match="not pinned"):
                self.directory.unpin([ref])

    # ---- what must hold --------------------------------------------------------------------

    @rule(place=PLACE, start=st.integers(0, 3), data=st.data())
    def lookup(self, place: Place, start: int, data: st.DataObject) -> None:
        chunks, stop = PROMPTS[place[0]], place[1] + 1
        denied = {
            GroupId(group): data.draw(st.sets(st.sampled_from(chunks), max_size=1))
            for group in range(len(self.model.rules))
        }
        start = min(start, stop)
        assert self.directory.held_until(chunks, start, stop, denied) == self.model.held_until(
            chunks, start, stop, denied
        )

    @invariant()
    def a_lookup_agrees_with_the_model(self) -> None:
        self.steps += 1
        chunks = PROMPTS[self.steps % len(PROMPTS)]
        found = self.directory.held_until(chunks, 0, len(chunks), {})
        assert found == self.model.held_until(chunks, 0, len(chunks), {})

    # Checked after the lookups, so that one that changed something is found here.
    @invariant()
    def every_frame_is_as_the_model_has_it(self) -> None:
        assert self.directory.take_removes() == ()
        for ref in self.refs.values():
            frame = self.model.find(ref) or Frame(ref)
            in_disk = Tier.DISK if frame.has(Tier.DISK) and self.model.disk_usable else None
            assert self.directory.tier_of(ref) is (Tier.ARENA if frame.has(Tier.ARENA) else in_disk)
            assert self.directory.slot_of(ref) == frame.slot
            assert self.directory.is_kept(ref.group, ref.chunk) == frame.is_kept

    @invariant()
    def what_stays_only_for_the_disk_is_named_once(self) -> None:
        assert sorted(map(repr, self.directory.take_stranded())) == sorted(map(repr, self.model.stranded))
        self.model.stranded.clear()

    @invariant()
    def budgets_hold_and_no_slot_is_shared(self) -> None:
        for group in self.directory.group_ids:
            slots = self.model.taken_slots(group)
            assert len(slots) == len(set(slots))
            assert all(0 <= slot < self.model.slots[group] for slot in slots)
            assert self.directory.arena_in_use(group) == len(slots) <= self.directory.arena_slots(group)
            places = self.model.taken_places(group)
            assert self.directory.disk_in_use(group) == places <= self.model.disk_frames[group]

    @invariant()
    def pins_and_copies_under_way_are_counted(self) -> None:
        frames = self.model.frames.values()
        assert self.directory.pins() == sum(frame.pins for frame in frames)
        assert self.directory.filling() == sum(
            (frame.arena == "filling") + (frame.disk == "filling") for frame in frames
        )

    def teardown(self) -> None:
        """When all that is under way has ended nothing is pinned, filling, or kept from being forgotten."""
        for frame in list(self.model.frames.values()):
            if frame.arena == "filling":
                self.directory.arena_failed(frame.ref)
            if frame.disk == "filling":
                self.directory.disk_failed(frame.ref)
        for pinned in self.pinned:
            self.directory.unpin(pinned)
        for (group, slot), readers in self.model.busy.items():
            for _ in range(readers):
                self.directory.slot_freed(GroupId(group), slot)
        assert self.directory.pins() == self.directory.filling() == 0
        assert self.directory.forget_all()
        for group in self.directory.group_ids:
            assert self.directory.arena_in_use(group) == self.directory.disk_in_use(group) == 0

    # ---- shorthands ------------------------------------------------------------------------

    def ref(self, place: Place, group: int) -> ChunkRef:
        """The frame at ``place``, in one of the groups that there are."""
        prompt, index = place
        return self.refs[PROMPTS[prompt][index] + bytes([group % len(self.model.rules)])]

    def in_every_group(self, place: Place) -> list[ChunkRef]:
        return [self.ref(place, group) for group in range(len(self.model.rules))]

    def kind(self, ref: ChunkRef) -> GroupKind:
        return self.model.rules[ref.group].kind

    def some(self, **states: str) -> list[Frame]:
        """Frames whose copies are in these states, always in the same order."""
        found = [
            frame
            for frame in self.model.frames.values()
            if all(getattr(frame, tier) == state for tier, state in states.items())
        ]
        return sorted(found, key=lambda frame: (frame.ref.group, frame.ref.index, frame.ref.chunk))

    def pin(self, prompt: int, boundary: int) -> list[ChunkRef]:
        chunks = PROMPTS[prompt]
        pinned = self.directory.pin(chunks, boundary)
        expected = {
            (group, chunks[index])
            for group, rule_ in enumerate(self.model.rules)
            for index in needed(rule_, boundary)
        } & set(self.model.frames)
        assert sorted((ref.group, ref.chunk) for ref in pinned) == sorted(expected)
        for ref in pinned:
            self.model.frames[ref.group, ref.chunk].pins += 1
        return pinned

    def unpin(self, pinned: list[ChunkRef]) -> None:
        self.directory.unpin(pinned)
        for ref in pinned:
            frame = self.model.frames[ref.group, ref.chunk]
            frame.pins -= 1
            self.model.settle(frame)

    def pick(self, data: st.DataObject, frames: list[Frame]) -> Frame:
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        note(f"chunk {frame.ref.index} of group {frame.ref.group}, arena {frame.arena!r} disk {frame.disk!r}")
        return frame

    def being_read(self) -> list[Frame]:
        return [frame for frame in self.some() if frame.pins]

    def drop_copy(self, frame: Frame, tier: Tier) -> None:
        self.directory.drop(frame.ref, tier)
        if not frame.has(tier):
            self.companions_left(frame, ())
        elif tier is Tier.DISK:
            self.left(frame, tier)
        elif frame.pins:
            frame.arena = "doomed"
            self.companions_left(frame, ())
        else:
            self.left(frame, tier)

    def reserve_for_save(self, place: Place, ref: ChunkRef) -> None:
        """What the frame builds on is pinned meanwhile: making room for it must not cost that."""
        prefix = self.pin(*place)
        self.reserve(ref, promoting=False)
        self.unpin(prefix)

    def fill_arena(self, frame: Frame) -> None:
        self.directory.arena_filled(frame.ref)
        frame.arena, frame.promoting = "ready", False
        self.model.ready(frame, Tier.ARENA)

    def fill_disk(self, frame: Frame) -> None:
        self.directory.disk_filled(frame.ref)
        frame.disk = "ready"
        self.model.ready(frame, Tier.DISK)
        frame.pins -= 1
        self.model.settle(frame)

    def reserve(self, ref: ChunkRef, *, promoting: bool) -> None:
        known, group = self.model.find(ref), ref.group
        wanted = known is None or not known.arena
        is_new = known is None or not (known.arena or known.disk)
        if is_new:
            self.model.goes_on(ref)
        is_full = len(self.model.taken_slots(group)) >= self.model.slots[group]
        victims = self.model.victims(group, Tier.ARENA) if is_full else []
        slot = self.directory.reserve_arena(ref, promoting=promoting)
        assert (slot != NO_SLOT) == (wanted and (not is_full or bool(victims)))
        if slot == NO_SLOT:
            if wanted:
                self.model.searched(group, Tier.ARENA, None)
            return
        self.evicted(Tier.ARENA, victims)
        assert slot not in self.model.taken_slots(group)
        frame = self.model.added(ref)
        frame.arena, frame.slot, frame.promoting = "filling", slot, promoting
        if is_new:
            self.model.goes_on(ref)

    def evicted(self, tier: Tier, victims: list[Frame]) -> None:
        """The least recently used of ``victims`` made room; with none, nothing went."""
        if not victims:
            assert self.directory.take_removes() == ()
            return
        self.model.searched(victims[0].ref.group, tier, victims[0])
        self.left(victims[0], tier)

    def left(self, frame: Frame, tier: Tier) -> None:
        """One copy went, and with the last one of a chunk what that chunk names in other groups."""
        self.copy_left(frame, tier)
        self.companions_left(frame, (frame.ref,) if tier is Tier.DISK else ())

    def copy_left(self, frame: Frame, tier: Tier) -> None:
        if tier is Tier.ARENA:
            self.model.arena_left(frame)
        else:
            self.model.disk_left(frame)

    def companions_left(self, frame: Frame, removed: tuple[ChunkRef, ...]) -> None:
        expected = [*removed, *self.companions_go(frame)]
        assert sorted(map(repr, self.directory.take_removes())) == sorted(map(repr, expected))

    def companions_go(self, frame: Frame) -> list[ChunkRef]:
        """What goes with the last copy of ``frame``; those of it that were on disk."""
        removed: list[ChunkRef] = []
        # A chunk takes what it names with it, an image those of the other groups.
        kinds = {
            GroupKind.PAGED: (GroupKind.WINDOW, GroupKind.STATE),
            GroupKind.STATE: (GroupKind.STATE,),
            GroupKind.WINDOW: (),
        }[self.kind(frame.ref)]
        if not frame.is_kept:
            for other in self.model.companions(frame.ref.chunk, kinds):
                if other.has(Tier.ARENA):
                    self.model.arena_left(other)
                if other.has(Tier.DISK):
                    self.model.disk_left(other)
                    removed.append(other.ref)
            if self.kind(frame.ref) is GroupKind.STATE:
                self.model.ended(frame.ref.chunk)
        return removed


TestDirectoryMachine = pytest.mark.slow(DirectoryMachine.TestCase)
TestDirectoryMachine.settings = settings(
    settings.get_profile("kvstow"),
    max_examples=200,
    stateful_step_count=50,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
