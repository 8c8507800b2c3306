"""Deadlines of loads: they bound work, not queues.

A load's bound runs from when it was dispatched, and starts anew when its copy begins and
whenever a load that was dispatched *before* it ends. So a load behind sixty others is not
late while those move, and fails within one bound once nothing ahead of it moves.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstow.clock import Clock
from kvstow.lifecycle.messages import JobId


class _Entry:
    __slots__ = ("running", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.running = False


class LoadLedger:
    """The loads in flight, in dispatch order. Not thread safe.

    Args:
        clock: monotonic time.
        bound_s: how long a load may run, and how long a queued one may see nothing ahead end.
    """

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._bound_s = bound_s
        self._loads: OrderedDict[JobId, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, job: JobId) -> bool:
        return job in self._loads

    def dispatch(self, job: JobId) -> None:
        """Enter ``job`` behind all others."""
        self._loads[job] = _Entry(self._clock.monotonic_s())

    def started(self, job: JobId) -> None:
        """The copy of ``job`` was handed to the device: its bound starts here."""
        entry = self._loads.get(job)
        if entry is not None and not entry.running:
            entry.running = True
            entry.since_s = self._clock.monotonic_s()

    def ended(self, job: JobId) -> None:
        """``job`` is over; the loads queued behind it start their bound anew."""
        if job not in self._loads:
            return
        now_s = self._clock.monotonic_s()
        behind = False
        for other, entry in self._loads.items():
            if behind and not entry.running:
                entry.since_s = now_s
            behind = behind or other == job
        del self._loads[job]

    def expired(self) -> list[JobId]:
        """Loads that are past their bound, in dispatch order; they stay until `ended`."""
        now_s = self._clock.monotonic_s()
        return [job for job, entry in self._loads.items() if now_s - entry.since_s > self._bound_s]
