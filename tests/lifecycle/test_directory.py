from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_bench import CHUNK, PAGED, Bench, chunk_ids, hello, refs

from kvstow.errors import InvariantError
from kvstow.keys.ids import ChunkId
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
    WorkOrder,
    WriteReport,
)
from kvstow.lifecycle.requests import Lookup

A, B = RequestId("a"), RequestId("b")


def hit(bench: Bench, ids) -> int:
    """Chunks of ``ids`` that a new request would load."""
    tokens = bench.planner.match(RequestId("probe"), ids, len(ids) * CHUNK + 1, 0).tokens
    return tokens // CHUNK


def use(bench: Bench, ids, name: str = "user") -> None:
    """Load all that is kept of ``ids``."""
    match = bench.planner.match(RequestId(name), ids, len(ids) * CHUNK + 1, 0)
    bench.planner.allocated(RequestId(name), bench.tables(len(ids) * CHUNK + 1), match.tokens)
    bench.answer(bench.planner.step())
    bench.planner.finished(RequestId(name))


def test_the_end_of_the_oldest_prefix_goes_first() -> None:
    bench = Bench(hello(slots=4))
    old = bench.save_prompt("old", 2)
    new = bench.save_prompt("new", 2)
    bench.save_prompt("more", 1)
    assert (hit(bench, old), hit(bench, new)) == (1, 2)
    assert bench.counted("evicted_arena") == 1


def test_a_hit_touches_the_whole_prefix() -> None:
    bench = Bench(hello(slots=4))
    old = bench.save_prompt("old", 2)
    new = bench.save_prompt("new", 2)
    use(bench, old)
    bench.save_prompt("more", 2)
    assert (hit(bench, old), hit(bench, new)) == (2, 0)


def test_a_lookup_is_no_use() -> None:
    bench = Bench(hello(slots=4))
    old = bench.save_prompt("old", 2)
    new = bench.save_prompt("new", 2)
    assert hit(bench, old) == 2
    bench.save_prompt("more", 2)
    assert (hit(bench, old), hit(bench, new)) == (0, 2)


def test_a_prefix_that_a_load_reads_is_not_evicted() -> None:
    bench = Bench(hello(slots=4))
    old = bench.save_prompt("old", 4)
    match = bench.planner.match(A, old, 4 * CHUNK + 1, 0)
    bench.planner.allocated(A, bench.tables(4 * CHUNK + 1), match.tokens)
    order = bench.planner.step()
    bench.save_prompt("new", 2)
    assert bench.counted("save_skipped_no_space") >= 1
    bench.answer(order)
    assert hit(bench, old) == 4


def test_chunks_below_a_floor_are_pinned_with_those_above() -> None:
    bench = Bench(hello(slots=4))
    ids = bench.save_prompt("p", 4)
    match = bench.planner.match(A, ids, 4 * CHUNK + 1, 2 * CHUNK)
    bench.planner.allocated(A, bench.tables(4 * CHUNK + 1), match.tokens)
    assert bench.directory.pins() == 4


def test_disk_evicts_in_the_same_order_and_orders_the_files_gone() -> None:
    bench = Bench(hello(slots=16, disk_frames=3))
    bench.save_prompt("old", 2)
    bench.save_prompt("new", 2)
    (gone,) = bench.order.removes
    assert gone.chunk == chunk_ids("old", 2)[1]
    assert bench.directory.disk_in_use(0) == 3


def test_the_last_copy_of_a_chunk_outlives_the_copies_of_those_that_follow() -> None:
    ids = chunk_ids("p", 2)
    held = [Held(ref, 1.0) for ref in refs(ids)]
    bench = Bench(hello(slots=4, disk_frames=2, inventory=held))
    other = bench.save_prompt("q", 2)  # takes both disk places, deepest first
    assert hit(bench, other) == 2
    assert hit(bench, ids) in (0, 1)


def save_and_write(bench: Bench, prompt: str, chunks: int, *refused: ChunkId) -> WorkOrder:
    """Like `Bench.save_prompt`, where some chunks cannot be written."""
    name, tables = RequestId("saver"), bench.tables(chunks * CHUNK)
    bench.planner.progress(name, chunk_ids(prompt, chunks), chunks * CHUNK, lambda: tables)
    order = bench.planner.step()
    bench.planner.finished(name)
    writes = {item.write: item.ref for save in order.saves for item in save.items if item.write}
    writes |= {write.job: write.ref for write in order.writes}
    bench.tell(
        saves=tuple(SaveReport(save.job) for save in order.saves),
        writes=tuple(WriteReport(job, ref.chunk not in refused) for job, ref in writes.items()),
    )
    return order


def test_what_stays_in_the_arena_for_its_followers_on_disk_is_written_once_more() -> None:
    bench = Bench(hello(slots=4, disk_frames=16))
    old = chunk_ids("p", 2)
    save_and_write(bench, "p", 2, old[0])
    order = save_and_write(bench, "more", 4)
    assert [write.ref.chunk for write in order.writes] == [old[0]]
    save_and_write(bench, "most", 4)
    assert hit(bench, old) == 2  # from disk
    assert bench.directory.tier_of(refs(old)[0]) is Tier.DISK


def test_what_cannot_be_written_does_not_keep_its_slot_for_its_followers_on_disk() -> None:
    bench = Bench(hello(slots=4, disk_frames=16))
    old = chunk_ids("p", 2)
    save_and_write(bench, "p", 2, old[0])
    save_and_write(bench, "more", 4, old[0])
    save_and_write(bench, "most", 4)
    assert hit(bench, old) == 0
    assert [bench.directory.slot_of(ref) != NO_SLOT for ref in refs(chunk_ids("most", 4))] == [True] * 4


def test_adopts_the_newest_that_fits_and_no_orphan() -> None:
    old, new = refs(chunk_ids("old", 2)), refs(chunk_ids("new", 2))
    orphan = refs(chunk_ids("x", 2))[1]
    held = [Held(ref, 1.0) for ref in old] + [Held(ref, 2.0) for ref in new] + [Held(orphan, 9.0)]
    bench = Bench(hello(disk_frames=3, inventory=held))
    assert hit(bench, chunk_ids("new", 2)) == 2
    assert hit(bench, chunk_ids("old", 2)) == 1
    assert set(bench.planner.step().removes) == {old[1], orphan}


def test_a_chunk_is_as_recent_as_what_follows_it_after_a_restart() -> None:
    deep, other = refs(chunk_ids("deep", 3)), refs(chunk_ids("other", 1))
    held = [Held(ref, float(ref.index)) for ref in deep] + [Held(other[0], 1.5)]
    bench = Bench(hello(disk_frames=3, inventory=held))
    assert hit(bench, chunk_ids("deep", 3)) == 3
    assert hit(bench, chunk_ids("other", 1)) == 0


def test_a_bad_frame_that_others_read_is_freed_after_them() -> None:
    bench = Bench(hello(slots=2))
    ids = bench.save_prompt("p", 2)
    jobs = []
    for name in (A, B):
        match = bench.planner.match(name, ids, 2 * CHUNK + 1, 0)
        bench.planner.allocated(name, bench.tables(2 * CHUNK + 1), match.tokens)
        jobs.append(bench.planner.step().loads[0].job)
    bad = LoadReport(jobs[0], (FailedItem(1, Fault.CORRUPT),))
    bench.tell(loads=(bad,))
    assert bench.directory.arena_in_use(0) == 2
    assert hit(bench, ids) == 1
    bench.tell(loads=(LoadReport(jobs[1]),))
    assert bench.directory.arena_in_use(0) == 1
    assert bench.directory.pins() == 0


def test_forget_all_leaves_nothing_and_removes_the_files() -> None:
    bench = Bench(hello(disk_frames=8))
    ids = bench.save_prompt("p", 3)
    assert bench.planner.forget_all() is True
    assert hit(bench, ids) == 0
    assert len(bench.planner.step().removes) == 3
    assert bench.directory.arena_in_use(0) == bench.directory.disk_in_use(0) == 0


def test_forget_all_keeps_what_is_in_use() -> None:
    bench = Bench()
    ids = bench.save_prompt("p", 2)
    match = bench.planner.match(A, ids, 2 * CHUNK + 1, 0)
    bench.planner.allocated(A, bench.tables(2 * CHUNK + 1), match.tokens)
    assert bench.planner.forget_all() is False
    bench.answer(bench.planner.step())
    assert bench.planner.forget_all() is True


def test_several_groups_hit_where_all_of_them_do() -> None:
    bench = Bench(hello(rules=(PAGED, PAGED), slots=8))
    ids = chunk_ids("p", 3)
    bench.planner.progress(A, ids, 3 * CHUNK, lambda: bench.tables(3 * CHUNK, groups=2))
    order = bench.planner.step()
    assert len(order.saves[0].items) == 6
    bench.answer(order)
    assert hit(bench, ids) == 3
    bench.directory.drop(refs(ids, group=1)[2], Tier.ARENA)
    assert hit(bench, ids) == 2


def test_a_chunk_is_saved_in_all_paged_groups_or_in_none() -> None:
    bench = Bench(hello(rules=(PAGED, PAGED), slots=(4, 2)))
    ids = chunk_ids("p", 3)
    bench.planner.progress(A, ids, 3 * CHUNK, lambda: bench.tables(3 * CHUNK, groups=2))
    (save,) = bench.planner.step().saves
    assert {(item.ref.group, item.ref.index) for item in save.items} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (bench.directory.arena_in_use(0), bench.directory.arena_in_use(1)) == (2, 2)


def test_misuse_is_named() -> None:
    bench = Bench()
    ref = refs(chunk_ids("p", 1))[0]
    with pytest.raises(InvariantError, match="never began"):
        bench.directory.arena_filled(ref)
    with pytest.raises(InvariantError, match="never began"):
        bench.directory.disk_failed(ref)
    assert bench.directory.reserve_arena(ref) != NO_SLOT
    with pytest.raises(InvariantError, match="not pinned"):
        bench.directory.unpin([ref])


# ---- anything may happen in any order ------------------------------------------------------


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 9), disk=st.integers(0, 9), ranks=st.integers(1, 2))
def test_whatever_happens_budgets_hold_and_nothing_stays_pinned(
    seed: int, slots: int, disk: int, ranks: int
) -> None:
    """Random prompts with shared prefixes, reports late, lost to failure or out of step."""
    chance = random.Random(seed)
    bench = Bench(*[hello(rank, ranks, slots=slots, disk_frames=disk) for rank in range(ranks)])
    prompts = [[*chunk_ids("shared", chance.randrange(3)), *chunk_ids(f"p{i}", 4)] for i in range(4)]
    live: dict[RequestId, list] = {}
    reports: list[Report] = []
    for _ in range(60):
        name = RequestId(f"r{chance.randrange(5)}")
        if name in live and chance.random() < 0.4:
            bench.planner.finished(name)
            del live[name]
        elif name not in live:
            ids = live[name] = chance.choice(prompts)
            tokens = len(ids) * CHUNK + 1
            match = bench.planner.match(name, ids, tokens, chance.randrange(2) * CHUNK)
            taken = match.tokens if chance.random() < 0.8 else 0
            bench.planner.allocated(name, bench.tables(tokens), taken)
        else:
            ids = live[name]
            computed = chance.randrange(len(ids) + 1) * CHUNK
            tables = bench.tables(len(ids) * CHUNK)
            bench.planner.progress(name, ids, computed, lambda tables=tables: tables)
            if chance.random() < 0.2:
                bench.planner.preempted(name)
        reports += _answers(bench, chance, ranks)
        for _ in range(chance.randrange(len(reports) + 1)):
            # Out of step between ranks; each rank's own come in order.
            rank = chance.choice(reports).rank
            first = next(index for index, report in enumerate(reports) if report.rank == rank)
            bench.planner.report(reports.pop(first))
        assert bench.directory.arena_in_use(0) <= slots
        assert bench.directory.disk_in_use(0) <= disk
        bench.clock.advance(chance.random())
    for _ in range(10):
        for report in reports:
            bench.planner.report(report)
        reports = _answers(bench, chance, ranks)
    assert bench.directory.pins() == 0
    assert not bench.planner.saves_in_flight
    assert not bench.planner.holds_blocks
    for ids in prompts:
        assert (
            bench.planner.match(RequestId("last"), ids, len(ids) * CHUNK + 1, 0).lookup is not Lookup.PENDING
        )


def _answers(bench: Bench, chance: random.Random, ranks: int) -> list[Report]:
    """What the ranks will say to the next order; some items fail on some rank."""
    order = bench.planner.step()
    answers: list[Report] = []
    taker = bench.planner.report
    bench.planner.report = answers.append  # type: ignore[method-assign]
    bench.answer(order, range(ranks))
    bench.planner.report = taker  # type: ignore[method-assign]
    return [_spoil(report, order, chance) for report in answers]


def _spoil(report: Report, order, chance: random.Random) -> Report:
    if chance.random() < 0.8:
        return report
    loads = tuple(
        LoadReport(load.job, (FailedItem(0, chance.choice(list(Fault))),)) if load.items else report_load
        for load, report_load in zip(order.loads, report.loads, strict=True)
    )
    saves = tuple(
        type(report_save)(save.job, (FailedItem(len(save.items) - 1, Fault.CANCELLED),))
        for save, report_save in zip(order.saves, report.saves, strict=True)
    )
    writes = tuple(type(write)(write.job, stored=False) for write in report.writes)
    return Report(report.rank, report.number, loads=loads, saves=saves, writes=writes)
