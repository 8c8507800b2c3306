"""What the demo calls kept and broken, and how it shows it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvstow.cli.demo.chart import write_chart
from kvstow.cli.demo.client import Counters, parse_counters
from kvstow.cli.demo.report import make_table, write_json
from kvstow.cli.demo.verdict import Measured, Row, Stage, judge

TOKENS = 6800
NONE = Counters(seen=TOKENS, engine=0, arena=0, disk=0, unknown=0)
ANSWERS = ("heron 4417", "orange 2056", "a cat")


def measured(ttft_s: float, counted: Counters) -> Measured:
    return Measured(ttft_s=ttft_s, prompt_tokens=TOKENS, counted=counted, answers=ANSWERS)


def good() -> dict[Stage, Measured]:
    return {
        Stage.COLD: measured(13.0, NONE),
        Stage.ENGINE: measured(0.15, replace(NONE, engine=6784)),
        Stage.ARENA: measured(0.2, replace(NONE, arena=6656)),
        Stage.DISK: measured(0.4, replace(NONE, disk=6656)),
        Stage.RECOMPUTE: measured(13.5, NONE),
    }


def broken_rows(stages: dict[Stage, Measured]) -> dict[Stage, str]:
    return {row.stage: "; ".join(row.broken) for row in judge(stages) if row.broken}


def test_a_good_run_breaks_nothing() -> None:
    rows = judge(good())
    assert [row.stage for row in rows] == list(Stage)
    assert not any(row.broken for row in rows)
    assert all(row.same_text for row in rows)
    assert [row.facts for row in rows] == [2] * 5
    assert rows[2].speedup == pytest.approx(65)


@pytest.mark.parametrize(
    ("stage", "change", "reason"),
    [
        (Stage.COLD, {"counted": replace(NONE, arena=256)}, "256 tokens were restored"),
        (Stage.ENGINE, {"counted": NONE}, "held 0 of 6800"),
        (Stage.ARENA, {"counted": replace(NONE, arena=6000)}, "6000 of 6800 tokens came from arena"),
        (Stage.ARENA, {"counted": replace(NONE, disk=6656)}, "0 of 6800 tokens came from arena"),
        (Stage.ARENA, {"counted": replace(NONE, engine=3000, arena=3700)}, "still held 3000"),
        (Stage.ARENA, {"ttft_s": 4.0}, "3.2 times as fast as computed, want 5"),
        (Stage.ARENA, {"answers": ("heron 4417", "orange 2056", "a dog")}, "text differs"),
        (Stage.DISK, {"counted": replace(NONE, unknown=6656)}, "unnamed 6656"),
        (Stage.DISK, {"ttft_s": 4.0}, "want 5"),
        (Stage.DISK, {"answers": ("", "", "")}, "text differs"),
        (Stage.RECOMPUTE, {"counted": replace(NONE, disk=32)}, "32 tokens were restored"),
        (Stage.RECOMPUTE, {"answers": ("", "", "")}, "differs from the cold one"),
    ],
)
def test_each_promise_is_checked(stage: Stage, change: dict[str, object], reason: str) -> None:
    stages = good()
    stages[stage] = replace(stages[stage], **change)  # type: ignore[arg-type]
    broken = broken_rows(stages)
    assert list(broken) == [stage]
    assert reason in broken[stage]


def test_a_slow_cold_run_flatters_nobody() -> None:
    stages = good()
    stages[Stage.COLD] = replace(stages[Stage.COLD], ttft_s=40.0)
    assert judge(stages)[2].speedup == pytest.approx(13.5 / 0.2)


def test_counters_are_read_from_what_vllm_publishes() -> None:
    text = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="demo"} 14600.0
# HELP vllm:prompt_tokens_cached_by_source_total Hits by source.
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="device"} 7296.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="host"} 5.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="demo",source="host"} 6.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="disk"} 7.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="p2p"} 8.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="demo",source="external_unspecified"} 9.0
"""
    counted = parse_counters(text)
    assert counted == Counters(seen=14600, engine=7296, arena=11, disk=7, unknown=17)
    assert counted.since(parse_counters("")) == counted
    assert counted.restored == 35


@pytest.fixture
def rows() -> list[Row]:
    stages = good()
    stages[Stage.DISK] = replace(stages[Stage.DISK], answers=("", "", ""))
    return judge(stages)


def test_the_table_fits_a_narrow_terminal(rows: list[Row]) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(make_table(rows))
    shown = console.export_text()
    assert "…" not in shown
    lines = {line.split("  ")[1]: line.split() for line in shown.splitlines() if " ms " in line}
    assert lines["kvstow, DRAM"][2:] == ["200", "ms", "65x", "6,656", "arena", "yes", "2/3", "yes"]
    assert lines["kvstow, disk"][2:] == ["400", "ms", "32x", "6,656", "disk", "no", "0/3", "no"]
    assert lines["cold"][1:] == ["13,000", "ms", "1.0x", "0", "yes", "2/3", "yes"]


def test_json_holds_every_number(rows: list[Row], tmp_path: Path) -> None:
    write_json(rows, tmp_path / "demo.json")
    read = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [row["stage"] for row in read] == [stage.value for stage in Stage]
    assert read[2]["measured"]["counted"]["arena"] == 6656
    assert read[3]["broken"]


def test_the_chart_is_a_png(rows: list[Row], tmp_path: Path) -> None:
    write_chart(rows, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
