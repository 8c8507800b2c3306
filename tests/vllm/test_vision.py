"""The tests in `vision/`, in a process that has torchvision in its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TORCHVISION = Path(sys.prefix) / "vision"
"""Where ``make setup`` puts it."""


def test_models_that_need_torchvision() -> None:
    assert TORCHVISION.is_dir(), f"{TORCHVISION} is missing; run: make setup"
    folder = Path(__file__).parent / "vision"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    # vLLM looks at a model's class in a further process, so the path is in the environment.
    path = os.pathsep.join(filter(None, [str(TORCHVISION), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
