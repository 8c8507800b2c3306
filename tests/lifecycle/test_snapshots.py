"""Which windows and images are ordered to be copied, and when not."""

from __future__ import annotations

from lifecycle_bench import CHUNK, PAGED, STATE, Bench, chunk_ids, hello, refs, window

from kvstow.layout.geometry import NO_BLOCK, BlockId, GroupId
from kvstow.lifecycle.messages import (
    FailedItem,
    Fault,
    ImageOffer,
    RequestId,
    SaveReport,
    Tier,
    WorkOrder,
)
from kvstow.lifecycle.requests import Lookup

A, B = RequestId("a"), RequestId("b")
IDS = chunk_ids("p", 8)
WINDOWED, HYBRID = (PAGED, window(2 * CHUNK)), (PAGED, STATE)


def snapshot(bench: Bench, computed: int, images=(), *, name: RequestId = A, gone: int = 0) -> None:
    """One pass in which the forward leaves ``computed`` tokens; ``gone`` leading blocks are not kept."""
    tables = bench.tables(computed, len(bench.rules))
    for table in tables[1:]:
        table[:gone] = [NO_BLOCK] * gone
    bench.planner.snapshot(name, IDS, computed, lambda: tables, images)


def taken(order: WorkOrder) -> list[tuple[int, int]]:
    """Group and chunk of every item of the snapshots ordered."""
    return [(item.ref.group, item.ref.index) for job in order.snapshots for item in job.items]


# ---- windows -------------------------------------------------------------------------------


def test_window_chunks_are_taken_in_the_step_that_ends_them() -> None:
    bench = Bench(hello(rules=WINDOWED))
    ordered = []
    for computed in (3, CHUNK, CHUNK + 5, 3 * CHUNK):
        snapshot(bench, computed)
        order = bench.planner.step()
        ordered.append(taken(order))
        bench.answer(order)
    assert ordered == [[], [(1, 0)], [], [(1, 1), (1, 2)]]
    assert order.saves == ()


def test_paged_chunks_are_saved_once_final_and_windows_never_that_way() -> None:
    bench = Bench(hello(rules=WINDOWED))
    tables = bench.tables(2 * CHUNK, 2)
    bench.planner.progress(A, IDS, 2 * CHUNK, lambda: tables)
    order = bench.planner.step()
    assert [item.ref.group for item in order.saves[0].items] == [0, 0]
    assert order.snapshots == ()


def test_what_the_window_has_left_behind_is_passed_for_good() -> None:
    bench = Bench(hello(rules=WINDOWED))
    snapshot(bench, 3 * CHUNK, gone=3)  # one block of the second chunk is gone
    assert taken(bench.planner.step()) == [(1, 2)]
    snapshot(bench, 3 * CHUNK, gone=0)
    assert taken(bench.planner.step()) == []


def test_blocks_are_asked_for_only_if_a_window_chunk_is_new() -> None:
    bench = Bench(hello(rules=WINDOWED))
    asked = []

    def tables():
        asked.append(1)
        return bench.tables(2 * CHUNK, 2)

    for computed in (1, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK + 1):
        bench.planner.snapshot(A, IDS, computed, tables)
    assert len(asked) == 1
    other = Bench(hello(rules=HYBRID))
    other.planner.snapshot(A, IDS, CHUNK, tables, other.offers([1]))
    assert len(asked) == 1


def test_a_table_that_does_not_reach_is_looked_at_again() -> None:
    bench = Bench(hello(rules=WINDOWED))
    short = bench.tables(CHUNK, 2)
    bench.planner.snapshot(A, IDS, 2 * CHUNK, lambda: short)
    assert taken(bench.planner.step()) == [(1, 0)]
    snapshot(bench, 2 * CHUNK)
    assert taken(bench.planner.step()) == [(1, 1)]


def test_what_another_request_took_is_not_taken_again() -> None:
    bench = Bench(hello(rules=(PAGED, window(CHUNK), STATE)))
    snapshot(bench, 2 * CHUNK, bench.offers([1, 2]))
    order = bench.planner.step()
    snapshot(bench, 2 * CHUNK, bench.offers([1, 2]), name=B)  # still being copied
    assert bench.planner.step().snapshots == ()
    bench.answer(order)
    snapshot(bench, 2 * CHUNK, bench.offers([1, 2]), name=B)
    assert bench.planner.step().snapshots == ()
    assert bench.counted("images_skipped") == 0


def test_a_window_whose_copy_failed_is_taken_again_if_it_is_still_there() -> None:
    bench = Bench(hello(rules=WINDOWED))
    snapshot(bench, 2 * CHUNK)
    (job,) = bench.planner.step().snapshots
    failed = tuple(FailedItem(item, Fault.CANCELLED) for item in (0, 1))
    bench.tell(saves=(SaveReport(job.job, failed),))
    assert bench.directory.arena_in_use(GroupId(1)) == 0
    snapshot(bench, 2 * CHUNK, gone=1)
    assert taken(bench.planner.step()) == [(1, 1)]


def test_no_slot_now_is_tried_again_while_the_blocks_are_there() -> None:
    bench = Bench(hello(rules=WINDOWED, slots=(8, 1)))
    snapshot(bench, 2 * CHUNK)
    order = bench.planner.step()
    assert taken(order) == [(1, 0)]
    assert bench.counted("save_skipped_no_space") == 1
    bench.answer(order)
    snapshot(bench, 2 * CHUNK + 1)
    assert taken(bench.planner.step()) == [(1, 1)]


def test_copies_in_flight_are_bounded() -> None:
    bench = Bench(hello(rules=(PAGED, window(CHUNK), STATE)), pending_saves_max=2)
    snapshot(bench, 3 * CHUNK, bench.offers([3]))
    order = bench.planner.step()
    assert taken(order) == [(1, 0), (1, 1)]
    assert bench.counted("images_skipped") == 1
    bench.answer(order)
    snapshot(bench, 3 * CHUNK, bench.offers([3]))
    assert taken(bench.planner.step()) == [(1, 2), (2, 2)]


# ---- images --------------------------------------------------------------------------------


def test_an_image_at_the_end_of_a_chunk_is_taken_from_the_block_offered() -> None:
    bench = Bench(hello(rules=HYBRID))
    snapshot(bench, 3 * CHUNK, [ImageOffer(GroupId(1), 2 * CHUNK, BlockId(7))])
    (job,) = bench.planner.step().snapshots
    (item,) = job.items
    assert (item.ref, item.blocks) == (refs(IDS, 1)[1], (7,))


def test_an_image_that_cannot_be_named_is_counted_and_not_taken() -> None:
    bench = Bench(hello(rules=HYBRID))
    offers = [
        ImageOffer(GroupId(1), CHUNK + 3, BlockId(7)),  # off the grid
        ImageOffer(GroupId(1), 0, BlockId(7)),
        ImageOffer(GroupId(1), 4 * CHUNK, BlockId(7)),  # more than is computed
        ImageOffer(GroupId(1), CHUNK, NO_BLOCK),
        ImageOffer(GroupId(0), CHUNK, BlockId(7)),  # not a state
        ImageOffer(GroupId(5), CHUNK, BlockId(7)),
    ]
    snapshot(bench, 3 * CHUNK, offers)
    bench.planner.snapshot(B, IDS[:1], 3 * CHUNK, list, [ImageOffer(GroupId(1), 2 * CHUNK, BlockId(7))])
    assert bench.planner.step().snapshots == ()
    assert bench.counted("images_skipped") == len(offers) + 1


def test_several_groups_of_each_kind() -> None:
    bench = Bench(hello(rules=(STATE, window(CHUNK), PAGED, STATE, window(3), PAGED)))
    ids = bench.save_all("p", 2)
    assert sorted(taken(bench.order)) == [(g, i) for g in (0, 1, 3, 4) for i in (0, 1)]
    assert {item.ref.group for item in bench.order.saves[0].items} == {2, 5}
    match = bench.planner.match(B, ids, 2 * CHUNK + 1, 0)
    assert match.tokens == 2 * CHUNK
    bench.planner.allocated(B, bench.tables(2 * CHUNK + 1, 6), match.tokens)
    assert bench.planner.promised_by_tier(B)[Tier.ARENA] == 2 * CHUNK


# ---- roles, phases, and requests that go away ----------------------------------------------


def test_a_role_that_only_loads_takes_no_snapshot() -> None:
    bench = Bench(hello(rules=HYBRID), saves=False)
    snapshot(bench, CHUNK, bench.offers([1]))
    assert bench.planner.step().snapshots == ()


def test_a_request_that_loads_is_left_alone() -> None:
    bench = Bench(hello(rules=HYBRID))
    bench.save_all("p", 1)
    match = bench.planner.match(A, IDS, 2 * CHUNK, 0)
    assert match.lookup is Lookup.HIT
    bench.planner.allocated(A, bench.tables(2 * CHUNK, 2), match.tokens)
    snapshot(bench, 2 * CHUNK, bench.offers([2]))
    assert bench.planner.step().snapshots == ()


def test_a_snapshot_never_holds_blocks_and_is_never_fenced() -> None:
    bench = Bench(hello(rules=HYBRID))
    snapshot(bench, CHUNK, bench.offers([1]))
    bench.planner.step()
    assert not bench.planner.is_saving(A)
    bench.planner.preempted(A)
    assert bench.planner.finished(A) is False
    order = bench.planner.step()
    assert (order.fences, order.holds) == ((), ())


def test_a_request_that_goes_before_the_step_takes_its_orders_with_it() -> None:
    for leave in ("finished", "preempted"):
        bench = Bench(hello(rules=(PAGED, window(CHUNK), STATE), disk_frames=4))
        snapshot(bench, 2 * CHUNK, bench.offers([1, 2]))
        snapshot(bench, CHUNK, name=B)
        assert bench.directory.filling() == 4
        getattr(bench.planner, leave)(A)
        assert bench.directory.filling() == bench.directory.pins() == 0
        order = bench.planner.step()
        assert order.snapshots == order.writes == order.removes == ()
        assert [bench.directory.arena_in_use(GroupId(group)) for group in range(3)] == [0, 0, 0]
        # Nothing is lost but the time: another request takes them.
        snapshot(bench, 2 * CHUNK, bench.offers([2]), name=RequestId("c"))
        assert taken(bench.planner.step()) == [(1, 0), (1, 1), (2, 1)]


def test_only_the_request_that_goes_loses_its_orders() -> None:
    bench = Bench(hello(rules=HYBRID))
    snapshot(bench, 2 * CHUNK, bench.offers([1]))
    snapshot(bench, 2 * CHUNK, bench.offers([2]), name=B)
    bench.planner.finished(A)
    assert taken(bench.planner.step()) == [(1, 1)]


def test_a_preempted_request_looks_at_its_windows_from_the_start() -> None:
    bench = Bench(hello(rules=WINDOWED))
    snapshot(bench, 2 * CHUNK, gone=2)
    bench.answer(bench.planner.step())
    bench.planner.preempted(A)
    snapshot(bench, 2 * CHUNK)
    assert taken(bench.planner.step()) == [(1, 0)]


def test_a_save_that_no_worker_knows_of_is_dropped_at_preemption() -> None:
    """A fence would not stop it: it comes before the order that it belongs to."""
    bench = Bench(hello(disk_frames=4))
    bench.planner.progress(A, IDS, 2 * CHUNK, lambda: bench.tables(2 * CHUNK))
    bench.planner.preempted(A)
    order = bench.planner.step()
    assert order.saves == order.fences == order.removes == ()
    assert bench.directory.filling() == bench.directory.pins() == 0
    bench.planner.progress(A, IDS, 2 * CHUNK, lambda: bench.tables(2 * CHUNK))
    assert len(bench.planner.step().saves[0].items) == 2


# ---- on to disk ----------------------------------------------------------------------------


def test_a_group_with_few_slots_does_not_keep_the_others_from_disk() -> None:
    bench = Bench(hello(rules=HYBRID, slots=(8, 1), disk_frames=8))
    bench.save_all("p", 4)
    assert bench.directory.disk_in_use(GroupId(0)) == 4


def test_snapshots_are_written_behind_like_saves() -> None:
    bench = Bench(hello(rules=HYBRID, slots=(8, 2), disk_frames=8))
    snapshot(bench, 2 * CHUNK, bench.offers([1, 2]))
    order = bench.planner.step()
    assert [bool(item.write) for item in order.snapshots[0].items] == [True, False]
    bench.answer(order)
    order = bench.planner.step()
    assert [write.ref.index for write in order.writes] == [1]
    bench.answer(order)
    assert bench.directory.disk_in_use(GroupId(1)) == 2
    assert bench.directory.pins() == bench.directory.filling() == 0
