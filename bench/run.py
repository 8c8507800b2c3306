"""Every bench in turn, and one table of what they reached: ``python bench/run.py [--quick]``.

Each runs in a process of its own and leaves its figures in ``out/bench/NAME.json``. ``--quick`` takes
fewer rounds and smaller sizes: to see that all of them run, not to quote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import emit

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Bench:
    """One script beside this one.

    Attributes:
        name: the script's name without its suffix.
        options: its options for a full run; ``{root}`` stands for the folder of the figures.
        quick: further options for a quick one.
    """

    name: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


BENCHES = (
    Bench("gather", quick=("--payload-mib", "64", "--rounds", "5")),
    Bench("transfer", quick=("--payload-mib", "256", "--rounds", "5")),
    Bench("contracts", ("--root", "{root}"), ("--frames", "8", "--transfer-mib", "32", "--rounds", "3")),
    Bench("arena"),
    Bench("disk", ("--root", "{root}")),
    Bench("lookup", quick=("--rounds", "100")),
    Bench("keys"),
    Bench("overhead", ("--root", "{root}"), ("--rounds", "6")),
    Bench("reload", ("--root", "{root}"), ("--rounds", "2")),
)


FLOORS = {
    "gather": (("native_per_loop", 0.90),),
    "disk": (("put_ratio", 0.90), ("get_ratio", 0.90)),
}
"""Figures of benches whose rows carry no target, and what each is to be at least: the worst row counts."""

VERDICTS = {
    "transfer": (("ratio", "target", "reached"),),
    "lookup": (("median_ms", "target", "reached"),),
    "overhead": (("ratio", "target", "reached"),),
    "reload": (("to_hit", "target", "reached"), ("faster_than_cold", "target_cold", "reached_cold")),
}
"""Columns of figure, target and verdict in the rows that carry them; a row without a target says ``-``."""

CASES = {
    "gather": ("placement", "block_kib", "way"),
    "transfer": ("layout", "path"),
    "disk": ("frame_mib",),
    "lookup": ("tier", "case", "entries"),
    "overhead": ("engine",),
    "reload": ("chunk_tokens", "place"),
}
"""Columns that tell a bench's rows apart."""

Row = dict[str, Any]


def summarise(bench: str, rows: list[Row]) -> Iterator[Row]:
    """A line for each target that the rows of ``bench`` have to do with."""
    for figure, floor in FLOORS.get(bench, ()):
        worst = min(rows, key=lambda row: float(row[figure]))
        reached = "yes" if worst[figure] >= floor else "no"
        yield _line(bench, f"worst: {_case(bench, worst)}", figure, worst[figure], f">= {floor:g}", reached)
    for row in rows:
        for figure, target, verdict in VERDICTS.get(bench, ()):
            if row[target] != "-":
                yield _line(bench, _case(bench, row), figure, row[figure], row[target], row[verdict])
        if bench == "keys" and row["target_ms"] != "-":
            value, most = row["median_ms"], float(row["target_ms"])
            yield _line(
                bench, row["what"], "median_ms", value, f"<= {most:g}", "yes" if value <= most else "no"
            )


def _case(bench: str, row: Row) -> str:
    return ", ".join(f"{name}={row[name]}" for name in CASES[bench])


def _line(bench: str, case: str, figure: str, value: float, target: str, reached: str) -> Row:
    return {
        "bench": bench,
        "case": case,
        "figure": figure,
        "value": value,
        "target": target,
        "reached": reached,
    }


def main() -> None:
    """Run them, and print the summary; 1 if one of them failed to run, whatever it reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument(
        "--only", nargs="+", choices=[bench.name for bench in BENCHES], help="run these alone"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    failed = []
    for bench in BENCHES:
        if options.only and bench.name not in options.only:
            continue
        path = options.out / f"{bench.name}.json"
        # The figures of an earlier run must not pass for this one's.
        path.unlink(missing_ok=True)
        words = [word.format(root=options.out.absolute()) for word in bench.options]
        words += bench.quick if options.quick else ()
        print(f"==> {bench.name} {' '.join(words)}", flush=True)
        command = [sys.executable, str(HERE / f"{bench.name}.py"), *words, "--json", str(path)]
        if subprocess.run(command, check=False).returncode or not path.exists():
            failed.append(bench.name)
            continue
        lines += summarise(bench.name, json.loads(path.read_text(encoding="utf-8"))["rows"])
    if lines:
        title = "targets of docs/design, section 10" + (", quick run: not to quote" if options.quick else "")
        emit(title, lines, options.out / "summary.json")
    if failed:
        raise SystemExit(f"did not run to the end: {', '.join(failed)}")


if __name__ == "__main__":
    main()
