"""The two judges of a copy of the tree: the simulator, and the tests below the engines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "docs", "pyproject.toml")
TEST_FOLDERS = ("layout", "keys", "codec", "lifecycle", "sim", "config", "adapters", "stores")
"""The quick ones first: a judge stops at the first failure."""
LEFT_OUT = ("tests/sim/test_seeds.py",)
"""The other judge runs seeds."""

SEEDS_A_BATCH = 100
BATCH_S_MAX = 600.0
TESTS_S_MAX = 1200.0

_NOTHING_COLLECTED = 5
"""pytest's word for a folder that has no test with the marks asked for."""

# A mutant that says one of these is a mistake in the catalogue: nothing was tested.
_MISTAKES = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "UnboundLocalError")
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+(?: .*?\])?)(?: - (.*))?$", re.MULTILINE)


class JudgeError(Exception):
    """A judge could not judge: nothing is said about the mutant."""


@dataclass(frozen=True)
class Verdict:
    """What one judge found.

    Attributes:
        caught: whether it saw the fault.
        words: what gave it away, or what was asked in vain.
    """

    caught: bool
    words: str


def copy_tree(source: Path, target: Path) -> None:
    """A copy of what the judges need, without what Python has left there."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".hypothesis")
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy2(source / name, target / name)


def plant(mutant: Mutant, tree: Path) -> None:
    """Change a copy of the tree.

    Raises:
        JudgeError: the mutant does not fit the tree.
    """
    try:
        for path, text in mutant.mutated(tree / "src" / "kvstow").items():
            path.write_text(text, encoding="utf-8")
    except ValueError as error:
        raise JudgeError(str(error)) from error


def ask_simulator(tree: Path, seeds: range, modules: tuple[str, ...] = ()) -> Verdict:
    """Run seeds on the copy until one fails.

    Args:
        tree: the copy.
        seeds: consecutive, from 0 on or from where an earlier call ended.
        modules: imported first, whether the simulator needs them or not.

    Raises:
        JudgeError: the copy cannot be imported, or the simulator itself failed.
    """
    script = str(Path(__file__).with_name("simulate.py"))
    ran = seeds.start
    while ran < seeds.stop:
        count = min(SEEDS_A_BATCH, seeds.stop - ran)
        command = [script, str(tree / "src" / "kvstow"), str(ran), str(count), *modules]
        done = _run(command, tree, BATCH_S_MAX)
        if done.returncode or not done.stdout.strip():
            raise JudgeError(f"the simulator itself failed:\n{done.stderr[-2000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        ran += answer["ran"]
        if "invariant" in answer:
            if any(mistake in answer["message"] for mistake in _MISTAKES):
                raise JudgeError(f"the mutant's code is wrong: {answer['message']}")
            return Verdict(True, f"`{answer['invariant']}` after {_many(ran, 'seed')}")
    return Verdict(False, f"{_many(ran, 'seed')} hold")


def ask_tests(tree: Path, first: tuple[str, ...] = (), marks: str = "") -> Verdict:
    """Run the tests on the copy until one fails.

    Args:
        tree: the copy.
        first: folders under ``tests`` that are asked before the others.
        marks: which tests, as pytest's ``-m`` takes it; "" for all.

    Raises:
        JudgeError: pytest did not get to run tests.
    """
    for folders in (first, tuple(folder for folder in TEST_FOLDERS if folder not in first)):
        verdict = _ask_folders(tree, folders, marks) if folders else Verdict(False, "pass")
        if verdict.caught:
            return verdict
    return Verdict(False, "pass")


def _ask_folders(tree: Path, folders: tuple[str, ...], marks: str) -> Verdict:
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{folder}" for folder in folders] + [f"--ignore={path}" for path in LEFT_OUT]
    done = _run([*command, "-m", marks] if marks else command, tree, TESTS_S_MAX)
    if done.returncode in (0, _NOTHING_COLLECTED):
        return Verdict(False, "pass")
    failure = _FIRST_FAILURE.search(done.stdout)
    if done.returncode != 1 or failure is None:
        raise JudgeError(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    name, message = failure.groups()
    if any(mistake in (message or "") for mistake in _MISTAKES):
        raise JudgeError(f"the mutant's code is wrong: {name}: {message}")
    return Verdict(True, f"`{name.removeprefix('tests/')}`")


def _run(words: list[str], tree: Path, bound_s: float) -> subprocess.CompletedProcess[str]:
    """Python on the copy: its package comes before the one that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=bound_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise JudgeError(f"not done after {bound_s:.0f} s: {' '.join(words[:4])}") from error


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
