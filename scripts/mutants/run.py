"""Plant every fault of the catalogue, one at a time, and see that the suite fails: ``run.py``.

Each is planted in a copy of the tree and shown to two judges: seeds of the simulator, and the tests
below the engines. One of them must see it. Most seeds, and the slow tests, are asked only where
nobody else has seen anything. The tree without a fault is judged first, and must pass.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from catalogue import MUTANTS
from judges import ROOT, JudgeError, Verdict, ask_simulator, ask_tests, copy_tree, plant
from mutant import Mutant

TABLE_BEGIN = "<!-- mutants:begin -->"
TABLE_END = "<!-- mutants:end -->"
SEEDS_FIRST = 100
NOT_ASKED = Verdict(False, "not asked")


@dataclass(frozen=True)
class Finding:
    """What became of one mutant.

    Attributes:
        simulator, tests: what the judges found.
        error: why nothing is known, or "".
    """

    mutant: Mutant
    simulator: Verdict = NOT_ASKED
    tests: Verdict = NOT_ASKED
    error: str = ""

    @property
    def caught(self) -> bool:
        """Whether one of the judges saw it."""
        return self.simulator.caught or self.tests.caught


def judge(mutant: Mutant, pristine: Path, seeds: int, *, briefly: bool) -> Finding:
    """Plant ``mutant`` in a copy of ``pristine`` and ask the judges, the second only if it is needed
    where ``briefly`` is said."""
    with tempfile.TemporaryDirectory(prefix="kvstow-mutant-") as folder:
        tree = Path(folder)
        simulator = tests = NOT_ASKED
        try:
            copy_tree(pristine, tree)
            plant(mutant, tree)
            simulator = ask_simulator(tree, range(min(seeds, SEEDS_FIRST)), mutant.modules)
            if not (briefly and simulator.caught):
                tests = ask_tests(tree, mutant.parts, "not slow")
            if not (simulator.caught or tests.caught):
                simulator = ask_simulator(tree, range(min(seeds, SEEDS_FIRST), seeds), mutant.modules)
            if not (simulator.caught or tests.caught):
                tests = ask_tests(tree, mutant.parts, "slow")
        except JudgeError as error:
            return Finding(mutant, simulator, tests, str(error))
    return Finding(mutant, simulator, tests)


def judge_pristine(tree: Path, seeds: int, workers: int) -> None:
    """Without a fault nobody may see one; SystemExit if somebody does."""
    with ThreadPoolExecutor(workers) as pool:
        asked = [pool.submit(ask_simulator, tree, range(seeds)), pool.submit(ask_tests, tree)]
        for verdict in (future.result() for future in asked):
            print(f"    {verdict.words}", flush=True)
            if verdict.caught:
                raise SystemExit("the tree fails without any fault; mend it first")


def judge_all(mutants: Sequence[Mutant], tree: Path, options: argparse.Namespace) -> list[Finding]:
    """Judge several at once, with a line for each that is done; findings in the catalogue's order."""
    began_s = time.monotonic()
    found: dict[str, Finding] = {}
    done = itertools.count(1)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [
            pool.submit(judge, mutant, tree, options.seeds, briefly=options.brief) for mutant in mutants
        ]
        for future in as_completed(futures):
            finding = future.result()
            found[finding.mutant.name] = finding
            passed_s = time.monotonic() - began_s
            print(f"[{next(done):3}/{len(mutants)}] {passed_s:5.0f} s  {told(finding)}", flush=True)
    return [found[mutant.name] for mutant in mutants]


def told(finding: Finding) -> str:
    """One line on one mutant."""
    if finding.error:
        return f"{finding.mutant.name}: ERROR: {finding.error}"
    seen = f"simulator: {finding.simulator.words}; tests: {finding.tests.words}"
    return f"{finding.mutant.name}: {'' if finding.caught else 'SURVIVES: '}{seen}"


def table_of(findings: Sequence[Finding]) -> str:
    """What was found, as a table in Markdown."""
    lines = ["| fault | what it would cost | simulator | tests |", "|---|---|---|---|"]
    for finding in findings:
        cells = (finding.mutant.name, finding.mutant.breaks, finding.simulator.words, finding.tests.words)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def write_table(path: Path, table: str) -> None:
    """Replace what is between the two marks in ``path``; SystemExit if they are not there."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(TABLE_BEGIN)
    _, end, tail = rest.partition(TABLE_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no {TABLE_BEGIN} ... {TABLE_END}; put them where the table is to be")
    path.write_text(f"{head}{begin}\n{table}\n{end}{tail}", encoding="utf-8")


def main() -> None:
    """Judge the catalogue; exit 1 if a mutant survives or could not be judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="judge these alone")
    parser.add_argument("--seeds", type=int, default=600, help="of the simulator, at most, for each mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants judged at once")
    parser.add_argument("--brief", action="store_true", help="ask the tests only about what it did not see")
    parser.add_argument("--unproven", action="store_true", help="do not judge the tree without a fault first")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--write-table", type=Path, metavar="FILE", help="a page whose table is replaced")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return
    if options.write_table and (options.only or options.brief):
        parser.error("--write-table wants the whole catalogue, and both judges")
    with tempfile.TemporaryDirectory(prefix="kvstow-pristine-") as folder:
        tree = Path(folder)
        copy_tree(ROOT, tree)
        if not options.unproven:
            print("==> the tree as it is", flush=True)
            judge_pristine(tree, options.seeds, options.jobs)
        print(f"==> {len(mutants)} faults, {options.jobs} at once", flush=True)
        findings = judge_all(mutants, tree, options)
    table = table_of(findings)
    print(f"\n{table}")
    if options.write_table:
        write_table(options.write_table, table)
    missed = [finding for finding in findings if finding.error or not finding.caught]
    if missed:
        raise SystemExit("\n".join(["", *map(told, missed), f"{len(missed)} of {len(findings)} not caught"]))
    print(f"all {len(findings)} caught")


if __name__ == "__main__":
    main()
