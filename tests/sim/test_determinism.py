"""A seed is one schedule: whatever order a process happens to iterate its sets in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SEEDS = 15

DIGESTS = """
import json, sys
from kvstow.testing.sim.explore import quieten, run_seed
quieten()
print(json.dumps([run_seed(seed).digest for seed in range(int(sys.argv[1]))]))
"""


def start(hash_seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", DIGESTS, str(SEEDS)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_schedules_do_not_depend_on_how_python_hashes() -> None:
    processes = [start(hash_seed) for hash_seed in (1, 2)]
    first, other = (json.loads(process.communicate()[0]) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(first) == SEEDS
    assert first == other
