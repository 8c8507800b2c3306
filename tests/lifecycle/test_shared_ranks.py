"""Ranks that hold the same bytes: the first keeps each frame, the others load it from there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifecycle_bench import chunk_ids, refs
from one_rank import NAMESPACE, OneRank, arena_item, disk_item, small_layout

from kvstow.clock import ManualClock
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.lifecycle.messages import Fault, JobId, SaveItem, Slot
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import frame_bytes
from kvstow.stores.replica import ReplicaStore
from kvstow.stores.shared_slots import SharedSlots

G0 = GroupId(0)
REF = refs(chunk_ids("p", 1))[0]


def share() -> tuple[SharedSlots, SharedSlots]:
    size = frame_bytes(small_layout([GroupKind.PAGED]).payload_bytes(G0))
    first = SharedSlots.make({G0: 4}, {G0: size})
    return first, SharedSlots.attach(os.dup(first.descriptor), {G0: 4}, {G0: size})


def open_root(path: Path, rank: int) -> DiskRoot:
    return DiskRoot.open(
        path, instance="i", rank=Rank(rank), world_size=2, budget_bytes=1 << 20, clock=ManualClock()
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[tuple[OneRank, OneRank]]:
    """The first, and another that reads what that keeps in memory and on disk."""
    first, other = share()
    roots = [open_root(tmp_path / "disk", rank) for rank in (0, 1)]
    own = DiskStore(roots[1], NamespaceDigest(bytes([1]) * 32))
    theirs = DiskReader(roots[1], NAMESPACE, Rank(0))
    both = (
        OneRank(DiskStore(roots[0], NAMESPACE), shared=first),
        OneRank(ReplicaStore(own, theirs, frozenset({G0})), shared=other),
    )
    yield both
    for rank in both:
        rank.worker.shutdown()
        rank.arena.close()


def test_the_first_rank_saves_and_both_load(ranks: tuple[OneRank, OneRank]) -> None:
    first, other = ranks
    for rank in (other, first):
        rank.save(REF, 2, [3, 5])
        rank.run()
        ((report,), _, _) = rank.worker.poll()
        assert report.saves[0].failed == ()
    assert other.recorder.snapshot()["saved_bytes"] == 0
    for rank in ranks:
        rank.wipe()
        rank.load([arena_item(REF, 2, [7, 1])])
        rank.run()
        load, _, _ = rank.outcome()
        assert load.failed == ()
    for block in (7, 1):
        assert first.block(block) == other.block(block) != b"\xee" * len(first.block(block))


def test_a_snapshot_is_the_first_ranks_too(ranks: tuple[OneRank, OneRank]) -> None:
    first, other = ranks
    for rank in (other, first):
        rank.snapshot([SaveItem(REF, Slot(0), (3, 5), JobId(0))])  # type: ignore[arg-type]
        rank.run()
        rank.worker.poll()
    other.load([arena_item(REF, 0, [3, 5])])
    other.run()
    load, _, _ = other.outcome()
    assert load.failed == ()


def test_a_rank_whose_first_has_not_saved_finds_nothing(ranks: tuple[OneRank, OneRank]) -> None:
    """The directory waits for every rank's report; were it not to, the header would say so."""
    _, other = ranks
    other.save(REF, 2, [3, 5])
    other.run()
    other.wipe()
    other.load([arena_item(REF, 2, [3, 5])])
    other.run()
    load, _, _ = other.outcome()
    assert [failed.fault for failed in load.failed] == [Fault.CORRUPT]
    assert other.block(3) == b"\xee" * len(other.block(3))


def test_what_comes_from_disk_goes_through_the_first_ranks_slot_and_past_it_on_others(
    ranks: tuple[OneRank, OneRank],
) -> None:
    first, other = ranks
    first.save(REF, 0, [3, 5], write=True)
    other.save(REF, 0, [3, 5], write=True)
    for rank in ranks:
        rank.run()
        reports, _, _ = rank.worker.poll()
        assert [write.stored for report in reports for write in report.writes] == [True]
        rank.wipe()
    kept = bytes(first.arena.frame(G0, 0))
    for rank in (other, first):
        assert bytes(first.arena.frame(G0, 1)) == bytes(len(kept))
        rank.load([disk_item(REF, 1, [3, 5])])
        rank.run()
        load, _, _ = rank.outcome()
        assert load.failed == ()
    assert bytes(other.arena.frame(G0, 1)) == kept
    assert first.block(5) == other.block(5) != b"\xee" * len(first.block(5))


def test_a_reader_that_is_lost_on_another_rank_keeps_the_slot_until_it_is_back() -> None:
    """It would not write it; but the others need not know that."""
    _, shared = share()
    seen = []

    class Stuck:
        def get_into(self, _: object, __: memoryview) -> bool:
            other.worker.poll()  # notices that the read has begun: the bound runs from here
            other.clock.advance(10.5)
            seen.append(other.outcome())
            return False

        def close(self) -> None: ...

    other = OneRank(Stuck(), shared=shared)
    other.load([disk_item(REF, 1, [3, 5])])
    other.run()
    ((load, finished, _),) = seen
    assert load.busy == ((G0, Slot(1)),)
    assert [loaded for _, loaded in finished] == [False]
    ((report,), _, _) = other.worker.poll()
    assert report.freed == ((G0, Slot(1)),)
