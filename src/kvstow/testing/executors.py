"""Executors that run nothing by themselves: a test or a simulator decides when a task runs."""

from __future__ import annotations

from collections import deque

from kvstow.lifecycle.executors import Task


class SteppedExecutor:
    """Keeps tasks until it is told to run them, on the caller's thread.

    Args:
        queue_max: how many may wait; one more is refused.
    """

    def __init__(self, queue_max: int = 1 << 20) -> None:
        self._tasks: deque[Task] = deque()
        self._queue_max = queue_max
        self._closed = False

    def submit(self, task: Task) -> bool:
        if self._closed or len(self._tasks) >= self._queue_max:
            return False
        self._tasks.append(task)
        return True

    def close(self, wait_s: float) -> int:
        self._closed = True
        if wait_s > 0:
            self.run_all()
        left = len(self._tasks)
        self._tasks.clear()
        return left

    def run_one(self) -> bool:
        """Run the task that has waited longest; False if there is none."""
        if not self._tasks:
            return False
        self._tasks.popleft()()
        return True

    def run_all(self) -> int:
        """Run tasks, new ones included, until none is left; how many ran."""
        ran = 0
        while self.run_one():
            ran += 1
        return ran

    def __len__(self) -> int:
        return len(self._tasks)
