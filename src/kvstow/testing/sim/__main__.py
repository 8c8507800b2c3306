"""`python -m kvstow.testing.sim`: seeds, a soak, or one schedule again."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvstow.clock import SystemClock
from kvstow.testing.sim.explore import quieten, run_scenario, run_seeds, shrink
from kvstow.testing.sim.outcome import TRANSITIONS, Outcome, Tally
from kvstow.testing.sim.scenario import Scenario

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False)
_clock = SystemClock()
_CORES = os.cpu_count() or 1

Processes = Annotated[int, typer.Option(help="Schedules that run at once.")]


@app.command()
def seeds(
    count: Annotated[int, typer.Option(help="How many.")] = 2000,
    first: Annotated[int, typer.Option(help="The first.")] = 0,
    processes: Processes = _CORES,
) -> None:
    """Run seeds; exit 1 if any breaks an invariant."""
    _explore(range(first, first + count), processes, for_s=float("inf"))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long; 0: until interrupted.")] = 0.0,
    first: Annotated[int, typer.Option(help="The first seed; by default one that was not run before.")] = -1,
    processes: Processes = _CORES,
) -> None:
    """Run new seeds until told to stop, or until one breaks an invariant."""
    start = first if first >= 0 else int(_clock.wall_s()) * 1000
    console.print(f"seeds from {start} on, {processes} at once; Ctrl-C ends it")
    _explore(itertools.count(start), processes, for_s=minutes * 60 or float("inf"))


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="A scenario as JSON, or a file that holds one.")],
    smaller: Annotated[bool, typer.Option("--shrink", help="Make it as small as possible first.")] = False,
) -> None:
    """Run one schedule again, with what happened in it."""
    text = case if case.lstrip().startswith("{") else Path(case).read_text()
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"not a scenario: {error}") from error
    quieten()
    outcome = run_scenario(scenario)
    if smaller and outcome.failure is not None:
        outcome = shrink(outcome)
    if outcome.failure is None:
        console.print(f"every invariant held; {outcome.digest[:16]}")
        return
    _show_failure(outcome)
    raise typer.Exit(1)


def _explore(numbers: range | itertools.count[int], processes: int, for_s: float) -> None:
    quieten()
    tally = Tally()
    began_s = _clock.monotonic_s()
    shown_s = began_s
    try:
        for outcome in run_seeds(numbers, processes):
            tally.add(outcome)
            now_s = _clock.monotonic_s()
            if now_s - shown_s >= 2.0:
                shown_s = now_s
                _show_counter(tally, now_s - began_s)
            if outcome.failure is not None or now_s - began_s >= for_s:
                break
    except KeyboardInterrupt:
        console.print()
    _show_counter(tally, _clock.monotonic_s() - began_s)
    console.print()
    show_coverage(tally, console)
    for outcome in tally.failures:
        _show_failure(shrink(outcome))
    if tally.failures:
        raise typer.Exit(1)


def _show_counter(tally: Tally, passed_s: float) -> None:
    faults = sum(tally.faults.values())
    sys.stdout.write(
        f"\r{tally.schedules} schedules in {passed_s:.0f} s ({tally.schedules / max(passed_s, 1e-9):.1f}/s), "
        f"{tally.events} events, {faults} faults, {tally.simulated_s / 86400:.1f} simulated days, "
        f"{len(tally.failures)} failed "
    )
    sys.stdout.flush()


def show_coverage(tally: Tally, out: Console) -> None:
    """What the schedules have seen, as tables."""
    for title, counter in (
        ("faults", tally.faults),
        ("phases of requests", tally.transitions),
        ("what happened", tally.counts),
    ):
        table = Table(title=title, title_justify="left", box=None)
        table.add_column("what")
        table.add_column("times", justify="right")
        for name, count in sorted(counter.items()):
            table.add_row(name, str(count))
        out.print(table)
    unseen = [transition for transition in TRANSITIONS if not tally.transitions[transition]]
    seen = len(TRANSITIONS) - len(unseen)
    out.print(f"{seen} of {len(TRANSITIONS)} changes of phase seen; not yet: {', '.join(unseen) or 'none'}")


def _show_failure(outcome: Outcome) -> None:
    assert outcome.failure is not None
    for line in outcome.failure.trace:
        console.print(line, markup=False, soft_wrap=True)
    console.print(outcome.failure.message, markup=False, soft_wrap=True)
    console.print(outcome.replay_line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
