"""Ranks from which nothing comes any more.

A rank that lives ends its loads by itself, in bounded time, and says so at the engine's next
step. So the planner waits as long as anything comes from a rank, and longer than any step and any
report may take; then it takes the rank for dead.
"""

from __future__ import annotations

from kvstow.clock import Clock
from kvstow.keys.ids import Rank

SILENT_STEPS = 16
"""Steps without a word, whatever time they take. A load that its worker gives up needs three to be
noticed, ended and reported, an engine that is ahead of its results two more, and a report that was
lost is sent again after six."""


class RankWatch:
    """When each rank was last heard. Not thread safe.

    Args:
        clock: monotonic time.
        bound_s: how long a rank may be silent.
    """

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._bound_s = bound_s
        self._heard: dict[Rank, tuple[float, int]] = {}
        self._steps = 0

    def step(self) -> None:
        """One more order goes to every rank."""
        self._steps += 1

    def heard(self, rank: Rank) -> None:
        """A report of ``rank`` was taken in."""
        self._heard[rank] = self.now()

    def now(self) -> tuple[float, int]:
        """This moment: seconds and steps."""
        return self._clock.monotonic_s(), self._steps

    def is_silent(self, rank: Rank, since: tuple[float, int]) -> bool:
        """Whether nothing came from ``rank`` for too long, counted from ``since`` at the earliest."""
        heard_s, heard_step = max(since, self._heard.get(rank, since))
        now_s, step = self.now()
        return now_s - heard_s > self._bound_s and step - heard_step >= SILENT_STEPS
