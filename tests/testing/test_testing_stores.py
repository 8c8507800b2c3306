"""The stores that are shipped for tests keep the contract themselves, with and without a wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.clock import ManualClock
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.stores.arena import Arena
from kvstow.stores.base import FrameName, Store
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.stores.framing import HEADER_BYTES
from kvstow.testing.arena_store import ArenaStore
from kvstow.testing.faulty_store import FaultyStore, NoFaults, StoreFault, StoreOperation
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.samples import NAMESPACE, RANK
from kvstow.testing.store_contract import FRAME_BYTES, StoreContract

FRAMES = 64
GROUPS = 12  # the contract's groups go up to 11


class AlwaysSlow:
    """SLOW before everything."""

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault:
        return StoreFault.SLOW


def no_pause(seconds: float) -> None:
    raise AssertionError(f"paused for {seconds} s without a fault")


def open_disk(path: Path, namespace: NamespaceDigest = NAMESPACE) -> DiskStore:
    root = DiskRoot.open(
        path,
        instance="ours",
        rank=RANK,
        world_size=Rank(RANK + 1),
        budget_bytes=FRAMES * FRAME_BYTES,
        clock=ManualClock(),
    )
    return DiskStore(root, namespace)


class TestMemoryStore(StoreContract):
    budget_frames = FRAMES

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(FRAMES * FRAME_BYTES, ManualClock())


class TestArenaStore(StoreContract):
    budget_frames = FRAMES

    def damage(self, store: Store, name: FrameName, content: bytes) -> None:
        assert isinstance(store, ArenaStore)
        place = store.slot_of(name)
        assert place is not None
        if len(content) == FRAME_BYTES:
            store.arena.frame(*place)[:FRAME_BYTES] = content
        else:  # a slot's length is not in the slot
            store.put(name, memoryview(content))

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        slots = [FRAMES] * GROUPS
        arena = Arena(slots, [FRAME_BYTES + HEADER_BYTES] * GROUPS, 0)
        store = ArenaStore(arena, slots, ManualClock())
        yield store
        store.close()


class TestFaultyMemoryStoreWithoutFaults(StoreContract):
    budget_frames = FRAMES

    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore(FRAMES * FRAME_BYTES, ManualClock()), NoFaults(), no_pause)


class TestFaultyDiskStoreWithoutFaults(StoreContract):
    budget_frames = FRAMES

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = FaultyStore(open_disk(tmp_path), NoFaults(), no_pause)
        yield store
        store.close()


class TestSlowMemoryStore(StoreContract):
    budget_frames = FRAMES

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        pauses: list[float] = []
        yield FaultyStore(
            MemoryStore(FRAMES * FRAME_BYTES, ManualClock()), AlwaysSlow(), pauses.append, slow_s=0.25
        )
        assert pauses
        assert set(pauses) == {0.25}


class TestSlowDiskStore(StoreContract):
    budget_frames = FRAMES

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        pauses: list[float] = []
        store = FaultyStore(open_disk(tmp_path), AlwaysSlow(), pauses.append, slow_s=0.25)
        yield store
        store.close()
        assert pauses
        assert set(pauses) == {0.25}
