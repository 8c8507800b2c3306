"""Doors in front of kvstow's threads, so that a test decides when a copy runs; nothing sleeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstow.adapters.vllm import scheduler, worker
from kvstow.clock import SystemClock
from kvstow.lifecycle.executors import Task, ThreadExecutor

WAIT_S_MAX = 60.0
"""A thread that waits for a door gives up after so long: a broken test must not hang for ever."""


class Gate:
    """Holds back the tasks of one executor while shut, and counts those that have not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut = False
        self._left = 0

    def shut(self) -> None:
        """No task begins from here on; one that runs goes on."""
        with self._changed:
            self._shut = True

    def open(self) -> None:
        """Let them run."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Return once every task that was submitted has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._left, WAIT_S_MAX), f"{self._left} tasks left"

    def entered(self) -> None:
        with self._changed:
            self._left += 1

    def left(self) -> None:
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._shut, WAIT_S_MAX), "nobody opened the gate"


class JumpingClock(SystemClock):
    """The system's clock, and a hand that moves it forward: bounds end when the test says."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self._ahead_s

    def jump(self, by_s: float) -> None:
        """Move forward by ``by_s`` seconds."""
        self._ahead_s += by_s


class Gates:
    """One gate for each kind of work: save, load, read, write; and the clock that kvstow reads."""

    def __init__(self) -> None:
        self.clock = JumpingClock()
        self.save, self.load, self.read, self.write = Gate(), Gate(), Gate(), Gate()

    @contextmanager
    def shut(self, *kinds: str) -> Iterator[None]:
        """Shut the gates of ``kinds``; open them again whatever happens."""
        gates = [getattr(self, kind) for kind in kinds]
        for gate in gates:
            gate.shut()
        try:
            yield
        finally:
            for gate in gates:
                gate.open()

    def wait_idle(self) -> None:
        """Return once no task is left anywhere; saves queue writes, so they come first."""
        for gate in (self.save, self.load, self.read, self.write):
            gate.wait_idle()


@contextmanager
def gated() -> Iterator[Gates]:
    """Engines that start inside have a gate before each executor, and a clock that can jump."""
    gates = Gates()

    class GatedExecutor(ThreadExecutor):
        def __init__(self, name: str, threads: int, queue_max: int) -> None:
            self._gate: Gate = getattr(gates, name.rsplit("-", 1)[-1])
            super().__init__(name, threads, queue_max)

        def submit(self, task: Task) -> bool:
            gate = self._gate

            def run() -> None:
                try:
                    gate.pass_through()
                    task()
                finally:
                    gate.left()

            gate.entered()
            if not super().submit(run):
                gate.left()
                return False
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "ThreadExecutor", GatedExecutor)
        for half in (worker, scheduler):
            patch.setattr(half, "SystemClock", lambda: gates.clock)
        yield gates


@contextmanager
def kvstow_log(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """What kvstow logs meanwhile; the engine has its own handlers, which pytest does not see."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keep = Keep(level)
    log = logging.getLogger("kvstow")
    log.addHandler(keep)
    try:
        yield records
    finally:
        log.removeHandler(keep)
