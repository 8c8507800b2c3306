"""A vLLM server as a child process: started by ``kvstow serve``, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvstow.cli.demo.errors import DemoError
from kvstow.clock import Clock

_COMMAND = (sys.executable, "-m", "kvstow.cli", "serve")
_POLL_S = 0.2
_TAIL_LINES = 40


@dataclass(frozen=True)
class ServerPlan:
    """How to start a server.

    Attributes:
        model: folder of the model.
        served_name: the model's name in the API.
        disk: folder of the disk tier.
        log: file for the server's output; appended to.
        options: further options of ``kvstow serve`` and of vLLM.
        environ: the child's environment, whole.
        start_s_max, stop_s_max: bounds on starting and on a graceful stop.
    """

    model: Path
    served_name: str
    disk: Path
    log: Path
    options: tuple[str, ...]
    environ: Mapping[str, str]
    start_s_max: float = 180.0
    stop_s_max: float = 30.0


class Server:
    """One run of a server. Used by one thread; whoever calls `start` calls `stop` or `kill` later."""

    def __init__(self, plan: ServerPlan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base address, without a path."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and block until it answers. On an error nothing is left running.

        Raises:
            DemoError: it ended, or did not answer in time; holds the tail of its log.
        """
        plan = self._plan
        command = [*_COMMAND, str(plan.model)]
        command += ["--disk", str(plan.disk), *plan.options]
        command += ["--served-model-name", plan.served_name, "--host", "127.0.0.1", "--port", str(self._port)]
        with plan.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends the whole group.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=dict(plan.environ), start_new_session=True
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Ask it to stop, as an operator does, and block until it has.

        Raises:
            DemoError: it did not stop in time, and was killed.
        """
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._plan.stop_s_max)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"the server did not stop within {self._plan.stop_s_max:g} s of SIGTERM\n{self._tail()}"
            ) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """End whatever of it still runs, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up_s = self._clock.monotonic_s() + self._plan.start_s_max
        while self._clock.monotonic_s() < give_up_s:
            try:
                status = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self._answers():
                    return
            else:
                raise DemoError(f"the server ended with status {status} while starting\n{self._tail()}")
        raise DemoError(f"the server did not start within {self._plan.start_s_max:g} s\n{self._tail()}")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).is_success
        except httpx.TransportError:
            return False

    def _tail(self) -> str:
        lines = self._plan.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- last lines of {self._plan.log} ---", *lines])


def free_port() -> int:
    """A TCP port that nobody on this host listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
