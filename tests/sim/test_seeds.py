"""Two thousand schedules, and what they have to have seen for their silence to mean something."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvstow.testing.faulty_store import StoreFault
from kvstow.testing.sim.explore import quieten, run_scenario, run_seeds, shrink
from kvstow.testing.sim.outcome import TRANSITIONS, Outcome, Tally
from kvstow.testing.sim.scenario import MODELS, Scenario, SimFault, draw_scenario

SEEDS = 2000
COMMITTED = sorted((Path(__file__).parent / "seeds").glob("*.json"))


@pytest.fixture(scope="module")
def tally() -> Tally:
    tally = Tally()
    for outcome in run_seeds(range(SEEDS), os.cpu_count() or 1):
        tally.add(outcome)
    return tally


def told(outcome: Outcome) -> str:
    """A failure as one line that replays it, after all that led to it."""
    assert outcome.failure is not None
    return "\n".join([*outcome.failure.trace, outcome.failure.message, outcome.replay_line])


@pytest.mark.slow
def test_every_invariant_holds_in_every_schedule(tally: Tally) -> None:
    assert tally.schedules == SEEDS
    if tally.failures:
        quieten()
        pytest.fail(f"{len(tally.failures)} of {SEEDS} seeds fail\n{told(shrink(tally.failures[0]))}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*SimFault, *StoreFault])
def test_every_fault_has_struck(tally: Tally, fault: SimFault | StoreFault) -> None:
    assert tally.faults[fault.value] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_every_change_of_phase_was_seen(tally: Tally, transition: str) -> None:
    assert tally.transitions[transition] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("loaded tokens", 10_000),
        ("worker disk_reads", 500),
        ("worker disk_writes", 0),
        ("planner loaded_tokens_disk", 1_000),
        ("planner evicted_arena", 500),
        ("planner evicted_disk", 100),
        ("planner late_reports", 100),
        ("planner load_timeouts", 10),
        ("worker corrupt_frames", 50),
        ("own hits", 1_000),
        ("held", 1_000),
        ("aborted while loading", 50),
        ("preempted while running", 50),
        ("preempted while loaded", 10),
        ("ignored promises", 50),
        ("pending", 50),
        ("looked up: hit", 500),
        ("kept all", 50),
        ("kept all: had to be hit", 500),
    ],
)
def test_enough_of_everything_happened(tally: Tally, what: str, least: int) -> None:
    assert tally.counts[what] >= least


def test_every_model_is_drawn() -> None:
    drawn = Counter(draw_scenario(seed).model.groups for seed in range(SEEDS))
    assert set(drawn) == set(MODELS.values())


def test_a_schedule_is_the_same_every_time() -> None:
    for seed in range(20):
        first, again = run_scenario(draw_scenario(seed)), run_scenario(draw_scenario(seed))
        assert first.digest == again.digest


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_schedules_that_failed_once_hold(path: Path) -> None:
    outcome = run_scenario(msgspec.json.decode(path.read_bytes(), type=Scenario))
    assert outcome.failure is None, told(outcome)
