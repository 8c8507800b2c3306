"""Every model family on two ranks: a reload is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import DEEPSEEK_V2, GEMMA, LLAMA, LONG, QWEN3_NEXT, Family
from vllm_children import Engine, Launcher, stow

pytestmark = [pytest.mark.vllm, pytest.mark.models]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, id=family.name) for family in (LLAMA, GEMMA, QWEN3_NEXT, DEEPSEEK_V2, *LONG)],
)
def test_both_ranks_reload_the_engines_own_hit(
    family: Family,
    launcher: Launcher,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("family", family.name)
    model = family.make(tmp_path / "model")
    transfer = stow(chunk_tokens=family.chunk_tokens, disk_path=str(tmp_path / "disk"))
    tokens = family.prompt(1)["prompt_token_ids"]
    hit = (len(tokens) - 1) // family.chunk_tokens * family.chunk_tokens

    def start() -> Engine:
        environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        return launcher.spawn(model, transfer, environ, tensor_parallel_size=2, **family.options)

    engine = start()
    cold = engine.ask(tokens)
    assert cold.cached == 0
    if family.has_own_cache:
        own = engine.ask(tokens)
        assert own.cached == hit
    engine.forget()
    arena = engine.ask(tokens)
    assert arena.cached == engine.numbers()["loaded_tokens_arena"] == hit
    engine.stop()
    engine = start()
    disk = engine.ask(tokens)
    assert disk.cached == engine.numbers()["loaded_tokens_disk"] == hit
    engine.stop()

    assert disk.text == arena.text
    if family.has_own_cache:
        assert arena.text == own.text
        record_property("TP=2", "own hit: tokens, log-probabilities")
    else:
        record_property("TP=2", "disk and arena: tokens, log-probabilities")
