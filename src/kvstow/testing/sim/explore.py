"""Run schedules: one, many on several cores, and a failing one again and again until it is small."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvstow.testing.sim.invariants import ViolationError
from kvstow.testing.sim.outcome import Failure, Outcome
from kvstow.testing.sim.scenario import Scenario, draw_scenario
from kvstow.testing.sim.world import World

_IN_MEMORY = Path("/dev/shm")
SHRINK_RUNS_MAX = 400


def run_scenario(scenario: Scenario) -> Outcome:
    """Run one schedule to its end, or to the first invariant that does not hold. Blocks."""
    folder_of_folders = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvstow-sim-", dir=folder_of_folders) as folder:
        world = World(scenario, Path(folder))
        failure = None
        try:
            world.run()
        except ViolationError as violation:
            failure = Failure(violation.invariant, str(violation), tuple(world.trace))
    return Outcome(
        scenario=scenario,
        failure=failure,
        digest=world.digest,
        simulated_s=world.clock.monotonic_s(),
        faults={str(fault): count for fault, count in world.faults.items()},
        transitions={f"{was} > {now}": count for (was, now), count in world.transitions.items()},
        counts=dict(world.counts),
    )


def run_seed(seed: int) -> Outcome:
    """Run the schedule of ``seed``."""
    return run_scenario(draw_scenario(seed))


def run_seeds(seeds: Iterable[int], processes: int) -> Iterator[Outcome]:
    """Run many, as many at once as there are ``processes``; outcomes in any order."""
    if processes <= 1:
        yield from map(run_seed, seeds)
        return
    # Not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_begin_process) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=8)


def _begin_process() -> None:
    quieten()
    # The parent ends them when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def quieten() -> None:
    """Leave out what kvstow logs: thousands of faults are meant to happen."""
    logging.getLogger("kvstow").setLevel(logging.CRITICAL + 1)


def shrink(outcome: Outcome) -> Outcome:
    """The smallest scenario found that breaks the same invariant; ``outcome`` if there is none."""
    best = outcome
    runs = 0
    progress = True
    while progress and runs < SHRINK_RUNS_MAX:
        progress = False
        for candidate in _smaller(best.scenario):
            runs += 1
            tried = run_scenario(candidate)
            if _same_failure(tried, outcome):
                best, progress = tried, True
                break
            if runs >= SHRINK_RUNS_MAX:
                break
    return best


def _same_failure(tried: Outcome, outcome: Outcome) -> bool:
    return (
        tried.failure is not None
        and outcome.failure is not None
        and tried.failure.invariant == outcome.failure.invariant
    )


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, the boldest first."""
    replace = msgspec.structs.replace
    for events in (scenario.events // 2, scenario.events * 3 // 4, scenario.events - 1):
        if 0 < events < scenario.events:
            skip = tuple(index for index in scenario.skip if index < events)
            yield replace(scenario, events=events, skip=skip)
    for ranks in range(1, scenario.ranks):
        yield replace(scenario, ranks=ranks)
    for fault in scenario.faults:
        yield replace(
            scenario, faults={name: rate for name, rate in scenario.faults.items() if name != fault}
        )
    for store_fault in scenario.store_faults:
        rates = {name: rate for name, rate in scenario.store_faults.items() if name != store_fault}
        yield replace(scenario, store_faults=rates)
    if scenario.restarts:
        yield replace(scenario, restarts=False)
    if scenario.rules.steps_ahead:
        yield replace(scenario, rules=replace(scenario.rules, steps_ahead=0))
    yield from _with_fewer_events(scenario)


def _with_fewer_events(scenario: Scenario) -> Iterator[Scenario]:
    left = [index for index in range(scenario.events) if index not in scenario.skip]
    size = len(left) // 2
    while size:
        for start in range(0, len(left), size):
            skip = tuple(sorted({*scenario.skip, *left[start : start + size]}))
            yield msgspec.structs.replace(scenario, skip=skip)
        size //= 2
