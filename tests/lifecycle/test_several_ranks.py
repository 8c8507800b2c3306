"""What takes every rank: a frame is there, a pin may go, a slot is free, only when the last one says so."""

from __future__ import annotations

import pytest
from lifecycle_bench import CHUNK, Bench, chunk_ids, hello, refs

from kvstow.lifecycle.messages import (
    FailedItem,
    Fault,
    Held,
    LoadReport,
    RequestId,
    SaveReport,
    WriteReport,
)
from kvstow.lifecycle.requests import Lookup, Phase

A, B = RequestId("a"), RequestId("b")


def two_ranks(**what: object) -> Bench:
    return Bench(hello(0, 2, **what), hello(1, 2, **what))  # type: ignore[arg-type]


def promise(bench: Bench, ids, chunks: int, name: RequestId = A) -> None:
    """Match and allocate ``chunks`` chunks."""
    match = bench.planner.match(name, ids, chunks * CHUNK + 1, 0)
    assert match.tokens == chunks * CHUNK
    bench.planner.allocated(name, bench.tables(chunks * CHUNK + 1), match.tokens)


def test_what_a_load_reads_stays_until_the_last_rank_is_done() -> None:
    bench = two_ranks(slots=2)
    ids = bench.save_prompt("p", 2)
    promise(bench, ids, 2)
    order = bench.planner.step()
    bench.answer(order, ranks=[0])
    bench.save_prompt("other", 2)
    assert bench.counted("evicted_arena") == 0
    bench.answer(order, ranks=[1])
    assert bench.planner.phase_of(A) is Phase.LOADED
    assert bench.directory.pins() == 0
    bench.save_prompt("another", 2)
    assert bench.counted("evicted_arena") == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_that_one_rank_has_not_written_is_removed_on_all(failing: int) -> None:
    bench = two_ranks(disk_frames=4)
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    (save,) = bench.planner.step().saves
    for rank in range(2):
        write = WriteReport(save.items[0].write, stored=rank != failing)
        bench.tell(rank, saves=(SaveReport(save.job),), writes=(write,))
    assert bench.directory.disk_in_use(0) == 0
    assert bench.planner.step().removes == tuple(refs(ids))
    assert bench.counted("disk_write_failed") == 1
    # It is in the arena all the same, on both.
    assert bench.planner.match(B, ids, CHUNK + 1, 0).tokens == CHUNK


def test_a_chunk_that_one_rank_could_not_copy_is_not_there() -> None:
    bench = two_ranks()
    ids = chunk_ids("p", 1)
    bench.planner.progress(A, ids, CHUNK, lambda: bench.tables(CHUNK))
    (save,) = bench.planner.step().saves
    bench.tell(0, saves=(SaveReport(save.job, (FailedItem(0, Fault.CANCELLED),)),))
    bench.tell(1, saves=(SaveReport(save.job),))
    assert bench.planner.match(B, ids, CHUNK + 1, 0).lookup is Lookup.MISS
    assert bench.directory.arena_in_use(0) == 0


def test_a_slot_is_free_when_the_last_lost_reader_is_back() -> None:
    ids = chunk_ids("p", 1)
    inventory = [Held(ref, 1.0) for ref in refs(ids)]
    bench = two_ranks(slots=1, disk_frames=4, inventory=inventory)
    promise(bench, ids, 1)
    (load,) = bench.planner.step().loads
    place = (load.items[0].ref.group, load.items[0].slot)
    for rank in range(2):
        late = LoadReport(load.job, (FailedItem(0, Fault.TIMEOUT),), busy=(place,))
        bench.tell(rank, loads=(late,))
    assert bench.planner.phase_of(A) is Phase.FAILED
    bench.tell(1, freed=(place,))
    assert bench.directory.arena_in_use(0) == 1
    bench.tell(0, freed=(place,))
    assert bench.directory.arena_in_use(0) == 0


def test_a_slot_that_holds_a_frame_is_not_freed_by_a_reader_that_nobody_misses() -> None:
    bench = two_ranks(slots=1)
    ids = bench.save_prompt("p", 1)
    bench.tell(0, freed=((refs(ids)[0].group, bench.directory.slot_of(refs(ids)[0])),))
    assert bench.directory.arena_in_use(0) == 1


def test_a_rank_that_says_anything_lives() -> None:
    """Its loads may wait for as long as their worker lets them; it ends them itself."""
    bench = two_ranks()
    ids = bench.save_prompt("p", 1)
    promise(bench, ids, 1)
    order = bench.planner.step()
    bench.answer(order, ranks=[0])
    for _ in range(40):
        bench.clock.advance(2.0)
        bench.tell(1, saves=())
        bench.planner.step()
    assert bench.planner.phase_of(A) is Phase.LOADING
    bench.answer(order, ranks=[1])
    assert bench.planner.phase_of(A) is Phase.LOADED


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_rank_found_bad_is_not_excused_by_another_that_was_told_to_stop(
    order: tuple[int, int],
) -> None:
    bench = two_ranks()
    ids = bench.save_prompt("p", 3)
    promise(bench, ids, 3)
    (load,) = bench.planner.step().loads
    said = (
        (FailedItem(0, Fault.CORRUPT), FailedItem(2, Fault.CANCELLED)),
        (FailedItem(0, Fault.CANCELLED), FailedItem(1, Fault.CORRUPT)),
    )
    for rank in order:
        bench.tell(rank, loads=(LoadReport(load.job, said[rank]),))
    assert bench.planner.match(A, ids, 3 * CHUNK + 1, 0).lookup is Lookup.MISS
    gone = [bench.directory.tier_of(ref) is None for ref in refs(ids)]
    assert gone == [True, True, False]
