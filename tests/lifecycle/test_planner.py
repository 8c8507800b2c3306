from __future__ import annotations

import pytest
from lifecycle_bench import BLOCK, CHUNK, PAGED, STATE, Bench, chunk_ids, hello, refs

from kvstow.errors import ConfigError
from kvstow.keys.ids import Rank
from kvstow.layout.geometry import NO_BLOCK
from kvstow.lifecycle.messages import (
    NO_SLOT,
    FailedItem,
    Fault,
    Held,
    LoadReport,
    Report,
    RequestId,
    SaveReport,
    Tier,
    WriteReport,
)
from kvstow.lifecycle.requests import MISS, Lookup, Match, Phase

A = RequestId("a")


def promise(bench: Bench, ids, tokens: int, computed: int = 0, name: RequestId = A) -> int:
    """Match and allocate; the tokens promised."""
    match = bench.planner.match(name, ids, tokens, computed)
    if match.lookup is not Lookup.HIT:
        return 0
    bench.planner.allocated(name, bench.tables(tokens), match.tokens)
    return match.tokens


# ---- where a request may resume -----------------------------------------------------------


@pytest.mark.parametrize("stored", range(5))
def test_resume_is_on_a_stored_boundary_and_leaves_a_token(stored: int) -> None:
    """Every prompt length from 1 to 4 chunks + 1, against every local hit."""
    bench = Bench()
    bench.save_prompt("p", stored)
    for length in range(1, 4 * CHUNK + 2):
        for computed in range(0, length, BLOCK):
            request = RequestId(f"{length}-{computed}")
            match = bench.planner.match(request, chunk_ids("p", length // CHUNK), length, computed)
            best = min(stored, (length - 1) // CHUNK) * CHUNK
            if best > computed:
                assert match == Match(Lookup.HIT, best - computed), (length, computed)
                assert computed + match.tokens <= length - 1
            else:
                assert match == MISS, (length, computed)


def test_match_is_idempotent_and_takes_nothing() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 3)
    answers = {bench.planner.match(A, ids, 3 * CHUNK + 1, 0).tokens for _ in range(5)}
    assert answers == {3 * CHUNK}
    assert bench.directory.pins() == 0
    order = bench.planner.step()
    assert not order.loads


def test_load_starts_at_the_floor_inside_a_chunk() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    assert promise(bench, ids, 2 * CHUNK + 1, computed=BLOCK) == 2 * CHUNK - BLOCK
    (load,) = bench.planner.step().loads
    assert [item.skip_blocks for item in load.items] == [BLOCK // BLOCK, 0]
    assert [item.source for item in load.items] == [Tier.ARENA, Tier.ARENA]


def test_short_hits_are_not_worth_a_load() -> None:
    bench = Bench(min_load_tokens=2 * CHUNK)
    ids = bench.save_prompt("p", 1)
    assert bench.planner.match(A, ids, CHUNK + 1, 0).lookup is Lookup.MISS


def test_a_role_that_only_saves_never_promises() -> None:
    bench = Bench(loads=False)
    ids = bench.save_prompt("p", 1)
    assert bench.planner.match(A, ids, CHUNK + 1, 0).lookup is Lookup.MISS


def test_a_role_that_only_loads_never_saves() -> None:
    bench = Bench(saves=False)
    bench.planner.progress(A, chunk_ids("p", 2), 2 * CHUNK, lambda: bench.tables(2 * CHUNK))
    assert not bench.planner.step().saves


def test_a_chunk_of_which_the_engine_keeps_no_block_is_not_saved() -> None:
    bench = Bench()
    tables = bench.tables(2 * CHUNK)
    tables[0][2] = NO_BLOCK
    bench.planner.progress(A, chunk_ids("p", 2), 2 * CHUNK, lambda: tables)
    assert [item.ref.index for item in bench.planner.step().saves[0].items] == [0]


def test_a_scheduler_that_plans_by_other_rules_than_the_ranks_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match="one configuration"):
        Bench(hello(), rules=(PAGED, PAGED))


# ---- every promise ends once --------------------------------------------------------------


def test_an_ignored_promise_issues_nothing_and_pins_nothing() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    bench.planner.match(A, ids, 2 * CHUNK + 1, 0)
    bench.planner.allocated(A, bench.tables(2 * CHUNK + 1), 0)
    assert bench.planner.phase_of(A) is Phase.MISSED
    assert not bench.planner.step().loads
    assert bench.directory.pins() == 0


def test_a_load_ends_as_loaded_and_unpins() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    promise(bench, ids, 2 * CHUNK + 1)
    assert bench.directory.pins() == 2
    bench.answer(bench.planner.step())
    assert bench.planner.phase_of(A) is Phase.LOADED
    assert bench.directory.pins() == 0
    assert bench.counted("loaded_tokens_arena") == 2 * CHUNK


def test_an_engine_may_take_up_a_part_of_a_promise() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 3)
    assert bench.planner.match(A, ids, 3 * CHUNK + 1, 0).tokens == 3 * CHUNK
    bench.planner.allocated(A, bench.tables(3 * CHUNK + 1), 2 * CHUNK)
    (load,) = bench.planner.step().loads
    assert [item.ref.index for item in load.items] == [0, 1]


def test_a_promise_that_cannot_be_issued_is_ordered_to_fail() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    match = bench.planner.match(A, ids, 2 * CHUNK + 1, 0)
    bench.planner.allocated(A, bench.tables(CHUNK), match.tokens)  # too few blocks
    (load,) = (order := bench.planner.step()).loads
    assert load.items == ()
    bench.answer(order)
    assert bench.planner.phase_of(A) is Phase.FAILED
    # The same keys are not promised to it again, or it would go round for ever.
    assert bench.planner.match(A, ids, 2 * CHUNK + 1, 0).lookup is Lookup.MISS
    assert bench.counted("refused_promises") == 1


def test_a_promise_out_of_nowhere_still_ends() -> None:
    bench = Bench()
    bench.planner.allocated(A, bench.tables(CHUNK), CHUNK)
    (load,) = bench.planner.step().loads
    assert load.items == ()


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.ABSENT])
def test_a_bad_frame_is_dropped_and_the_rest_promised_again(fault: Fault) -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 3)
    promise(bench, ids, 3 * CHUNK + 1)
    (load,) = bench.planner.step().loads
    bench.fail_load(load.job, [1], fault)
    assert bench.planner.phase_of(A) is Phase.FAILED
    assert bench.planner.match(A, ids, 3 * CHUNK + 1, 0).tokens == CHUNK
    other = bench.planner.match(RequestId("b"), ids, 3 * CHUNK + 1, 0)
    assert other.tokens == CHUNK
    assert bench.directory.pins() == 0


def test_a_device_error_denies_it_to_this_request_only() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    promise(bench, ids, 2 * CHUNK + 1)
    (load,) = bench.planner.step().loads
    bench.fail_load(load.job, [0], Fault.UNAVAILABLE)
    assert bench.planner.match(A, ids, 2 * CHUNK + 1, 0).lookup is Lookup.MISS
    assert bench.planner.match(RequestId("b"), ids, 2 * CHUNK + 1, 0).tokens == 2 * CHUNK


def silent_steps(bench: Bench, steps: int, step_s: float) -> None:
    for _ in range(steps):
        bench.clock.advance(step_s)
        bench.planner.step()


@pytest.mark.parametrize(("steps", "step_s"), [(14, 30.0), (100, 0.15)])
def test_a_rank_is_not_taken_for_dead_before_it_could_speak(steps: int, step_s: float) -> None:
    """Neither by time, when steps are slow, nor by steps, when they are fast."""
    bench = Bench(load_timeout_s=10.0)
    ids = bench.save_prompt("p", 1)
    promise(bench, ids, CHUNK + 1)
    (load,) = bench.planner.step().loads
    silent_steps(bench, steps, step_s)
    assert bench.planner.phase_of(A) is Phase.LOADING
    bench.tell(loads=(LoadReport(load.job),))
    assert bench.planner.phase_of(A) is Phase.LOADED


def test_a_silent_rank_is_given_up() -> None:
    bench = Bench(load_timeout_s=10.0)
    ids = bench.save_prompt("p", 1)
    promise(bench, ids, CHUNK + 1)
    bench.planner.step()
    silent_steps(bench, 17, 2.0)
    assert bench.planner.phase_of(A) is Phase.FAILED
    assert bench.counted("load_timeouts") == 1


def test_what_a_silent_rank_may_still_read_stays_until_it_is_back() -> None:
    """Its reader may have found the frame good a moment ago, and copy it now."""
    bench = Bench(hello(slots=1), load_timeout_s=10.0)
    ids = bench.save_prompt("p", 1)
    promise(bench, ids, CHUNK + 1)
    (load,) = bench.planner.step().loads
    silent_steps(bench, 17, 2.0)
    bench.planner.progress(RequestId("b"), chunk_ids("q", 1), CHUNK, lambda: bench.tables(CHUNK))
    assert bench.planner.step().saves == ()
    bench.tell(loads=(LoadReport(load.job),))
    assert bench.directory.pins() == 0
    bench.planner.progress(RequestId("b"), chunk_ids("q", 1), CHUNK, lambda: bench.tables(CHUNK))
    assert len(bench.planner.step().saves) == 1


def test_nothing_is_promised_while_a_rank_is_dead_and_all_is_well_when_it_speaks_again() -> None:
    bench, ids = disk_bench(load_timeout_s=10.0, disk_cooldown_s=1.0)
    promise(bench, ids, 3 * CHUNK + 1)
    (load,) = bench.planner.step().loads
    silent_steps(bench, 17, 2.0)
    assert bench.directory.arena_in_use(0) == 3  # its readers may still write there
    silent_steps(bench, 2, 2.0)
    other = RequestId("b")
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).lookup is Lookup.MISS
    failed = tuple(FailedItem(item, Fault.TIMEOUT) for item in range(3))
    place = (load.items[0].ref.group, load.items[0].slot)
    bench.tell(loads=(LoadReport(load.job, failed, busy=(place,)),))
    assert bench.directory.arena_in_use(0) == 1
    bench.tell(freed=(place,))
    assert bench.directory.arena_in_use(0) == 0
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).tokens == 3 * CHUNK


def test_reports_are_taken_in_once_and_in_order() -> None:
    bench = Bench()
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    (save,) = bench.planner.step().saves
    early = Report(Rank(0), 2, saves=(SaveReport(save.job),))
    bench.planner.report(early)
    assert bench.planner.step().acknowledged == (0,)
    assert bench.directory.filling() == 1
    bench.planner.report(Report(Rank(0), 1))
    bench.planner.report(early)
    assert bench.planner.step().acknowledged == (2,)
    assert bench.directory.filling() == 0
    bench.planner.report(early)
    assert bench.counted("late_reports") == 2


# ---- late and repeated reports ------------------------------------------------------------


def test_late_and_repeated_reports_change_nothing() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 1)
    promise(bench, ids, CHUNK + 1)
    order = bench.planner.step()
    bench.answer(order)
    before = (bench.directory.pins(), bench.directory.arena_in_use(0))
    bench.answer(order)
    bench.fail_load(order.loads[0].job, [0], Fault.CORRUPT)
    assert bench.planner.phase_of(A) is Phase.LOADED
    assert (bench.directory.pins(), bench.directory.arena_in_use(0)) == before
    assert bench.counted("late_reports") == 2
    assert bench.planner.match(RequestId("b"), ids, CHUNK + 1, 0).tokens == CHUNK


def test_a_report_for_an_older_use_of_a_request_id_changes_nothing() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    promise(bench, ids, 2 * CHUNK + 1)
    (old,) = bench.planner.step().loads
    assert bench.planner.finished(A) is False  # the load's own end frees the blocks
    assert promise(bench, ids, 2 * CHUNK + 1) == 2 * CHUNK
    (new,) = bench.planner.step().loads
    bench.fail_load(old.job, [0], Fault.UNAVAILABLE)
    assert bench.planner.phase_of(A) is Phase.LOADING
    bench.tell(loads=(LoadReport(new.job),))
    assert bench.planner.phase_of(A) is Phase.LOADED
    assert bench.directory.pins() == 0


# ---- every rank ---------------------------------------------------------------------------


def test_a_save_is_a_hit_only_when_every_rank_has_it() -> None:
    bench = Bench(hello(0, 2), hello(1, 2))
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    order = bench.planner.step()
    bench.answer(order, ranks=[0])
    assert bench.planner.match(RequestId("b"), ids, CHUNK + 1, 0).lookup is Lookup.MISS
    bench.answer(order, ranks=[1])
    assert bench.planner.match(RequestId("b"), ids, CHUNK + 1, 0).tokens == CHUNK


def test_one_rank_that_fails_fails_the_load() -> None:
    bench = Bench(hello(0, 2), hello(1, 2))
    ids = bench.save_prompt("p", 2)
    promise(bench, ids, 2 * CHUNK + 1)
    (load,) = bench.planner.step().loads
    bench.tell(loads=(LoadReport(load.job),))
    assert bench.planner.phase_of(A) is Phase.LOADING
    bench.fail_load(load.job, [1], Fault.CORRUPT, rank=1)
    assert bench.planner.phase_of(A) is Phase.FAILED
    assert bench.planner.match(A, ids, 2 * CHUNK + 1, 0).tokens == CHUNK


@pytest.mark.parametrize(
    ("hellos", "named"),
    [
        ((hello(0, 2),), "1"),
        ((hello(0, 2), hello(1, 2, namespace=b"m" * 32)), "namespace"),
        ((hello(0, 2), hello(0, 2)), "ranks"),
        ((hello(0, 2), hello(1, 2, rules=(STATE,))), "rules"),
    ],
)
def test_ranks_that_disagree_are_an_error_at_start(hellos, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Bench(*hellos)


def test_the_poorest_rank_decides_the_slots() -> None:
    bench = Bench(hello(0, 2, slots=3), hello(1, 2, slots=5))
    assert bench.directory.arena_slots(0) == 3


# ---- source blocks ------------------------------------------------------------------------


def test_blocks_are_held_while_a_save_reads_them_and_no_longer() -> None:
    bench = Bench()
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    assert bench.planner.finished(A) is True
    order = bench.planner.step()
    (hold,) = order.holds
    assert hold.request == A
    assert hold.jobs == (order.saves[0].job,)
    bench.answer(order)
    assert bench.planner.finished(A) is False


def test_preemption_fences_the_copies_and_saves_again_later() -> None:
    bench = Bench()
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    (save,) = bench.planner.step().saves
    bench.planner.preempted(A)
    assert bench.planner.step().fences == (save.job,)
    bench.tell(saves=(SaveReport(save.job, (FailedItem(0, Fault.CANCELLED),)),))
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    assert len(bench.planner.step().saves) == 1


def test_a_request_that_loads_again_after_preemption_is_not_held_for_its_old_saves() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 1)
    more = [*ids, *chunk_ids("q", 1)]
    bench.planner.match(A, more, 2 * CHUNK + 1, 0)
    bench.planner.progress(A, more, 2 * CHUNK, lambda: bench.tables(2 * CHUNK))
    bench.planner.step()
    bench.planner.preempted(A)
    assert promise(bench, more, 2 * CHUNK + 1) == CHUNK
    assert bench.planner.finished(A) is False


# ---- disk ---------------------------------------------------------------------------------


def disk_bench(prompt: str = "p", chunks: int = 3, **changes: object) -> tuple[Bench, list]:
    """A planner that starts with ``chunks`` chunks of ``prompt`` on disk."""
    ids = chunk_ids(prompt, chunks)
    held = [Held(ref, float(index)) for index, ref in enumerate(refs(ids))]
    return Bench(hello(disk_frames=8, inventory=held), **changes), ids


def test_what_a_restart_finds_on_disk_is_promised_and_promoted() -> None:
    bench, ids = disk_bench()
    assert promise(bench, ids, 3 * CHUNK + 1) == 3 * CHUNK
    (load,) = (order := bench.planner.step()).loads
    assert [item.source for item in load.items] == [Tier.DISK] * 3
    assert NO_SLOT not in [item.slot for item in load.items]
    bench.answer(order)
    assert bench.counted("loaded_tokens_disk") == 3 * CHUNK
    assert promise(bench, ids, 3 * CHUNK + 1, name=RequestId("b")) == 3 * CHUNK
    assert [item.source for item in bench.planner.step().loads[0].items] == [Tier.ARENA] * 3


def test_a_second_reader_waits_for_the_promotion() -> None:
    bench, ids = disk_bench()
    promise(bench, ids, 3 * CHUNK + 1)
    order = bench.planner.step()
    other = RequestId("b")
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).lookup is Lookup.PENDING
    bench.answer(order)
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).tokens == 3 * CHUNK


def test_a_disk_that_timed_out_is_not_promised_from_for_a_while() -> None:
    bench, ids = disk_bench(disk_cooldown_s=30.0)
    promise(bench, ids, 3 * CHUNK + 1)
    (load,) = bench.planner.step().loads
    place = (load.items[0].ref.group, load.items[0].slot)
    failed = tuple(FailedItem(item, Fault.TIMEOUT) for item in range(3))
    bench.tell(loads=(LoadReport(load.job, failed, busy=(place,)),))
    other = RequestId("b")
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).lookup is Lookup.MISS
    assert bench.counted("disk_degraded") == 1
    assert bench.directory.arena_in_use(0) == 1  # the slot that a lost reader may still write
    bench.tell(freed=(place,))
    assert bench.directory.arena_in_use(0) == 0
    bench.clock.advance(31.0)
    assert bench.planner.match(other, ids, 3 * CHUNK + 1, 0).tokens == 3 * CHUNK
    assert bench.counted("disk_degraded") == 0


def test_saves_are_written_behind_within_the_bound() -> None:
    bench = Bench(hello(slots=8, disk_frames=8), pending_writes_max=2)
    ids = chunk_ids("p", 4)
    bench.planner.progress(A, ids, 4 * CHUNK, lambda: bench.tables(4 * CHUNK))
    order = bench.planner.step()
    assert [bool(item.write) for item in order.saves[0].items] == [True, True, False, False]
    bench.answer(order)
    follow_up = bench.planner.step()
    assert [write.ref.index for write in follow_up.writes] == [2, 3]
    bench.answer(follow_up)
    assert bench.directory.disk_in_use(0) == 4
    assert bench.directory.pins() == 0


def test_a_frame_whose_turn_to_be_written_comes_before_its_save_has_ended_is_written_later() -> None:
    bench = Bench(hello(slots=8, disk_frames=8), pending_writes_max=2)
    ids = chunk_ids("p", 4)
    bench.planner.progress(A, ids, 4 * CHUNK, lambda: bench.tables(4 * CHUNK))
    save = bench.planner.step().saves[0]
    # The first frames are on disk while the others are still being copied.
    written = tuple(WriteReport(item.write, stored=True) for item in save.items[:2])
    bench.tell(writes=written)
    assert bench.planner.step().writes == ()
    bench.tell(saves=(SaveReport(save.job),))
    order = bench.planner.step()
    assert [write.ref.index for write in order.writes] == [2, 3]
    bench.answer(order)
    assert bench.directory.disk_in_use(0) == 4


def test_inventory_of_some_ranks_only_is_removed() -> None:
    ids = chunk_ids("p", 3)
    held = [Held(ref, 1.0) for ref in refs(ids)]
    bench = Bench(hello(0, 2, disk_frames=8, inventory=held), hello(1, 2, disk_frames=8, inventory=held[:2]))
    assert bench.planner.match(A, ids, 3 * CHUNK + 1, 0).tokens == 2 * CHUNK
    assert [ref.index for ref in bench.planner.step().removes] == [2]


def test_an_idle_engine_is_asked_for_steps_until_all_is_written() -> None:
    bench = Bench(hello(slots=8, disk_frames=8), pending_writes_max=2, load_timeout_s=10.0)
    ids = chunk_ids("p", 4)
    bench.planner.progress(A, ids, 4 * CHUNK, lambda: bench.tables(4 * CHUNK))
    bench.planner.finished(A)
    steps = 0
    while bench.planner.wants_steps or not steps:
        bench.answer(bench.planner.step())
        steps += 1
    assert bench.directory.disk_in_use(0) == 4
    assert steps <= 3


def test_a_disk_that_does_not_write_does_not_keep_an_idle_engine_awake() -> None:
    bench = Bench(hello(slots=8, disk_frames=8), pending_writes_max=2, load_timeout_s=10.0)
    ids = chunk_ids("p", 4)
    bench.planner.progress(A, ids, 4 * CHUNK, lambda: bench.tables(4 * CHUNK))
    bench.planner.step()
    assert bench.planner.wants_steps
    bench.clock.advance(10.5)
    assert not bench.planner.wants_steps
