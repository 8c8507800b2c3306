"""Who goes first, and that somebody goes whoever may not."""

from __future__ import annotations

from lifecycle_bench import CHUNK, Bench, chunk_ids, hello

from kvstow.lifecycle.eviction import SCAN_MAX, RecencyOrder
from kvstow.lifecycle.messages import RequestId, SaveReport


def test_what_may_not_go_counts_as_used() -> None:
    order, chunks = RecencyOrder(), chunk_ids("p", 4)
    for chunk in chunks:
        order.add(chunk)
    assert order.victim(lambda chunk: chunk == chunks[2]) == chunks[2]
    assert order.oldest_first() == [chunks[2], chunks[3], chunks[0], chunks[1]]


def test_one_search_is_bounded_and_the_next_goes_on_behind_it() -> None:
    order, chunks = RecencyOrder(), chunk_ids("p", 2 * SCAN_MAX + 1)
    for chunk in chunks:
        order.add(chunk)
    found = [order.victim(lambda chunk: chunk == chunks[-1]) for _ in range(3)]
    assert found == [None, None, chunks[-1]]


def test_frames_that_wait_for_a_disk_that_hangs_do_not_stop_the_arena() -> None:
    bench = Bench(
        hello(slots=4 * SCAN_MAX, disk_frames=10_000),
        pending_saves_max=10_000,
        pending_writes_max=2 * SCAN_MAX,
    )
    for number in range(8 * SCAN_MAX // 64):
        ids, name, tables = chunk_ids(f"p{number}", 64), RequestId(f"r{number}"), bench.tables(64 * CHUNK)
        bench.planner.progress(name, ids, 64 * CHUNK, lambda tables=tables: tables)
        saves = bench.planner.step().saves
        bench.planner.finished(name)
        bench.tell(saves=tuple(SaveReport(save.job) for save in saves))  # nothing is heard of the writes
    assert bench.planner.match(RequestId("probe"), ids, 64 * CHUNK + 1, 0).tokens == 64 * CHUNK
