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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long form of the model matrix, unless ``-m`` names it."""
    if "models" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("models")]
        if long:
            config.hook.pytest_deselected(items=long)
            items[:] = [item for item in items if item not in long]
