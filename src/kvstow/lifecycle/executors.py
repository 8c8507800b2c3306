"""Where the worker's blocking work runs: bounded queues in front of a few daemon threads."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class Executor(Protocol):
    """Runs tasks in the order they came, some at a time."""

    def submit(self, task: Task) -> bool:
        """Queue ``task``, or say False if the queue is full or closed. Never blocks."""
        ...

    def close(self, wait_s: float) -> int:
        """Take no more tasks, run what is queued for up to ``wait_s``; return what was left."""
        ...


class ThreadExecutor:
    """Daemon threads behind a bounded queue: a task that hangs never keeps the process alive.

    Args:
        name: prefix of the threads' names.
        threads: how many tasks run at once.
        queue_max: how many may wait.
    """

    def __init__(self, name: str, threads: int, queue_max: int) -> None:
        self._queue: queue.Queue[Task | None] = queue.Queue(maxsize=queue_max + threads)
        self._lock = threading.Lock()
        self._queue_max = queue_max
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> bool:
        with self._lock:
            if self._closed or self._queue.qsize() >= self._queue_max:
                return False
            self._queue.put_nowait(task)
            return True

    def close(self, wait_s: float) -> int:
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
            # The places past queue_max are for these.
            for _ in self._threads:
                self._queue.put_nowait(None)
        share_s = wait_s / len(self._threads)
        for thread in self._threads:
            thread.join(share_s)
        return sum(1 for task in list(self._queue.queue) if task is not None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:
                # Tasks report how they ended whatever happens in them; what ends up here is a bug.
                logger.exception("kvstow: a task raised; it was reported as failed; please report this")
