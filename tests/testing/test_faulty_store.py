"""Each fault does what its name says, to the operation it is given to and to nothing else."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.clock import ManualClock
from kvstow.errors import CorruptFrameError, InvariantError, NoSpaceError, StoreUnavailableError
from kvstow.keys.ids import Rank
from kvstow.stores.base import FrameName, Store
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.testing.faulty_store import (
    FAULTS_OF,
    FaultyStore,
    NoFaults,
    SeededFaults,
    StoreFault,
    StoreOperation,
)
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.samples import (
    NAMESPACE,
    RANK,
    blank_frame,
    opened,
    sample_frame,
    sample_name,
    sample_payload,
)

NAME = sample_name(0)
FRAME = sample_frame(NAME)


class Script:
    """Gives the faults it was told to, in order, then none; remembers what it was asked."""

    def __init__(self) -> None:
        self.next: list[StoreFault | None] = []
        self.asked: list[tuple[StoreOperation, FrameName | None]] = []

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        self.asked.append((operation, name))
        return self.next.pop(0) if self.next else None


class Bench:
    """A faulty store with its script, its pauses and what happens during them."""

    def __init__(self, inner: Store) -> None:
        self.script = Script()
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.inner = inner
        self.store = FaultyStore(inner, self.script, self._pause, slow_s=2.0, hang_s=900.0)

    def put(self, version: int = 0) -> None:
        self.store.put(NAME, sample_frame(NAME, version=version))

    def fails(self, *faults: StoreFault | None) -> FaultyStore:
        self.script.next = list(faults)
        return self.store

    def kept(self) -> bytes | None:
        """The payload that the inner store has, verified; None if there is no frame."""
        target = blank_frame()
        return opened(target, NAME) if self.inner.get_into(NAME, target) else None

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.meanwhile()


@pytest.fixture(params=["memory", "disk"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "memory":
        yield Bench(MemoryStore(1 << 30, ManualClock()))
        return
    root = DiskRoot.open(
        tmp_path,
        instance="ours",
        rank=RANK,
        world_size=Rank(RANK + 1),
        budget_bytes=1 << 30,
        clock=ManualClock(),
    )
    store = DiskStore(root, NAMESPACE)
    yield Bench(store)
    store.close()


def test_a_device_that_fails_keeps_what_there_was(bench: Bench) -> None:
    bench.put(version=1)
    target = blank_frame()
    for use in (
        lambda store: store.put(NAME, FRAME),
        lambda store: store.get_into(NAME, target),
        lambda store: store.contains(NAME),
        lambda store: store.remove([NAME]),
        lambda store: list(store.scan()),
    ):
        with pytest.raises(StoreUnavailableError, match="injected fault"):
            use(bench.fails(StoreFault.IO_ERROR))
    assert target == blank_frame()
    assert bench.kept() == sample_payload(NAME, version=1)


def test_no_space_keeps_what_there_was(bench: Bench) -> None:
    with pytest.raises(NoSpaceError, match=f"{len(FRAME)} bytes"):
        bench.fails(StoreFault.NO_SPACE).put(NAME, FRAME)
    assert bench.kept() is None


@pytest.mark.parametrize("turn", range(20))
@pytest.mark.parametrize(
    "fault", [StoreFault.SHORT_WRITE, StoreFault.TORN_WRITE, StoreFault.FLIPPED_WRITE], ids=str
)
def test_a_damaged_write_claims_success_and_never_opens(bench: Bench, fault: StoreFault, turn: int) -> None:
    given_frame = sample_frame(NAME)
    for _ in range(turn):
        bench.fails(fault).put(NAME, given_frame)
    bench.fails(fault).put(NAME, given_frame)
    assert given_frame == FRAME  # the caller's buffer is the caller's
    (stored,) = bench.inner.scan()
    assert (stored.size_bytes < len(FRAME)) == (fault is StoreFault.SHORT_WRITE)
    with pytest.raises(CorruptFrameError):
        bench.kept()
    if stored.size_bytes == len(FRAME):
        target = blank_frame()
        assert bench.inner.get_into(NAME, target)
        wrong = [place for place in range(len(FRAME)) if target[place] != FRAME[place]]
        if fault is StoreFault.FLIPPED_WRITE:
            assert len(wrong) == 1
        else:
            assert wrong
            assert not any(target[wrong[0] :])
            assert target[: wrong[0]] == FRAME[: wrong[0]]


def test_damage_lies_elsewhere_each_time_and_the_same_in_each_run() -> None:
    def places() -> list[int]:
        bench, found = Bench(MemoryStore(1 << 30, ManualClock())), []
        for _ in range(10):
            bench.fails(StoreFault.FLIPPED_WRITE).put(NAME, FRAME)
            target = blank_frame()
            assert bench.inner.get_into(NAME, target)
            found += [place for place in range(len(FRAME)) if target[place] != FRAME[place]]
        return found

    first = places()
    assert first == places()
    assert len(set(first)) > 5


def test_a_short_read_fills_a_part_and_says_so(bench: Bench) -> None:
    bench.put()
    target = memoryview(bytearray(b"\xaa" * len(FRAME)))
    with pytest.raises(CorruptFrameError, match=f"{len(FRAME)} wanted"):
        bench.fails(StoreFault.SHORT_READ).get_into(NAME, target)
    same = next(place for place in range(len(FRAME)) if target[place] != FRAME[place])
    assert target[same:] == b"\xaa" * (len(FRAME) - same)
    assert bench.kept() == sample_payload(NAME)


def test_a_flipped_read_is_wrong_once(bench: Bench) -> None:
    bench.put()
    target = blank_frame()
    assert bench.fails(StoreFault.FLIPPED_READ).get_into(NAME, target)
    with pytest.raises(CorruptFrameError):
        opened(target, NAME)
    assert sum(a != b for a, b in zip(target, FRAME, strict=True)) == 1
    assert bench.store.get_into(NAME, target)
    assert opened(target, NAME) == sample_payload(NAME)


@pytest.mark.parametrize("fault", [StoreFault.SHORT_READ, StoreFault.FLIPPED_READ], ids=str)
def test_a_bad_read_of_nothing_is_a_miss(bench: Bench, fault: StoreFault) -> None:
    target = blank_frame()
    assert bench.fails(fault).get_into(NAME, target) is False
    assert target == blank_frame()


def test_lost_things_are_lost_without_a_word(bench: Bench) -> None:
    bench.fails(StoreFault.LOST).put(NAME, FRAME)
    assert bench.kept() is None
    bench.put(version=1)
    bench.fails(StoreFault.LOST).put(NAME, FRAME)
    bench.fails(StoreFault.LOST).remove([NAME])
    assert bench.kept() == sample_payload(NAME, version=1)
    target = blank_frame()
    assert bench.fails(StoreFault.LOST).get_into(NAME, target) is False
    assert target == blank_frame()
    assert bench.fails(StoreFault.LOST).contains(NAME) is False
    assert bench.store.contains(NAME)


def test_remove_asks_for_every_name_and_goes_on_after_an_error(bench: Bench) -> None:
    names = [sample_name(index) for index in range(4)]
    for name in names:
        bench.store.put(name, sample_frame(name))
    bench.script.asked.clear()
    with pytest.raises(StoreUnavailableError, match="chunk 1 of group 0"):
        bench.fails(None, StoreFault.IO_ERROR, StoreFault.LOST, StoreFault.SLOW).remove(iter(names))
    assert bench.script.asked == [(StoreOperation.REMOVE, name) for name in names]
    assert [bench.inner.contains(name) for name in names] == [False, True, True, False]
    assert bench.pauses == [2.0]


@pytest.mark.parametrize(
    ("fault", "pause_s"), [(StoreFault.SLOW, 2.0), (StoreFault.HANG, 900.0)], ids=["slow", "hang"]
)
def test_what_waits_is_done_afterwards(bench: Bench, fault: StoreFault, pause_s: float) -> None:
    bench.fails(fault).put(NAME, FRAME)
    assert bench.kept() == sample_payload(NAME)
    assert bench.fails(fault).contains(NAME)
    assert len(list(bench.fails(fault).scan())) == 1
    bench.fails(fault).remove([NAME])
    assert bench.kept() is None
    assert bench.pauses == [pause_s] * 4


def test_a_reader_that_hung_writes_its_target_when_it_comes_back(bench: Bench) -> None:
    bench.put()
    target = blank_frame()
    other = b"given to somebody else"

    def reuse() -> None:
        target[: len(other)] = other

    bench.meanwhile = reuse
    assert bench.fails(StoreFault.HANG).get_into(NAME, target)
    assert target == FRAME


def test_a_fault_that_makes_no_sense_is_named(bench: Bench) -> None:
    with pytest.raises(InvariantError, match=r"no_space cannot happen to a get; give one of .*flipped_read"):
        bench.fails(StoreFault.NO_SPACE).get_into(NAME, blank_frame())


def test_without_faults_nothing_is_asked_of_anybody() -> None:
    assert all(NoFaults().next_fault(operation, None) is None for operation in StoreOperation)


# ---- seeded faults -------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.lists(st.sampled_from(StoreOperation), max_size=50))
def test_a_seed_and_the_operations_decide_the_faults(seed: int, operations: list[StoreOperation]) -> None:
    rates = dict.fromkeys(StoreFault, 0.1)
    runs = []
    for _ in range(2):
        faults = SeededFaults(random.Random(seed), rates)
        runs.append([faults.next_fault(operation, NAME) for operation in operations])
        assert faults.counts == Counter(fault for fault in runs[-1] if fault is not None)
    assert runs[0] == runs[1]
    assert all(
        fault is None or fault in FAULTS_OF[operation]
        for fault, operation in zip(runs[0], operations, strict=True)
    )


def test_faults_come_as_often_as_asked() -> None:
    faults = SeededFaults(random.Random(1), {StoreFault.TORN_WRITE: 0.3, StoreFault.LOST: 0.1})
    seen = Counter(faults.next_fault(StoreOperation.PUT, NAME) for _ in range(10_000))
    assert 2800 < seen[StoreFault.TORN_WRITE] < 3200
    assert 850 < seen[StoreFault.LOST] < 1150
    assert {faults.next_fault(StoreOperation.GET, NAME) for _ in range(1000)} == {None, StoreFault.LOST}


def test_an_operation_without_faults_leaves_the_others_as_they_were() -> None:
    """One draw for each operation: a rate that is raised for reads leaves the faults of writes alone."""
    rates = {StoreFault.TORN_WRITE: 0.5}
    runs = []
    for more in ({}, {StoreFault.SHORT_READ: 0.9}):
        faults = SeededFaults(random.Random(7), {**rates, **more})
        runs.append(
            [
                fault
                for operation in [StoreOperation.PUT, StoreOperation.GET] * 50
                for fault in [faults.next_fault(operation, NAME)]
                if operation is StoreOperation.PUT
            ]
        )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rates", [{StoreFault.SLOW: -0.1}, {StoreFault.LOST: 0.6, StoreFault.NO_SPACE: 0.5}])
def test_rates_that_are_no_probabilities_are_refused(rates: dict[StoreFault, float]) -> None:
    with pytest.raises(ValueError, match="together <= 1"):
        SeededFaults(random.Random(0), rates)
