"""Snapshots on a worker: copied before `submit` returns, sealed and written later."""

from __future__ import annotations

import pytest
from lifecycle_bench import chunk_ids, refs
from one_rank import NAMESPACE, OneRank, R, arena_item, disk_item

from kvstow.codec.reference import ReferenceCodec
from kvstow.keys.chain import frame_key
from kvstow.keys.ids import ChunkRef, Rank
from kvstow.layout.geometry import BlockId, GroupId, GroupKind
from kvstow.lifecycle.messages import Fault, JobId, SaveItem, SaveJob, Slot, WorkOrder
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import FrameIdentity, FrameKind, open_frame

KINDS = (GroupKind.PAGED, GroupKind.WINDOW, GroupKind.STATE)
WINDOW, IMAGE = (refs(chunk_ids("p", 1), group)[0] for group in (1, 2))


def item(ref: ChunkRef, block: int, slot: int = 0, write: int = 0) -> SaveItem:
    return SaveItem(ref, Slot(slot), (BlockId(block),), JobId(write))


@pytest.fixture
def rank(disk: DiskStore) -> OneRank:
    return OneRank(disk, KINDS)


def test_a_snapshot_is_of_the_bytes_at_submit_whatever_comes_after(rank: OneRank) -> None:
    want = [rank.block(5), rank.block(6)]
    rank.snapshot([item(WINDOW, 5), item(IMAGE, 6)])
    rank.wipe()  # the engine's next step
    assert len(rank.saver) == 1
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert report.saves[0].failed == ()
    rank.load([arena_item(WINDOW, 0, (8,)), arena_item(IMAGE, 0, (9,))])
    rank.run()
    assert rank.outcome()[0].failed == ()
    assert [rank.block(8), rank.block(9)] == want


def test_a_save_is_of_the_bytes_when_its_turn_comes(rank: OneRank) -> None:
    """Why what does not stay must be a snapshot."""
    ref = refs(chunk_ids("p", 1))[0]
    rank.save(ref, 0, (5, 6))
    rank.wipe()
    rank.run()
    rank.load([arena_item(ref, 0, (8, 9))])
    rank.run()
    assert set(rank.block(8)) == {0xEE}


def test_a_snapshot_goes_on_to_disk_and_comes_back_from_there(rank: OneRank, disk: DiskStore) -> None:
    want = rank.block(6)
    rank.snapshot([item(IMAGE, 6, write=100)])
    rank.wipe()
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [write.stored for write in report.writes] == [True]
    assert [found.ref for found in disk.scan()] == [IMAGE]
    rank.snapshot([item(refs(chunk_ids("q", 1), 2)[0], 1)])  # another takes the slot
    rank.load([arena_item(IMAGE, 0, (9,))])
    rank.run()
    assert [failed.fault for failed in rank.outcome()[0].failed] == [Fault.CORRUPT]
    rank.load([disk_item(IMAGE, 1, (9,))], job=10)
    rank.run()
    assert rank.outcome()[0].failed == ()
    assert rank.block(9) == want


def test_only_the_frame_of_a_state_says_that_it_is_an_image(rank: OneRank) -> None:
    rank.snapshot([item(WINDOW, 5), item(IMAGE, 6)])
    rank.run()
    for ref, kind in ((WINDOW, FrameKind.CHUNK), (IMAGE, FrameKind.IMAGE)):
        key = frame_key(NAMESPACE, ref.group, ref.chunk)
        frame = rank.arena.frame(ref.group, 0)
        open_frame(frame, FrameIdentity(kind, key, NAMESPACE, Rank(0), len(rank.block(5))))


def test_a_full_queue_fails_the_snapshot_and_its_writes(rank: OneRank) -> None:
    rank.saver.close(0)
    rank.snapshot([item(WINDOW, 5, write=100), item(IMAGE, 6)])
    (report,), _, _ = rank.worker.poll()
    assert [failed.fault for failed in report.saves[0].failed] == [Fault.CANCELLED] * 2
    assert [(write.job, write.stored) for write in report.writes] == [(100, False)]


def test_a_copy_that_cannot_be_fails_its_item_and_not_the_engines_step(rank: OneRank) -> None:
    rank.snapshot([item(WINDOW, 99), item(IMAGE, 6), item(IMAGE, 6, slot=77)])
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [failed.item for failed in report.saves[0].failed] == [0, 2]
    assert rank.recorder.snapshot()["save_failed"] == 2


def test_a_device_that_has_no_room_for_a_copy_fails_the_item_and_not_the_engines_step(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says so with a RuntimeError: a copy from an accelerator goes through memory of its own there."""

    def gather(self: object, blocks: object, target: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(ReferenceCodec, "gather", gather)
    rank.snapshot([item(IMAGE, 6, write=100)])
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [failed.fault for failed in report.saves[0].failed] == [Fault.UNAVAILABLE]
    assert [(write.job, write.stored) for write in report.writes] == [(100, False)]


def test_a_snapshot_that_waited_long_is_as_good_as_ever(rank: OneRank) -> None:
    rank.snapshot([item(IMAGE, 6)])
    rank.clock.advance(100.0)
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert report.saves[0].failed == ()


def test_an_order_is_begun_without_its_snapshots_and_they_without_the_rest(rank: OneRank) -> None:
    """An engine may begin loads before the forward; what the forward makes can only be copied after it."""
    order = WorkOrder(snapshots=(SaveJob(JobId(2), R, (item(IMAGE, 6),)),))
    rank.worker.submit(order)
    rank.run()
    assert rank.worker.poll()[0] == ()
    want = rank.block(6)
    rank.worker.copy_snapshots(order)
    rank.wipe()
    rank.run()
    rank.load([arena_item(IMAGE, 0, (9,))], job=10)
    rank.run()
    assert rank.block(9) == want


def test_a_snapshot_counts_as_work_in_flight_until_it_is_sealed(rank: OneRank) -> None:
    rank.snapshot([item(IMAGE, 6)])
    assert rank.worker.poll()[0] == ()
    rank.run()
    (report,), _, _ = rank.worker.poll()
    assert [save.job for save in report.saves] == [1]
    assert report.rank == Rank(0)
    assert rank.arena.frame(GroupId(2), 0)[:8] == b"KVSTOW\r\n"
