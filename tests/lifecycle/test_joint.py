"""Where a request may resume when groups of several kinds must agree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_bench import BLOCK, CHUNK, PAGED, STATE, Bench, chunk_ids, hello, refs, window

from kvstow.layout.geometry import NO_BLOCK, GroupId, GroupKind
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.messages import NO_SLOT, Fault, Held, RequestId, SaveReport, Tier, WriteReport
from kvstow.lifecycle.requests import MISS, Lookup, Phase
from kvstow.metrics import Recorder

A, B = RequestId("a"), RequestId("b")
ALL = (PAGED, window(2 * CHUNK), STATE)


def hit(bench: Bench, ids, computed: int = 0, name: RequestId | None = None) -> int:
    """The boundary, in chunks, that a request would load up to; 0 for a miss."""
    name = name or RequestId("probe")
    match = bench.planner.match(name, ids, len(ids) * CHUNK + 1, computed)
    return (computed + match.tokens) // CHUNK if match.lookup is Lookup.HIT else 0


def load(bench: Bench, ids, tables=None, name: RequestId = A, computed: int = 0):
    """Match and allocate; the load that is ordered."""
    match = bench.planner.match(name, ids, len(ids) * CHUNK + 1, computed)
    assert match.lookup is Lookup.HIT
    tables = tables or bench.tables(len(ids) * CHUNK + 1, len(bench.rules))
    bench.planner.allocated(name, tables, match.tokens)
    return match.tokens


def items(bench: Bench):
    order = bench.planner.step()
    return order, [(item.ref.group, item.ref.index) for item in order.loads[0].items]


# ---- against the definition ----------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_the_largest_boundary_is_found_whatever_is_held(seed: int) -> None:
    """Random holdings in all tiers, against the rule read off the design, boundary by boundary."""
    chance = random.Random(seed)
    rules = [
        chance.choice([PAGED, STATE, window(chance.randrange(1, 5 * CHUNK))])
        for _ in range(chance.randrange(1, 5))
    ]
    length = chance.randrange(1, 9)
    ids = chunk_ids("p", length)
    held = [
        Held(ref, 0.0) for group in range(len(rules)) for ref in refs(ids, group) if chance.random() < 0.5
    ]
    directory = Directory(Recorder())
    directory.open([hello(rules=rules, slots=length, disk_frames=length, inventory=held)])
    coming = set()
    for group in range(len(rules)):
        for ref in refs(ids, group):
            if chance.random() < 0.5 and directory.reserve_arena(ref) != NO_SLOT:
                directory.arena_filled(ref)
            elif directory.tier_of(ref) is Tier.DISK and chance.random() < 0.3:
                directory.reserve_arena(ref, promoting=True)
                coming.add((group, ref.index))
    denied = {GroupId(group): {chunk for chunk in ids if chance.random() < 0.1} for group in range(2)}
    directory.disk_usable = chance.random() < 0.8
    start = chance.randrange(length)
    stop = chance.randrange(start, length + 1)

    def largest(with_coming: bool) -> int:
        def has(group: int, index: int) -> bool:
            if ids[index] in denied.get(GroupId(group), ()):
                return False
            if (group, index) in coming:
                return with_coming
            return directory.tier_of(refs(ids, group)[index]) is not None

        def needed(group: int, boundary: int) -> list[int]:
            rule = rules[group]
            if rule.kind is GroupKind.STATE:
                return [boundary - 1]
            first = 0
            if rule.kind is GroupKind.WINDOW:
                first = max(0, boundary * CHUNK - rule.window_tokens) // CHUNK
            return [index for index in range(first, boundary) if index >= start]

        boundaries = [
            boundary
            for boundary in range(start + 1, stop + 1)
            if all(has(group, index) for group in range(len(rules)) for index in needed(group, boundary))
        ]
        return max(boundaries, default=start)

    found, ask_again = directory.held_until(ids, start, stop, denied)
    assert found == largest(with_coming=False)
    assert ask_again == (largest(with_coming=True) > found)


# ---- windows -------------------------------------------------------------------------------


def test_a_window_hit_needs_and_loads_only_its_window() -> None:
    bench = Bench(hello(rules=(PAGED, window(2 * CHUNK))))
    ids = bench.save_all("p", 5)
    for index in range(3):
        bench.directory.drop(refs(ids, 1)[index], Tier.ARENA)
    assert hit(bench, ids) == 5
    load(bench, ids)
    _, loaded = items(bench)
    assert loaded == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (0, 4), (1, 4)]


def test_a_missing_window_chunk_lowers_the_boundary_to_before_it() -> None:
    bench = Bench(hello(rules=(PAGED, window(2 * CHUNK))))
    ids = bench.save_all("p", 5)
    bench.directory.drop(refs(ids, 1)[3], Tier.ARENA)
    assert hit(bench, ids) == 3
    bench.directory.drop(refs(ids, 1)[1], Tier.ARENA)
    assert hit(bench, ids) == 1


def test_a_window_below_the_floor_is_the_engines_own() -> None:
    bench = Bench(hello(rules=(PAGED, window(3 * CHUNK))))
    ids = bench.save_all("p", 4)
    for index in range(2):
        bench.directory.drop(refs(ids, 1)[index], Tier.ARENA)
    assert hit(bench, ids) == 0
    assert hit(bench, ids, computed=2 * CHUNK) == 4
    load(bench, ids, computed=2 * CHUNK)
    assert items(bench)[1] == [(0, 2), (1, 2), (0, 3), (1, 3)]


def test_a_window_smaller_than_a_chunk() -> None:
    bench = Bench(hello(rules=(PAGED, window(3))))
    ids = bench.save_all("p", 3)
    frames = [item.blocks for item in bench.order.snapshots[0].items]
    assert frames == [(101,), (103,), (105,)]  # the last block of each chunk
    load(bench, ids)
    _, loaded = items(bench)
    assert loaded == [(0, 0), (0, 1), (0, 2), (1, 2)]


def test_blocks_that_the_engine_does_not_keep_for_its_window_are_skipped() -> None:
    bench = Bench(hello(rules=(PAGED, window(CHUNK + BLOCK))))
    ids = bench.save_all("p", 3)
    tables = bench.tables(3 * CHUNK + 1, 2)
    tables[1][:3] = [NO_BLOCK] * 3  # [B - W, B) begins with the fourth block
    load(bench, ids, tables)
    order, _ = items(bench)
    skips = [(item.ref.index, item.skip_blocks) for item in order.loads[0].items if item.ref.group == 1]
    assert skips == [(1, 1), (2, 0)]


def test_a_window_frame_of_which_the_engine_keeps_nothing_is_not_loaded() -> None:
    bench = Bench(hello(rules=(PAGED, window(2 * CHUNK))))
    ids = bench.save_all("p", 3)
    tables = bench.tables(3 * CHUNK + 1, 2)
    tables[1][:4] = [NO_BLOCK] * 4
    load(bench, ids, tables)
    assert items(bench)[1] == [(0, 0), (0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("group", "place"), [(0, 0), (0, 5), (1, 5), (2, 5)])
def test_a_block_that_should_be_there_and_is_not_refuses_the_load(group: int, place: int) -> None:
    bench = Bench(hello(rules=ALL))
    ids = bench.save_all("p", 3)
    tables = bench.tables(3 * CHUNK + 1, 3)
    tables[group][place] = NO_BLOCK
    load(bench, ids, tables)
    order = bench.planner.step()
    assert order.loads[0].items == ()
    bench.answer(order)
    assert bench.planner.phase_of(A) is Phase.FAILED
    assert hit(bench, ids, name=A) == 0
    assert hit(bench, ids, name=B) == 3
    assert bench.directory.pins() == bench.directory.filling() == 0


def test_a_table_of_a_group_that_ends_too_early_refuses_the_load() -> None:
    bench = Bench(hello(rules=ALL))
    ids = bench.save_all("p", 3)
    tables = bench.tables(3 * CHUNK + 1, 3)
    del tables[2][5:]
    load(bench, ids, tables)
    assert bench.planner.step().loads[0].items == ()


# ---- images --------------------------------------------------------------------------------


def test_without_its_image_the_next_smaller_boundary_is_promised() -> None:
    bench = Bench(hello(rules=(PAGED, STATE)))
    ids = bench.save_all("p", 4)
    assert hit(bench, ids) == 4
    bench.directory.drop(refs(ids, 1)[3], Tier.ARENA)
    bench.directory.drop(refs(ids, 1)[2], Tier.ARENA)
    assert hit(bench, ids) == 2
    load(bench, ids)
    assert items(bench)[1] == [(0, 0), (0, 1), (1, 1)]


def test_the_image_is_loaded_even_if_the_floor_lies_in_its_block() -> None:
    bench = Bench(hello(rules=(PAGED, STATE)))
    ids = bench.save_all("p", 2)
    assert load(bench, ids, computed=2 * CHUNK - BLOCK) == BLOCK
    order, loaded = items(bench)
    assert loaded == [(0, 1), (1, 1)]
    assert [item.skip_blocks for item in order.loads[0].items] == [1, 0]


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.ABSENT, Fault.UNAVAILABLE])
def test_a_bad_image_denies_the_image_and_not_the_chunk(fault: Fault) -> None:
    bench = Bench(hello(rules=(PAGED, STATE)))
    ids = bench.save_all("p", 3)
    load(bench, ids)
    order, loaded = items(bench)
    bench.fail_load(order.loads[0].job, [loaded.index((1, 2))], fault)
    assert bench.planner.phase_of(A) is Phase.FAILED
    assert hit(bench, ids, name=A) == 2
    assert hit(bench, ids, name=B) == (3 if fault is Fault.UNAVAILABLE else 2)
    assert bench.directory.tier_of(refs(ids, 0)[2]) is Tier.ARENA


def test_a_chunk_whose_image_is_denied_still_counts_for_a_later_boundary() -> None:
    bench = Bench(hello(rules=(PAGED, STATE)))
    ids = bench.save_all("p", 4)
    bench.directory.drop(refs(ids, 1)[3], Tier.ARENA)
    load(bench, ids)
    order, loaded = items(bench)
    bench.fail_load(order.loads[0].job, [loaded.index((1, 2))], Fault.UNAVAILABLE)
    assert hit(bench, ids, name=A) == 2
    bench.save_all("p", 4)  # the last image is there again
    assert hit(bench, ids, name=A) == 4


def test_a_bad_chunk_takes_its_image_with_it() -> None:
    bench = Bench(hello(rules=ALL))
    ids = bench.save_all("p", 3)
    load(bench, ids)
    order, loaded = items(bench)
    bench.fail_load(order.loads[0].job, [loaded.index((0, 2))], Fault.CORRUPT)
    for group in range(3):
        assert bench.directory.tier_of(refs(ids, group)[2]) is None
        assert bench.directory.arena_in_use(GroupId(group)) == 2
    assert hit(bench, ids) == 2


# ---- all kinds, and none paged -------------------------------------------------------------


def test_three_kinds_load_together_and_count_their_tokens_once() -> None:
    bench = Bench(hello(rules=ALL))
    ids = bench.save_all("p", 4)
    assert load(bench, ids, computed=CHUNK) == 3 * CHUNK
    assert bench.planner.promised_by_tier(A) == {Tier.ARENA: 3 * CHUNK, Tier.DISK: 0}
    order, loaded = items(bench)
    assert loaded == [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    assert bench.directory.pins() == 4 + 2 + 1
    bench.answer(order)
    assert bench.planner.phase_of(A) is Phase.LOADED
    assert bench.counted("loaded_tokens_arena") == 3 * CHUNK
    assert bench.directory.pins() == 0


def test_an_engine_without_a_paged_group() -> None:
    bench = Bench(hello(rules=(window(CHUNK), STATE), disk_frames=8))
    ids = bench.save_all("p", 4)
    assert not bench.order.saves
    bench.directory.drop(refs(ids, 1)[3], Tier.ARENA)  # there is the disk
    assert load(bench, ids) == 4 * CHUNK
    assert bench.planner.promised_by_tier(A) == {Tier.ARENA: 0, Tier.DISK: 4 * CHUNK}
    order, loaded = items(bench)
    assert loaded == [(0, 3), (1, 3)]
    bench.answer(order)
    assert bench.counted("loaded_tokens_disk") == 4 * CHUNK


def test_a_second_reader_waits_for_an_image_on_its_way_if_that_brings_more() -> None:
    ids = chunk_ids("p", 3)
    held = [Held(ref, 1.0) for group in (0, 1) for ref in refs(ids, group)]
    bench = Bench(hello(rules=(PAGED, STATE), disk_frames=8, inventory=held))
    load(bench, ids)
    order = bench.planner.step()
    assert bench.planner.match(B, ids, 3 * CHUNK + 1, 0).lookup is Lookup.PENDING
    bench.answer(order)
    assert hit(bench, ids, name=B) == 3


def test_a_copy_on_its_way_that_does_not_bring_more_is_not_waited_for() -> None:
    ids = chunk_ids("p", 2)
    held = [Held(ref, 1.0) for ref in refs(ids)]
    bench = Bench(hello(rules=(PAGED, STATE), disk_frames=8, inventory=held))
    for ref in refs(ids):
        bench.directory.reserve_arena(ref, promoting=True)
    # No image: however the promotion ends, there is no boundary.
    assert bench.planner.match(A, ids, 2 * CHUNK + 1, 0) == MISS


# ---- space ---------------------------------------------------------------------------------


def test_slots_may_differ_from_group_to_group() -> None:
    bench = Bench(hello(0, 2, rules=ALL, slots=(8, 4, 3)), hello(1, 2, rules=ALL, slots=(9, 5, 2)))
    assert [bench.directory.arena_slots(GroupId(group)) for group in range(3)] == [8, 4, 2]
    ids = bench.save_all("p", 6)
    # What is being copied is not evicted: the first that were found have the slots.
    assert hit(bench, ids) == 2
    bench.save_all("p", 6, request="again")
    assert [bench.directory.arena_in_use(GroupId(group)) for group in range(3)] == [6, 4, 2]
    assert hit(bench, ids) == 4


def test_images_that_nobody_resumes_at_age() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(16, 3)))
    ids = bench.save_all("p", 3)
    load(bench, ids)
    bench.answer(bench.planner.step())
    bench.planner.finished(A)
    bench.save_all("q", 2)
    kept = [bench.directory.tier_of(ref) is not None for ref in refs(ids, 1)]
    assert kept == [False, False, True]
    assert hit(bench, ids) == 3


def test_an_image_that_a_load_reads_is_not_evicted() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(16, 1)))
    ids = bench.save_all("p", 1)
    load(bench, ids)
    order = bench.planner.step()
    bench.save_all("q", 1)
    assert bench.counted("save_skipped_no_space") == 1
    bench.answer(order)
    assert hit(bench, ids) == 1


def test_evicting_a_chunk_drops_its_window_and_its_image() -> None:
    bench = Bench(hello(rules=ALL, slots=(2, 8, 8)))
    bench.save_all("old", 2)
    bench.save_all("new", 1)
    gone = [bench.directory.tier_of(refs(chunk_ids("old", 2), group)[1]) for group in range(3)]
    assert gone == [None, None, None]
    assert hit(bench, chunk_ids("old", 2)) == 1
    assert [bench.directory.arena_in_use(GroupId(group)) for group in range(3)] == [2, 2, 2]


def test_an_image_that_is_being_written_outlives_its_chunk() -> None:
    bench = Bench(hello(rules=(PAGED, STATE), slots=(8, 2), disk_frames=8))
    ids = chunk_ids("p", 1)
    bench.planner.snapshot(A, ids, CHUNK, list, bench.offers([1]))
    (job,) = bench.planner.step().snapshots
    bench.tell(saves=(SaveReport(job.job),))
    chunk = refs(ids)[0]
    bench.directory.reserve_arena(chunk)
    bench.directory.arena_filled(chunk)
    bench.directory.drop(chunk, Tier.ARENA)
    assert bench.directory.arena_in_use(GroupId(1)) == 1
    bench.tell(writes=(WriteReport(job.items[0].write, stored=True),))
    assert bench.directory.tier_of(refs(ids, 1)[0]) is Tier.ARENA
    assert bench.directory.pins() == bench.directory.filling() == 0


def test_a_chunk_that_one_paged_group_lost_is_saved_again_in_that_group() -> None:
    bench = Bench(hello(rules=(PAGED, PAGED)))
    ids = bench.save_all("p", 2)
    bench.directory.drop(refs(ids, 1)[0], Tier.ARENA)
    assert hit(bench, ids) == 0
    bench.save_all("p", 2, request="again")
    assert [(item.ref.group, item.ref.index) for item in bench.order.saves[0].items] == [(1, 0)]
    assert hit(bench, ids) == 2


# ---- restart -------------------------------------------------------------------------------


def test_images_and_windows_of_kept_chunks_are_adopted_without_those_before_them() -> None:
    ids = chunk_ids("p", 4)
    held = [Held(ref, 1.0) for ref in refs(ids)] + [Held(refs(ids, g)[3], 1.0) for g in (1, 2)]
    bench = Bench(hello(rules=(PAGED, window(CHUNK), STATE), disk_frames=8, inventory=held))
    assert hit(bench, ids) == 4
    assert bench.planner.step().removes == ()


def test_what_belongs_to_no_kept_chunk_is_removed_at_start() -> None:
    ids, orphans = chunk_ids("p", 2), chunk_ids("x", 1)
    chunks, images = refs(ids), refs(ids, 1)
    stray = refs(orphans, 1)[0]
    whole = [Held(ref, 1.0) for ref in (chunks[0], images[0], images[1], stray)]
    bench = Bench(
        hello(0, 2, rules=(PAGED, STATE), disk_frames=8, inventory=[*whole, Held(chunks[1], 1.0)]),
        hello(1, 2, rules=(PAGED, STATE), disk_frames=8, inventory=whole),
    )
    assert hit(bench, ids) == 1
    assert set(bench.planner.step().removes) == {chunks[1], images[1], stray}


def test_an_image_that_some_ranks_lack_is_removed_at_start() -> None:
    ids = chunk_ids("p", 2)
    both = [Held(ref, 1.0) for ref in refs(ids)] + [Held(refs(ids, 1)[0], 1.0)]
    one = [*both, Held(refs(ids, 1)[1], 1.0)]
    bench = Bench(
        hello(0, 2, rules=(PAGED, STATE), disk_frames=8, inventory=one),
        hello(1, 2, rules=(PAGED, STATE), disk_frames=8, inventory=both),
    )
    assert hit(bench, ids) == 1
    assert bench.planner.step().removes == (refs(ids, 1)[1],)


def test_without_a_paged_group_every_complete_image_is_adopted() -> None:
    ids = chunk_ids("p", 3)
    bench = Bench(hello(rules=(STATE,), disk_frames=8, inventory=[Held(refs(ids)[2], 1.0)]))
    assert hit(bench, ids) == 3


# ---- anything may happen in any order ------------------------------------------------------


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 2))
def test_whatever_happens_with_all_kinds_nothing_stays_in_flight(seed: int, ranks: int) -> None:
    """Random events and failures; every promise is at a boundary, and all counts come back to 0."""
    chance = random.Random(seed)
    rules = [chance.choice([PAGED, STATE, window(chance.randrange(1, 20))]) for _ in range(3)]
    slots = [chance.randrange(1, 7) for _ in rules]
    disk = chance.randrange(7)
    bench = Bench(*[hello(rank, ranks, rules=rules, slots=slots, disk_frames=disk) for rank in range(ranks)])
    prompts = [[*chunk_ids("shared", 2), *chunk_ids(f"p{i}", 3)] for i in range(3)]
    orders = []
    live: dict[RequestId, list] = {}
    for _ in range(50):
        name = RequestId(f"r{chance.randrange(4)}")
        ids = live.setdefault(name, chance.choice(prompts))
        tokens = len(ids) * CHUNK
        tables = bench.tables(tokens + 1, len(rules))
        for table in tables:
            for place in range(chance.randrange(3)):
                table[place] = NO_BLOCK
        event = chance.random()
        if event < 0.3:
            match = bench.planner.match(name, ids, tokens + 1, chance.randrange(3) * BLOCK)
            bench.planner.allocated(name, tables, match.tokens)
        elif event < 0.8:
            computed = chance.randrange(tokens + 1)
            bench.planner.progress(name, ids, computed, lambda tables=tables: tables)
            offers = bench.offers(chance.sample(range(1, len(ids) + 1), 2))
            bench.planner.snapshot(name, ids, computed, lambda tables=tables: tables, offers)
        elif event < 0.9:
            bench.planner.preempted(name)
        else:
            bench.planner.finished(name)
            del live[name]
        if chance.random() < 0.6:
            orders.append(bench.planner.step())
        if orders and chance.random() < 0.6:
            order = orders.pop(chance.randrange(len(orders)))
            bad = {load.job for load in order.loads if load.items and chance.random() < 0.3}
            for job in bad:
                for rank in range(ranks):
                    bench.fail_load(job, [0], chance.choice(list(Fault)), rank)
            bench.answer(order)
        for group in range(len(rules)):
            assert bench.directory.arena_in_use(GroupId(group)) <= slots[group]
            assert bench.directory.disk_in_use(GroupId(group)) <= disk
        bench.clock.advance(chance.random())
    for order in orders:
        bench.answer(order)
    for _ in range(20):
        bench.answer(bench.planner.step())
    assert bench.directory.pins() == bench.directory.filling() == 0
    assert not bench.planner.saves_in_flight
    assert not bench.planner.holds_blocks


def test_a_late_report_for_a_snapshot_changes_nothing() -> None:
    bench = Bench(hello(rules=(PAGED, STATE)))
    ids = bench.save_all("p", 1)
    bench.answer(bench.order)
    assert bench.counted("late_reports") == 2
    assert hit(bench, ids) == 1
