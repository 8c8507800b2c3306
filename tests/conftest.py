"""For all tests: the same examples every time, and file systems of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import settings

# A busy machine takes as long as it needs.
settings.register_profile("kvstow", deadline=None, derandomize=True)
settings.load_profile("kvstow")

Mount = Callable[..., None]


@pytest.fixture
def mount() -> Mount:
    """Runs ``mount`` with the arguments given; whoever mounts unmounts."""

    def run(*arguments: str) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root to mount")
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr}")

    return run
