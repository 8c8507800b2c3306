"""The demo's picture: one bar per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from kvstow.cli.demo.report import factor, restored_from
from kvstow.cli.demo.verdict import Row, Stage

_COLOURS: Mapping[Stage, str] = {
    Stage.COLD: "#9aa5b1",
    Stage.ENGINE: "#5b7083",
    Stage.ARENA: "#0b7a75",
    Stage.DISK: "#d98e04",
    Stage.RECOMPUTE: "#9aa5b1",
}
_SCENES: Mapping[Stage, str] = {
    Stage.COLD: "cold, nothing is held",
    Stage.ENGINE: "engine's own prefix hit",
    Stage.ARENA: "kvstow, after the engine lost it",
    Stage.DISK: "kvstow, after a restart",
    Stage.RECOMPUTE: "everything removed, computed again",
}
_LABEL_ROOM = 5.0
"""The axis ends this many times past the longest bar, for the labels; it is logarithmic."""


def write_chart(rows: Sequence[Row], path: Path) -> None:
    """Draw ``rows`` from top to bottom as a PNG; the folder exists."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times_ms = [row.measured.ttft_s * 1000 for row in rows]
    bars = axes.barh(
        [_name(row) for row in rows], times_ms, color=[_COLOURS[row.stage] for row in rows], height=0.62
    )
    axes.bar_label(bars, labels=[_label(row) for row in rows], padding=6, fontsize=11)
    axes.set_xscale("log")
    axes.set_xlim(min(times_ms) / 3, max(times_ms) * _LABEL_ROOM)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.invert_yaxis()
    axes.set_xlabel("time to first token in ms (logarithmic), and how many times as fast as computed")
    axes.set_title(
        f"The same prompt of {rows[0].measured.prompt_tokens:,} tokens, SmolLM2-135M on vLLM (CPU)",
        loc="left",
        fontsize=13,
    )
    axes.grid(axis="x", which="major", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _name(row: Row) -> str:
    places = [f"{tokens:,} tokens from {place}" for place, tokens in restored_from(row).items()]
    return "\n".join([_SCENES[row.stage], ", ".join(places) or "0 tokens restored"])


def _label(row: Row) -> str:
    time = f"{row.measured.ttft_s * 1000:,.0f} ms"
    return f"{time} ({factor(row)})" if restored_from(row) else time
