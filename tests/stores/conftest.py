"""Child processes and small file systems for the tests of stores."""

from __future__ import annotations

import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Say = Callable[[bytes], None]
Work = Callable[[Say], None]


class Child:
    """A forked process that runs ``work(say)``; what it says can be heard here."""

    def __init__(self, work: Work) -> None:
        self._ear, mouth = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._ear)
                work(lambda word: (os.write(mouth, word), None)[1])
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(mouth)
        self._gone = False

    def hear(self, size: int) -> bytes:
        """So many bytes, or fewer if it ended."""
        heard = b""
        while len(heard) < size and (more := os.read(self._ear, size - len(heard))):
            heard += more
        return heard

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone. Idempotent."""
        if self._gone:
            return
        self._gone = True
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._ear)


Fork = Callable[[Work], Child]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Starts children; those that still run at the end are killed."""
    children: list[Child] = []

    def start(work: Work) -> Child:
        children.append(Child(work))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def small_disk(tmp_path: Path, mount: Callable[..., None]) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "none", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def read_only_disk(tmp_path: Path, mount: Callable[..., None]) -> Iterator[Path]:
    """A file system that cannot be written."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "ro,size=1m", "none", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
