"""Weights that change under a running engine: their blocks and those of the old ones are not mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from inprocess import prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("seed", [None, "7"], ids=["the engine's hashes", "hashes of our own"])
def test_what_new_weights_computed_is_not_found_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: str | None
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    old, new = tiny.make_llama(tmp_path / "old", seed=0), tiny.make_llama(tmp_path / "new", seed=1)
    stow = {"disk_path": str(tmp_path / "disk")}
    tokens = prompt(500, seed=1)
    with running(old, stow) as engine:
        first = engine.ask(tokens)
        engine.settle()
        engine.core.pause_scheduler(mode="abort", clear_cache=True)
        engine.core.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        engine.core.resume_scheduler()
        other = engine.ask(tokens)
        assert other.cached == 0
        assert other.tokens != first.tokens
        engine.clear_own_cache()
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (448, other.tokens)
        engine.expect_baseline()
    with running(old, stow) as engine:
        answer = engine.ask(tokens)
        assert (answer.cached, answer.tokens) == (0, first.tokens)
        engine.expect_baseline()


def test_a_request_that_goes_on_after_a_reset_is_not_saved(llama: Path) -> None:
    with running(llama) as engine:
        name = engine.submit(prompt(500, seed=2), max_tokens=100)
        engine.step_until(lambda: len(engine.request(name).output_token_ids) > 2)
        engine.connector.reset_cache()
        engine.step_until(lambda: engine.answers[name].finish is not None)
        engine.clear_own_cache()
        assert engine.ask(prompt(500, seed=2)).cached == 0
        engine.expect_baseline()
