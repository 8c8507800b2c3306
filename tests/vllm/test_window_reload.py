"""Windows and recurrent state on a real engine: what is loaded, and what happens when a part is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import GEMMA, QWEN3_NEXT, Family
from inprocess import Engine, prompt, running, start
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvstow.adapters.vllm import setup
from kvstow.errors import ConfigError
from kvstow.layout.resume import ResumeRule

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK = QWEN3_NEXT.chunk_tokens
LENGTH = 900
HIT = 3 * CHUNK


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA.make(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return QWEN3_NEXT.make(tmp_path_factory.mktemp("qwen") / "model")


def options(family: Family, **more: Any) -> dict[str, Any]:
    return dict(family.options) | more


# A state exists only where a step's prefill ends.
STEPWISE = {"max_num_batched_tokens": CHUNK}


def rules_of(engine: Engine) -> list[ResumeRule]:
    """What a resume needs, by group."""
    return list(setup.rules_of(engine.scheduler.kv_cache_config, CHUNK))


def with_images(folder: Path, **stow: Any) -> dict[str, Any]:
    """Settings under which every chunk's end has an image."""
    return {"chunk_tokens": CHUNK, "image_interval_tokens": CHUNK, "disk_path": str(folder)} | stow


def images(engine: Engine, folder: Path, boundary: int) -> list[Path]:
    """The files of the images at ``boundary`` tokens, of every group that has them."""
    groups = [group for group, rule in enumerate(rules_of(engine)) if rule.kind.value == "state"]
    found = [
        path
        for group in groups
        for path in folder.glob(f"*/r0/g{group}/*/*")
        if int(path.name.split("-")[0]) == boundary // CHUNK - 1
    ]
    assert len(found) == len(groups)
    return found


def test_of_a_window_only_what_the_boundary_needs_is_loaded(gemma: Path, tmp_path: Path) -> None:
    tokens = prompt(500, seed=1)
    stow = {"disk_path": str(tmp_path)}
    with running(gemma, stow, **options(GEMMA)) as engine:
        first = engine.ask(tokens)
        groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
    with running(gemma, stow, **options(GEMMA)) as engine:
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (448, first.tokens)
        # Seven chunks of 64 of the layer that sees everything, one of each that sees 64 tokens.
        assert engine.counters()["disk_reads"] == 7 + (groups - 1)
        engine.expect_baseline()


def test_an_image_that_is_gone_costs_the_way_from_the_one_before(qwen: Path, tmp_path: Path) -> None:
    tokens = prompt(LENGTH, seed=2)
    stow = with_images(tmp_path)
    with running(qwen, stow, **options(QWEN3_NEXT, **STEPWISE)) as engine:
        first = engine.ask(tokens)
        engine.expect_baseline()
        gone = images(engine, tmp_path, HIT)
    for path in gone[:1]:
        path.unlink()
    with running(qwen, stow, **options(QWEN3_NEXT, **STEPWISE)) as engine:
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (2 * CHUNK, first.tokens)
        assert engine.counters()["load_failed"] == 0
        engine.expect_baseline()


def test_a_bad_image_is_a_miss_of_its_boundary_and_not_of_the_chunk(qwen: Path, tmp_path: Path) -> None:
    tokens = prompt(LENGTH, seed=3)
    stow = with_images(tmp_path)
    with running(qwen, stow, **options(QWEN3_NEXT, **STEPWISE)) as engine:
        first = engine.ask(tokens)
        engine.expect_baseline()
        bad = images(engine, tmp_path, HIT)[0]
    content = bytearray(bad.read_bytes())
    content[5000] ^= 1
    bad.write_bytes(content)
    with running(qwen, stow, **options(QWEN3_NEXT, **STEPWISE)) as engine:
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (2 * CHUNK, first.tokens)
        counted = engine.counters()
        assert (counted["load_failed"], counted["corrupt_frames"]) == (1, 1)
        # The request has computed the image anew; the next one gets all.
        engine.clear_own_cache()
        assert engine.ask(tokens).cached == HIT
        engine.expect_baseline()


def test_more_images_let_a_prompt_that_parts_resume_nearby(qwen: Path, tmp_path: Path) -> None:
    stored = prompt(LENGTH, seed=4)
    parting = stored[: 2 * CHUNK + 20] + prompt(200, seed=5)
    for interval, hit in ((0, 0), (CHUNK, 2 * CHUNK)):
        stow = with_images(tmp_path / str(interval), image_interval_tokens=interval)
        with running(qwen, stow, **options(QWEN3_NEXT, **STEPWISE)) as engine:
            engine.ask(stored)
            engine.clear_own_cache()
            answer = engine.ask(parting)
            # Under a salt of its own it shares nothing.
            alone = engine.ask(parting, salt="alone")
            assert (answer.cached, alone.cached) == (hit, 0)
            assert answer.tokens == alone.tokens
            engine.expect_baseline()


def test_a_prompt_that_ends_on_a_boundary_resumes_at_the_image_before(qwen: Path, tmp_path: Path) -> None:
    tokens = prompt(HIT, seed=6)
    with running(qwen, with_images(tmp_path), **options(QWEN3_NEXT, **STEPWISE)) as engine:
        first = engine.ask(tokens)
        engine.clear_own_cache()
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (2 * CHUNK, first.tokens)
        # One token more, and the boundary leaves a token by itself: the last chunk is kept.
        engine.clear_own_cache()
        assert engine.ask([*tokens, 17]).cached == HIT
        engine.expect_baseline()


def test_images_have_a_share_of_their_own(qwen: Path) -> None:
    stow = {"chunk_tokens": CHUNK, "image_share": 0.5, "arena_gib": 0.02}
    with running(qwen, stow, **options(QWEN3_NEXT)) as engine:
        directory = engine.planner.directory
        slots = {
            rule.kind.value: directory.arena_slots(group)
            for group, rule in zip(directory.group_ids, rules_of(engine), strict=True)
        }
        assert slots["state"] != slots["paged"]
        assert min(slots.values()) >= 1


@pytest.mark.parametrize(
    ("stow", "changed", "named"),
    [
        (
            {},
            {"enable_prefix_caching": False, "mamba_cache_mode": "none"},
            ["mamba_cache_mode='none'", "align"],
        ),
        ({"image_interval_tokens": 300}, {}, ["image_interval_tokens=300", f"use {2 * CHUNK}"]),
        ({"chunk_tokens": 64}, {}, ["chunk_tokens=64", f"use {CHUNK}"]),
    ],
    ids=["mode", "interval", "chunk"],
)
def test_what_keeps_no_state_is_refused(
    qwen: Path, stow: dict[str, Any], changed: dict[str, Any], named: list[str]
) -> None:
    try:
        with pytest.raises(ConfigError) as refused:
            start(qwen, {"chunk_tokens": CHUNK} | stow, **(options(QWEN3_NEXT) | changed))
    finally:
        ensure_kv_transfer_shutdown()
    assert not [part for part in named if part not in str(refused.value)], str(refused.value)
