"""The demo's results: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from kvstow.cli.demo.verdict import Row, Stage

LABELS: Mapping[Stage, str] = {
    Stage.COLD: "cold",
    Stage.ENGINE: "engine's own hit",
    Stage.ARENA: "kvstow, DRAM",
    Stage.DISK: "kvstow, disk",
    Stage.RECOMPUTE: "computed again",
}


def make_table(rows: Sequence[Row]) -> Table:
    """One line per stage."""
    tokens = rows[0].measured.prompt_tokens
    table = Table(
        title=f"The same prompt of {tokens:,} tokens, five times", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("from", no_wrap=True)
    for name in ("first\ntoken", "vs com-\nputed", "tokens\nrestored"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("same\ntext", "facts", "holds"):
        table.add_column(name, justify="center", no_wrap=True)
    for row in rows:
        table.add_row(
            LABELS[row.stage],
            f"{row.measured.ttft_s * 1000:,.0f} ms",
            factor(row),
            ", ".join(f"{tokens:,} {place}" for place, tokens in restored_from(row).items()) or "0",
            "yes" if row.same_text else "[red]no[/]",
            f"{row.facts}/3",
            "[red]no[/]" if row.broken else "[green]yes[/]",
        )
    return table


def factor(row: Row) -> str:
    """How many times as fast as computed, with the digits that mean something."""
    return f"{row.speedup:.1f}x" if row.speedup < 10 else f"{row.speedup:.0f}x"


def restored_from(row: Row) -> dict[str, int]:
    """Prompt tokens by the place they came from, empty places left out; the rest was computed."""
    counted = row.measured.counted
    places = {
        "engine": counted.engine,
        "arena": counted.arena,
        "disk": counted.disk,
        "unnamed": counted.unknown,
    }
    return {place: tokens for place, tokens in places.items() if tokens}


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write every row; the folder exists."""
    content = {"rows": [asdict(row) | {"label": LABELS[row.stage]} for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
