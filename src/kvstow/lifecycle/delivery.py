"""Reports reach the planner once and in order, whatever happens on the way.

A rank numbers its reports and keeps each until an order says that it was taken in. One that is
not acknowledged for some orders is sent again. The planner takes in only the next number of each
rank: what comes twice, late or too early changes nothing, and what was lost comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvstow.keys.ids import Rank
from kvstow.lifecycle.messages import LoadReport, PlaceInArena, Report, SaveReport, WriteReport

RESEND_ORDERS = 6
"""Orders without an acknowledgement after which a report is sent again. An engine may be two
steps ahead of its results, so that four orders pass before the fastest acknowledgement is here."""


class Outbox:
    """A rank's reports that are not acknowledged. For one thread.

    Args:
        rank: whose reports they are.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._unacknowledged: deque[Report] = deque()
        self._last = 0
        self._orders = 0
        self._sent_at = 0

    def ordered(self, acknowledged: Sequence[int]) -> None:
        """An order came: numbers of the last reports taken in, by rank; empty from nobody who counts."""
        self._orders += 1
        taken = acknowledged[self._rank] if self._rank < len(acknowledged) else 0
        while self._unacknowledged and self._unacknowledged[0].number <= taken:
            self._unacknowledged.popleft()
            # What follows may be on its way.
            self._sent_at = self._orders

    def post(
        self,
        loads: Sequence[LoadReport],
        saves: Sequence[SaveReport],
        writes: Sequence[WriteReport],
        freed: Sequence[PlaceInArena],
    ) -> tuple[Report, ...]:
        """What is to be sent now: these ends as one report, after all that is overdue."""
        overdue: tuple[Report, ...] = ()
        if self._unacknowledged and self._orders - self._sent_at >= RESEND_ORDERS:
            overdue = tuple(self._unacknowledged)
            self._sent_at = self._orders
        if not (loads or saves or writes or freed):
            return overdue
        self._last += 1
        report = Report(self._rank, self._last, tuple(loads), tuple(saves), tuple(writes), tuple(freed))
        if not self._unacknowledged:
            self._sent_at = self._orders
        self._unacknowledged.append(report)
        return (*overdue, report)


class Inbox:
    """The planner's side: what was taken in from each rank."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def open(self, ranks: int) -> None:
        """Nothing was heard from any of so many ranks."""
        self._taken = [0] * ranks

    def take(self, report: Report) -> bool:
        """Whether ``report`` is the next of its rank; only then it may be acted on."""
        if report.rank >= len(self._taken) or report.number != self._taken[report.rank] + 1:
            return False
        self._taken[report.rank] = report.number
        return True

    def acknowledgements(self) -> tuple[int, ...]:
        """The number of the last report taken in, by rank."""
        return tuple(self._taken)
