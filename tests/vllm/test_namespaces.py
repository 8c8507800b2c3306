"""One disk folder, engines that differ in one thing: each misses, and the first still hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from inprocess import Answer, prompt, running
from lora_adapters import LORA, make_adapter
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HIT = 448


def test_whatever_changes_the_bytes_is_a_miss(tmp_path: Path) -> None:
    tokens = prompt(500, seed=1)
    stow = {"disk_path": str(tmp_path / "disk")}
    model = tiny.make_llama(tmp_path / "model", seed=0)

    def ask(settings: dict[str, Any] | None = None, **options: Any) -> Answer:
        with running(model, stow | (settings or {}), **options) as engine:
            answer = engine.ask(tokens)
            if answer.cached:
                assert engine.counters()["loaded_tokens_disk"] == answer.cached
            engine.expect_baseline()
            return answer

    first = ask()
    assert first.cached == 0

    assert ask(dtype="bfloat16").cached == 0
    assert ask(block_size=64, num_gpu_blocks_override=30).cached == 0
    assert ask({"chunk_tokens": 128}).cached == 0
    assert ask({"namespace": "other"}).cached == 0

    # In place: same path, same sizes, other weights.
    tiny.make_llama(model, seed=1)
    other = ask()
    assert other.cached == 0
    assert other.tokens != first.tokens
    tiny.make_llama(model, seed=0, layers=2)
    assert ask().cached == 0

    tiny.make_llama(model, seed=0)
    again = ask()
    assert (again.cached, again.tokens) == (HIT, first.tokens)


def test_an_adapter_that_was_replaced_between_two_runs_is_a_miss(llama: Path, tmp_path: Path) -> None:
    """Same name, same folder, same prompt, same store: other content."""
    tokens = prompt(500, seed=5)
    stow = {"disk_path": str(tmp_path / "disk")}
    folder = make_adapter(tmp_path / "adapter", seed=1)
    lora = LoRARequest("replaced", 1, str(folder))
    with running(llama, stow, **LORA) as engine:
        first = engine.ask(tokens, lora=lora)
        assert first.cached == 0
        engine.expect_baseline()
    make_adapter(folder, seed=2)
    with running(llama, stow, **LORA) as engine:
        assert engine.ask(tokens, lora=lora).cached == 0
        engine.expect_baseline()
    make_adapter(folder, seed=1)
    with running(llama, stow, **LORA) as engine:
        again = engine.ask(tokens, lora=lora)
        assert (again.cached, again.tokens) == (HIT, first.tokens)
        engine.expect_baseline()
