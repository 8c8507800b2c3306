"""One stored copy of a replicated group: the first rank's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.clock import ManualClock
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.replica import ReplicaStore
from kvstow.testing.samples import blank_frame, opened, sample_frame, sample_name, sample_payload

SHARED, OWN = GroupId(0), GroupId(1)
NAMESPACES = [NamespaceDigest(hashlib.sha256(b"rank %d" % rank).digest()) for rank in range(2)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[DiskStore | ReplicaStore]]:
    """The stores of two ranks of one engine."""
    roots = [
        DiskRoot.open(
            tmp_path, instance="a", rank=Rank(rank), world_size=2, budget_bytes=1 << 20, clock=ManualClock()
        )
        for rank in range(2)
    ]
    own = [DiskStore(root, namespace) for root, namespace in zip(roots, NAMESPACES, strict=True)]
    first = DiskReader(roots[1], NAMESPACES[0], Rank(0))
    stores = [own[0], ReplicaStore(own[1], first, frozenset([SHARED]))]
    yield stores
    for store in stores:
        store.close()


def test_the_first_ranks_copy_serves_both(ranks: list[DiskStore | ReplicaStore], tmp_path: Path) -> None:
    name = sample_name(0, SHARED)
    for store in ranks:
        store.put(name, sample_frame(name))
    assert len([path for path in tmp_path.rglob("g0/*/*") if path.is_file()]) == 1
    for store in ranks:
        target = blank_frame()
        assert store.contains(name)
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name)
        assert [found.ref for found in store.scan()] == [name.ref]


def test_a_frame_is_there_for_nobody_before_the_first_rank_has_written_it(
    ranks: list[DiskStore | ReplicaStore],
) -> None:
    name = sample_name(0, SHARED)
    ranks[1].put(name, sample_frame(name))
    assert not ranks[1].contains(name)
    assert not ranks[1].get_into(name, blank_frame())


def test_only_the_first_rank_removes_it(ranks: list[DiskStore | ReplicaStore]) -> None:
    name, own = sample_name(0, SHARED), sample_name(0, OWN)
    ranks[0].put(name, sample_frame(name))
    ranks[1].put(own, sample_frame(own))
    ranks[1].remove([name, own])
    assert ranks[1].contains(name)
    assert not ranks[1].contains(own)
    ranks[0].remove([name])
    assert not ranks[1].contains(name)


def test_other_groups_are_each_ranks_own(ranks: list[DiskStore | ReplicaStore]) -> None:
    name = sample_name(3, OWN)
    ranks[1].put(name, sample_frame(name, version=1))
    assert not ranks[0].contains(name)
    target = blank_frame()
    assert ranks[1].get_into(name, target)
    assert opened(target, name) == sample_payload(name, version=1)
    assert [found.ref for found in ranks[1].scan()] == [name.ref]
