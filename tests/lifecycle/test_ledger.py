from __future__ import annotations

import pytest

from kvstow.clock import ManualClock
from kvstow.lifecycle.ledger import LoadLedger
from kvstow.lifecycle.messages import JobId

A, B, C = JobId(1), JobId(2), JobId(3)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(clock: ManualClock) -> LoadLedger:
    return LoadLedger(clock, bound_s=10.0)


def test_a_load_that_sees_nothing_move_expires(ledger: LoadLedger, clock: ManualClock) -> None:
    ledger.dispatch(A)
    clock.advance(10.0)
    assert ledger.expired() == []
    clock.advance(0.1)
    assert ledger.expired() == [A]


def test_the_bound_runs_anew_from_when_the_copy_begins(ledger: LoadLedger, clock: ManualClock) -> None:
    ledger.dispatch(A)
    clock.advance(9.0)
    ledger.started(A)
    clock.advance(9.0)
    assert ledger.expired() == []
    ledger.started(A)  # said again: it began once
    clock.advance(1.1)
    assert ledger.expired() == [A]


def test_what_ends_ahead_restarts_those_queued_behind_only(ledger: LoadLedger, clock: ManualClock) -> None:
    ledger.dispatch(A)
    ledger.dispatch(B)
    ledger.dispatch(C)
    clock.advance(9.0)
    ledger.ended(B)
    clock.advance(9.0)
    assert ledger.expired() == [A]  # B was behind it and says nothing about it
    clock.advance(1.1)
    assert ledger.expired() == [A, C]


def test_a_running_load_gains_nothing_from_others(ledger: LoadLedger, clock: ManualClock) -> None:
    ledger.dispatch(A)
    ledger.dispatch(B)
    ledger.started(B)
    clock.advance(9.0)
    ledger.ended(A)
    clock.advance(1.1)
    assert ledger.expired() == [B]


def test_sixty_four_loads_of_thirty_seconds_on_two_slots_are_never_late(clock: ManualClock) -> None:
    ledger = LoadLedger(clock, bound_s=31.0)
    jobs = [JobId(index) for index in range(64)]
    for job in jobs:
        ledger.dispatch(job)
    for first in range(0, 64, 2):
        for job in jobs[first : first + 2]:
            ledger.started(job)
        clock.advance(30.0)
        assert ledger.expired() == []
        for job in jobs[first : first + 2]:
            ledger.ended(job)
    assert len(ledger) == 0


def test_ending_what_is_not_there_changes_nothing(ledger: LoadLedger) -> None:
    ledger.dispatch(A)
    ledger.ended(B)
    ledger.started(B)
    assert A in ledger
    assert len(ledger) == 1
