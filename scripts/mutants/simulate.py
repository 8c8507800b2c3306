"""Judge of a mutant, in a process of its own: ``simulate.py PACKAGE FIRST COUNT MODULE...``.

Runs seeds until one breaks an invariant. The last line it prints is JSON: how many seeds were run
and, if one failed, which and what. Anything else that goes wrong is a traceback and no such line.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import kvstow


def main(package: str, first: str, count: str, *modules: str) -> None:
    """Run the seeds; see the module."""
    found = Path(kvstow.__file__ or "").parent
    if found != Path(package):
        raise SystemExit(f"kvstow is imported from {found}, not from the copy in {package}")
    for module in modules:
        importlib.import_module(module)
    explore = importlib.import_module("kvstow.testing.sim.explore")
    explore.quieten()
    ran = 0
    for outcome in explore.run_seeds(range(int(first), int(first) + int(count)), 1):
        ran += 1
        if outcome.failure is not None:
            failed = {"seed": outcome.scenario.seed, "message": outcome.failure.message}
            print(json.dumps({"ran": ran, "invariant": outcome.failure.invariant, **failed}))
            return
    print(json.dumps({"ran": ran}))


if __name__ == "__main__":
    main(*sys.argv[1:])
