"""Blocking work in simulated time: a task that waits is parked, and nothing else is.

The worker's tasks are plain calls that block inside a store. Here each runs as a fiber
(greenlet) on the simulator's only thread: `Fibers.pause` parks the fiber that calls it until
simulated time has come, and hands back to whoever let it run. One thread, so a seed gives one
schedule; and a reader that hangs for an hour costs nothing.
"""

from __future__ import annotations

from collections import deque

import greenlet

from kvstow.clock import ManualClock
from kvstow.lifecycle.executors import Task

FOREVER_S = 1e9
"""Longer than any bound: a call that paused so long never comes back by itself."""


class SimulatedKillError(BaseException):
    """Raised inside a parked fiber when its process is killed; nobody may handle it."""


class Fiber:
    """One task that has begun. `wake_s` is when it may go on, once it is parked."""

    def __init__(self, task: Task) -> None:
        self.wake_s = 0.0
        self._greenlet = greenlet.greenlet(task)

    @property
    def is_done(self) -> bool:
        """Whether the task has returned."""
        return bool(self._greenlet.dead)

    def resume(self) -> None:
        """Run it until it pauses or returns."""
        self._greenlet.parent = greenlet.getcurrent()
        self._greenlet.switch()

    def kill(self) -> None:
        """End it where it is."""
        self._greenlet.parent = greenlet.getcurrent()
        try:
            self._greenlet.throw(SimulatedKillError())
        except SimulatedKillError:
            return


class Fibers:
    """The fibers of one process. Not thread safe.

    Args:
        clock: simulated time.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._current: Fiber | None = None

    def run(self, fiber: Fiber) -> bool:
        """Let ``fiber`` run; whether it is done."""
        outer, self._current = self._current, fiber
        try:
            fiber.resume()
        finally:
            self._current = outer
        return fiber.is_done

    def pause(self, for_s: float) -> None:
        """Park the calling fiber; outside of one, let the time pass."""
        fiber = self._current
        if fiber is None:
            self._clock.advance(for_s)
            return
        fiber.wake_s = self._clock.monotonic_s() + for_s
        greenlet.getcurrent().parent.switch()


class FiberExecutor:
    """An executor whose tasks run when the simulator says, at most ``threads`` at once.

    Args:
        name: what it is for; in traces.
        fibers: where tasks run.
        clock: simulated time.
        threads: how many tasks may be under way.
        queue_max: how many may wait; one more is refused.
    """

    def __init__(
        self, name: str, fibers: Fibers, clock: ManualClock, *, threads: int, queue_max: int
    ) -> None:
        self.name = name
        self._fibers = fibers
        self._clock = clock
        self._threads = threads
        self._queue_max = queue_max
        self._queue: deque[Task] = deque()
        self._parked: list[Fiber] = []
        self._closed = False

    def submit(self, task: Task) -> bool:
        if self._closed or len(self._queue) >= self._queue_max:
            return False
        self._queue.append(task)
        return True

    def close(self, wait_s: float) -> int:
        """Run what is queued, in simulated time, for up to ``wait_s``; what was left."""
        self._closed = True
        give_up_s = self._clock.monotonic_s() + wait_s
        while wait_s > 0 and (self._queue or self._parked):
            if self.can_run:
                self.run_one()
                continue
            wake_s = min(fiber.wake_s for fiber in self._parked)
            if wake_s > give_up_s:
                break
            self._clock.advance(wake_s - self._clock.monotonic_s())
        left = len(self._queue)
        self._queue.clear()
        return left

    @property
    def can_run(self) -> bool:
        """Whether `run_one` would do something now."""
        return self._due() is not None or bool(self._queue and len(self._parked) < self._threads)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._queue and not self._parked

    @property
    def wake_s(self) -> float:
        """When the first parked task may go on; infinity if none is parked."""
        return min((fiber.wake_s for fiber in self._parked), default=float("inf"))

    def run_one(self) -> None:
        """Let one task go on or begin, until it pauses or ends."""
        fiber = self._due()
        if fiber is None:
            fiber = Fiber(self._queue.popleft())
            self._parked.append(fiber)
        if self._fibers.run(fiber):
            self._parked.remove(fiber)

    def kill(self) -> None:
        """The process is gone: nothing queued begins, nothing under way goes on."""
        self._closed = True
        self._queue.clear()
        for fiber in self._parked:
            fiber.kill()
        self._parked.clear()

    def _due(self) -> Fiber | None:
        now_s = self._clock.monotonic_s()
        due = [fiber for fiber in self._parked if fiber.wake_s <= now_s]
        return min(due, key=lambda fiber: fiber.wake_s) if due else None
