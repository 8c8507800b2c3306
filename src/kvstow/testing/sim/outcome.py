"""What came of one schedule, and of many together."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvstow.testing.sim.scenario import Scenario

TRANSITIONS = (
    "- > missed",
    "- > promised",
    "- > loading",
    "missed > promised",
    "missed > loading",
    "missed > new",
    "promised > loading",
    "promised > missed",
    "loading > loaded",
    "loading > failed",
    "loaded > new",
    "failed > missed",
    "failed > loading",
    "new > missed",
    "new > loading",
)
"""Changes of a request's phase that schedules must have seen, as they look after an event; "-" is
before its first lookup. What follows within one event (a promise and its load) is seen as one."""


class Failure(msgspec.Struct, frozen=True):
    """An invariant that did not hold, and how it came to that."""

    invariant: str
    message: str
    trace: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True):
    """One schedule.

    Attributes:
        scenario: what was run.
        failure: the first invariant that did not hold, or None.
        digest: names the schedule: the orders given and what happened, in their order.
        simulated_s: how long it took in its own time.
        faults: what struck, and how often.
        transitions: changes of a request's phase: "from > to".
        counts: what the engine, the planner and the workers counted.
    """

    scenario: Scenario
    failure: Failure | None
    digest: str
    simulated_s: float
    faults: dict[str, int]
    transitions: dict[str, int]
    counts: dict[str, int]

    @property
    def replay_line(self) -> str:
        """A command that runs exactly this schedule again."""
        return f"python -m kvstow.testing.sim replay '{msgspec.json.encode(self.scenario).decode()}'"


class Tally:
    """Outcomes added up."""

    def __init__(self) -> None:
        self.schedules = 0
        self.events = 0
        self.simulated_s = 0.0
        self.faults: Counter[str] = Counter()
        self.transitions: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """One more schedule."""
        self.schedules += 1
        self.events += outcome.scenario.events
        self.simulated_s += outcome.simulated_s
        self.faults.update(outcome.faults)
        self.transitions.update(outcome.transitions)
        self.counts.update(outcome.counts)
        if outcome.failure is not None:
            self.failures.append(outcome)
