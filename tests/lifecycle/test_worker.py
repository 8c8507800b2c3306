from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from lifecycle_bench import chunk_ids, refs
from one_rank import OneRank, R, arena_item, disk_item

from kvstow.errors import StoreUnavailableError
from kvstow.layout.geometry import BlockId, GroupId
from kvstow.lifecycle.messages import (
    NO_SLOT,
    Fault,
    Hold,
    JobId,
    LoadJob,
    LoadReport,
    RequestId,
    SaveItem,
    SaveJob,
    Slot,
    WorkOrder,
    WriteItem,
)
from kvstow.lifecycle.transfers import LoadTransfer, SaveTransfer
from kvstow.stores.base import FrameName, StoredFrame
from kvstow.stores.disk.store import DiskStore


@pytest.fixture
def rank(disk: DiskStore) -> OneRank:
    return OneRank(disk)


REF = refs(chunk_ids("p", 2))[0]
NEXT = refs(chunk_ids("p", 2))[1]


def test_save_and_load_through_the_arena_is_bit_exact(rank: OneRank) -> None:
    rank.save(REF, 2, (5, 3))
    rank.run()
    rank.outcome()
    want = [rank.block(5), rank.block(3)]
    rank.wipe()
    rank.load([arena_item(REF, 2, (7, 9))])
    rank.run()
    report, finished, _ = rank.outcome()
    assert report.failed == ()
    assert finished == [(R, True)]
    assert [rank.block(7), rank.block(9)] == want
    assert set(rank.block(5)) == {0xEE}


def test_blocks_under_the_floor_stay_untouched(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3))
    rank.run()
    want = rank.block(3)
    rank.wipe()
    rank.load([arena_item(REF, 0, (7, 9), skip=1)])
    rank.run()
    assert set(rank.block(7)) == {0xEE}
    assert rank.block(9) == want


def test_a_slot_that_holds_another_chunk_is_a_miss_and_touches_no_block(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3))
    rank.run()
    rank.outcome()
    rank.wipe()
    rank.load([arena_item(NEXT, 0, (7, 9))])
    rank.run()
    report, finished, _ = rank.outcome()
    assert [failed.fault for failed in report.failed] == [Fault.CORRUPT]
    assert finished == [(R, False)]
    assert set(rank.block(7)) == {0xEE}
    assert rank.recorder.snapshot()["corrupt_frames"] == 1


def test_write_behind_then_load_from_disk_into_a_slot_and_through_staging(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3), write=True)
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [write.stored for write in report.writes] == [True]
    want = [rank.block(5), rank.block(3)]
    for slot in (Slot(1), NO_SLOT):
        rank.wipe()
        rank.load([disk_item(REF, slot, (7, 9))])
        rank.run()
        assert rank.outcome()[0].failed == ()
        assert [rank.block(7), rank.block(9)] == want
    rank.wipe()
    rank.load([arena_item(REF, 1, (1, 2))])  # promoted
    rank.run()
    assert [rank.block(1), rank.block(2)] == want


def test_an_absent_file_is_a_miss(rank: OneRank) -> None:
    rank.load([disk_item(REF, 1, (7, 9))])
    rank.run()
    assert [failed.fault for failed in rank.outcome()[0].failed] == [Fault.ABSENT]


def test_a_removal_and_a_later_write_keep_their_order(rank: OneRank, disk: DiskStore) -> None:
    rank.save(REF, 0, (5, 3), write=True)
    rank.run()
    rank.worker.submit(WorkOrder(removes=(REF,), writes=(WriteItem(JobId(101), REF, Slot(0)),)))
    rank.run()
    assert [found.ref for found in disk.scan()] == [REF]
    rank.worker.submit(WorkOrder(removes=(REF,)))
    rank.run()
    assert list(disk.scan()) == []


def test_a_load_that_hangs_ends_at_its_bound_and_never_touches_blocks_again(disk: DiskStore) -> None:
    rank = OneRank(disk)
    rank.save(REF, 0, (5, 3), write=True)
    rank.run()
    rank.outcome()
    rank.wipe()
    rank.load([disk_item(REF, 1, (7, 9)), disk_item(NEXT, 2, (1, 2))])
    stuck = Stuck(disk, lambda: None)
    assert rank.outcome()[0] is None
    rank.clock.advance(10.5)
    report, finished, _ = rank.outcome()
    assert {failed.fault for failed in report.failed} == {Fault.TIMEOUT}
    assert finished == [(R, False)]
    rank.run()  # the readers come to it late
    assert set(rank.block(7)) == {0xEE}
    assert rank.outcome() == (None, [], [])
    assert stuck is not None


def test_a_reader_that_comes_back_late_frees_its_slot_and_writes_no_block(disk: DiskStore) -> None:
    rank = OneRank(disk)
    rank.save(REF, 0, (5, 3), write=True)
    rank.run()
    rank.outcome()
    rank.wipe()

    def give_up_meanwhile() -> None:
        rank.worker.poll()  # notices that the read has begun: the bound runs from here
        rank.clock.advance(10.5)
        seen.append(rank.outcome())

    seen: list = []
    slow = OneRank(Stuck(disk, give_up_meanwhile))
    slow.memory[:] = 0xEE
    rank = slow
    rank.load([disk_item(REF, 1, (7, 9))])
    rank.run()
    report, finished, _ = seen[0]
    assert report.busy == ((GroupId(0), Slot(1)),)
    assert finished == [(R, False)]
    assert set(rank.block(7)) == {0xEE}
    (freed,), _, _ = rank.worker.poll()
    assert freed.freed == ((GroupId(0), Slot(1)),)
    assert freed.loads == ()


def test_a_slot_that_became_another_frames_under_a_load_that_was_given_up_is_not_called_corrupt(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.save(REF, 0, (1, 2))
    rank.run()
    rank.worker.poll()
    rank.load([arena_item(REF, 0, (8, 9))])
    find = rank.arena.frame

    def frame_of_a_thread_that_was_held_up(group: GroupId, slot: int) -> memoryview:
        rank.worker.poll()  # its bound begins
        rank.clock.advance(20.0)
        assert rank.outcome()[0].failed[0].fault is Fault.TIMEOUT
        monkeypatch.setattr(rank.arena, "frame", find)
        rank.save(NEXT, 0, (3, 4), job=2)
        rank.saver.run_all()
        return find(group, slot)

    monkeypatch.setattr(rank.arena, "frame", frame_of_a_thread_that_was_held_up)
    rank.loader.run_all()
    assert rank.recorder.snapshot()["corrupt_frames"] == 0


def test_a_queue_that_moves_is_never_late(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3))
    rank.run()
    for job in range(10, 40):
        rank.load([arena_item(REF, 0, (7, 9))], job=job, request=RequestId(f"r{job}"))
    done = []
    for _ in range(30):
        rank.clock.advance(9.0)  # each takes nearly the bound; the last waits for 29 others
        rank.loader.run_one()
        done += rank.outcome()[1]
    assert [loaded for _, loaded in done] == [True] * 30


def test_a_refused_promise_is_reported_at_once(rank: OneRank) -> None:
    rank.load([])
    report, finished, _ = rank.outcome()
    assert report.refused
    assert finished == [(R, False)]


def test_loads_that_ended_give_those_behind_them_their_time_anew(rank: OneRank) -> None:
    """However long the engine's steps take: the worker hears of both only at the next."""
    rank.save(REF, 0, (5, 3))
    rank.run()
    rank.outcome()
    rank.load([arena_item(REF, 0, (7, 9))], job=8)
    rank.load([arena_item(REF, 0, (8, 10))], job=9, request=RequestId("behind"))
    rank.loader.run_one()
    rank.clock.advance(30.0)
    assert rank.outcome()[1] == [(R, True)]
    rank.clock.advance(9.0)
    rank.loader.run_one()
    assert rank.outcome()[1] == [(RequestId("behind"), True)]


def test_a_fence_cancels_what_has_not_begun(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3), write=True)
    rank.worker.fence((JobId(1),))
    rank.wipe()
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [failed.fault for failed in report.saves[0].failed] == [Fault.CANCELLED]
    assert [write.stored for write in report.writes] == [False]


def test_held_requests_are_sent_when_their_saves_have_ended(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3))
    rank.worker.submit(WorkOrder(holds=(Hold(R, (JobId(1),)),)))
    assert rank.outcome()[2] == []
    rank.run()
    assert rank.outcome()[2] == [R]
    assert rank.outcome()[2] == []


def test_a_request_is_held_until_the_last_of_its_saves_has_ended(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3), job=1)
    rank.save(NEXT, 1, (2, 6), job=2)
    rank.worker.submit(WorkOrder(holds=(Hold(R, (JobId(1), JobId(2))),)))
    assert rank.saver.run_one()
    assert rank.outcome()[2] == []
    rank.run()
    assert rank.outcome()[2] == [R]


def test_a_save_that_waited_too_long_is_dropped(rank: OneRank) -> None:
    """Blocks are held for it; it is dropped though the saver does nothing any more."""
    rank.save(REF, 0, (5, 3), write=True)
    rank.worker.submit(WorkOrder(holds=(Hold(R, (JobId(1),)),)))
    rank.clock.advance(5.5)
    (report,), _, sent = rank.worker.poll()
    assert [failed.fault for failed in report.saves[0].failed] == [Fault.CANCELLED]
    assert [write.stored for write in report.writes] == [False]
    assert sent == [R]
    # The blocks are the engine's again: a saver that comes back copies nothing and says nothing.
    rank.run()
    assert rank.worker.poll() == ((), [], [])


def test_a_save_whose_turn_came_is_not_dropped(rank: OneRank) -> None:
    rank.save(REF, 0, (5, 3))
    rank.run()
    rank.clock.advance(5.5)
    (report,), _, _ = rank.worker.poll()
    assert report.saves[0].failed == ()


def test_full_queues_fail_the_job_and_not_the_caller(disk: DiskStore) -> None:
    rank = OneRank(disk)
    for executor in (rank.saver, rank.loader, rank.readers, rank.writer):
        executor.close(0)
    rank.save(REF, 0, (5, 3), write=True)
    rank.load([disk_item(REF, 1, (7, 9))])
    rank.worker.submit(WorkOrder(removes=(REF,), writes=(WriteItem(JobId(101), NEXT, Slot(0)),)))
    (report,), finished, _ = rank.worker.poll()
    assert [failed.fault for failed in report.saves[0].failed] == [Fault.CANCELLED]
    assert finished == [(R, False)]
    assert [write.stored for write in report.writes] == [False, False]


def test_a_disk_that_fails_costs_a_recompute_and_a_write(disk: DiskStore) -> None:
    rank = OneRank(Stuck(disk, broken))
    rank.save(REF, 0, (5, 3), write=True)
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert report.saves[0].failed == ()
    assert [write.stored for write in report.writes] == [False]
    rank.load([disk_item(REF, 1, (7, 9))])
    rank.run()
    assert [failed.fault for failed in rank.outcome()[0].failed] == [Fault.UNAVAILABLE]


def broken() -> None:
    raise StoreUnavailableError("the disk is gone")


class Stuck:
    """A disk on which something happens during every access."""

    name = "stuck"

    def __init__(self, disk: DiskStore, during: Callable[[], None]) -> None:
        self._disk = disk
        self._during = during

    def put(self, name: FrameName, frame: memoryview) -> None:
        self._during()
        self._disk.put(name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        self._during()
        return self._disk.get_into(name, target)

    def contains(self, name: FrameName) -> bool:
        return self._disk.contains(name)

    def remove(self, names: Iterable[FrameName]) -> None:
        self._disk.remove(names)

    def scan(self) -> Iterator[StoredFrame]:
        return self._disk.scan()

    def close(self) -> None:
        self._disk.close()


def test_a_load_given_up_waits_for_the_copy_that_runs_and_refuses_the_next() -> None:
    item = arena_item(REF, 0, (7, 9))
    transfer = LoadTransfer(LoadJob(JobId(1), R, (item, item)))
    copied: list[str] = []
    copying, may_end = threading.Event(), threading.Event()

    def copy() -> None:
        copying.set()
        may_end.wait()
        copied.append("first")

    transfer.begin(0)
    writer = threading.Thread(target=transfer.write_blocks, args=(copy,), daemon=True)
    writer.start()
    copying.wait()
    reports: list[LoadReport | None] = []
    giver = threading.Thread(target=lambda: reports.append(transfer.give_up(Fault.TIMEOUT)))
    giver.start()
    giver.join(0.05)
    assert giver.is_alive()
    may_end.set()
    giver.join()
    writer.join()
    assert copied == ["first"]
    assert [failed.fault for failed in reports[0].failed] == [Fault.TIMEOUT, Fault.TIMEOUT]
    transfer.write_blocks(lambda: copied.append("late"))
    assert copied == ["first"]


def test_a_fence_waits_for_the_copy_that_runs_and_refuses_the_next() -> None:
    transfer = SaveTransfer(SaveJob(JobId(1), R, (SaveItem(REF, Slot(0), (BlockId(7),)),) * 2), 0.0)
    copied: list[str] = []
    copying, may_end = threading.Event(), threading.Event()

    def copy() -> None:
        copying.set()
        may_end.wait()
        copied.append("first")

    reader = threading.Thread(target=transfer.read_blocks, args=(0, copy), daemon=True)
    reader.start()
    copying.wait()
    fence = threading.Thread(target=transfer.cancel, daemon=True)
    fence.start()
    fence.join(0.05)
    assert fence.is_alive()
    may_end.set()
    fence.join()
    reader.join()
    assert copied == ["first"]
    assert not transfer.read_blocks(1, lambda: copied.append("late"))
    assert copied == ["first"]
