"""Engines that save or load less than everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import BLOCK, CHUNK, prompt, running, second_turn

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_save_prompt_leaves_out_what_was_generated(llama: Path) -> None:
    with running(llama, {"save": "prompt"}, disable_log_stats=False) as engine:
        assert second_turn(engine, seed=6).cached == 3 * CHUNK
        engine.expect_baseline()


def test_one_engine_saves_and_another_loads(llama: Path, tmp_path: Path) -> None:
    tokens, other = prompt(500, seed=7), prompt(500, seed=8)
    stow = {"disk_path": str(tmp_path / "disk")}
    with running(llama, stow | {"role": "save"}) as engine:
        first = engine.ask(tokens)
        held = engine.kv_bytes(first.blocks)[: 448 // BLOCK]
        engine.clear_own_cache()
        assert engine.ask(tokens).cached == 0
        assert engine.counters()["saves"] == 7
        engine.expect_baseline()
    with running(llama, stow | {"role": "load"}) as engine:
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (448, first.tokens)
        assert engine.kv_bytes(again.blocks)[: 448 // BLOCK] == held
        engine.ask(other)
        engine.clear_own_cache()
        assert engine.ask(other).cached == 0
        counted = engine.counters()
        assert (counted["saves"], counted["disk_writes"]) == (0, 0)
        engine.expect_baseline()
