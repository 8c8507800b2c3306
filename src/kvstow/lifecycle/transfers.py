"""One load or save on one rank, shared between the threads that work on it and its deadline.

Whoever gives a job up waits for the block copies that run and stops those to come, so a job that
was reported failed never touches a block again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.messages import (
    NO_SLOT,
    FailedItem,
    Fault,
    LoadJob,
    LoadReport,
    SaveJob,
    SaveReport,
    Slot,
    Tier,
)


class LoadTransfer:
    """A load in flight on this rank. Any thread."""

    def __init__(self, job: LoadJob) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._copied = threading.Condition(self._lock)
        self._copying = 0
        self._left = len(job.items)
        self._started = False
        self._over = False
        self._faults: dict[int, Fault] = {}
        self._reading: set[int] = set()

    def begin(self, item: int) -> bool:
        """Enter ``item``; False if the job is over or failed, so that it need not be done."""
        with self._lock:
            if self._over or self._faults:
                return False
            self._started = True
            self._reading.add(item)
            return True

    @property
    def has_started(self) -> bool:
        """Whether any item was begun."""
        return self._started

    @property
    def is_over(self) -> bool:
        """Whether it ended, or was given up."""
        return self._over

    def write_blocks(self, copy: Callable[[], None]) -> None:
        """Run ``copy`` unless the job is over: nothing may write its blocks after that.

        Copies of one job into different blocks may run at once.
        """
        with self._lock:
            if self._over:
                return
            self._copying += 1
        try:
            copy()
        finally:
            with self._lock:
                self._copying -= 1
                self._copied.notify_all()

    def end(self, item: int, fault: Fault | None) -> tuple[LoadReport | None, bool]:
        """Leave ``item``.

        Returns:
            The job's report, if this was its last item; and whether the job was over before,
            so that a slot this item kept busy is free only now.
        """
        with self._lock:
            self._reading.discard(item)
            if self._over:
                return None, True
            if fault is not None:
                self._faults[item] = fault
            self._left -= 1
            if self._left:
                return None, False
            self._over = True
            return self._report(()), False

    def give_up(self, fault: Fault) -> LoadReport | None:
        """End the job now; None if it is over already.

        Waits for the copies that run, at most one chunk's on each thread.
        """
        with self._lock:
            if self._over:
                return None
            self._over = True
            while self._copying:
                self._copied.wait()
            items = self.job.items
            for item in range(len(items)):
                self._faults.setdefault(item, fault)
            busy = tuple(
                (items[item].ref.group, items[item].slot)
                for item in sorted(self._reading)
                if items[item].source is Tier.DISK and items[item].slot != NO_SLOT
            )
            return self._report(busy)

    def _report(self, busy: tuple[tuple[GroupId, Slot], ...]) -> LoadReport:
        failed = tuple(FailedItem(item, fault) for item, fault in sorted(self._faults.items()))
        return LoadReport(self.job.job, failed, busy=busy)


class SaveTransfer:
    """A save in flight on this rank. Any thread."""

    def __init__(self, job: SaveJob, submitted_s: float) -> None:
        self.job = job
        self.submitted_s = submitted_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._begun = False
        self._over = False
        # An item that nobody finished, whatever happened to its thread, holds nothing.
        self._faults: dict[int, Fault] = dict.fromkeys(range(len(job.items)), Fault.UNAVAILABLE)

    def begin(self) -> bool:
        """Its turn has come; False if it was given up while it waited."""
        with self._lock:
            self._begun = not self._over
            return self._begun

    def give_up_waiting(self) -> bool:
        """End it if its turn has not come: then it will not begin; whoever does this reports it."""
        with self._lock:
            if self._begun or self._over:
                return False
            self._over = True
            self._faults = dict.fromkeys(self._faults, Fault.CANCELLED)
            return True

    def read_blocks(self, item: int, copy: Callable[[], None]) -> bool:
        """Run ``copy`` unless the job was cancelled; False if it was."""
        with self._lock:
            if self._cancelled:
                self._faults[item] = Fault.CANCELLED
                return False
            copy()
            return True

    def finish(self, item: int) -> None:
        """Note that ``item`` is in its slot, sealed."""
        del self._faults[item]

    def fail(self, item: int, fault: Fault) -> None:
        """Note that ``item`` holds nothing, and why."""
        self._faults[item] = fault

    def cancel(self) -> None:
        """No copy begins after this returns, and none is running: the blocks may be reused.

        Waits for at most one chunk's copy.
        """
        with self._lock:
            self._cancelled = True

    def report(self) -> SaveReport:
        """What became of it."""
        return SaveReport(
            self.job.job, tuple(FailedItem(item, fault) for item, fault in sorted(self._faults.items()))
        )
