"""Prompts that take several steps, and prompts whose end is a boundary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import BLOCK, CHUNK, Engine, prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEP_TOKENS = 96
"""Neither a chunk nor a multiple of one: saves and loads end inside a step."""


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with running(llama, max_num_batched_tokens=STEP_TOKENS) as engine:
        yield engine


@pytest.mark.parametrize("length", [65, 127, 128, 129, 192, 257, 500, 640, 705])
def test_a_reload_equals_the_own_hit(engine: Engine, length: int) -> None:
    tokens = prompt(length, seed=length)
    # A prompt that ends on a boundary steps back one chunk: a token must be left to compute.
    hit = (length - 1) // CHUNK * CHUNK
    engine.ask(tokens[:hit])
    own = engine.ask(tokens, logprobs=True)
    assert own.cached == hit
    held = engine.kv_bytes(own.blocks)[: hit // BLOCK]

    engine.clear_own_cache()
    before = engine.counters()
    again = engine.ask(tokens, logprobs=True)

    assert again.cached == hit < length
    assert engine.counted_since(before)["loaded_tokens_arena"] == hit
    assert engine.kv_bytes(again.blocks)[: hit // BLOCK] == held
    assert (again.tokens, again.logprobs) == (own.tokens, own.logprobs)
    engine.expect_baseline()


@pytest.mark.parametrize("length", [1, 63, 64])
def test_a_prompt_without_a_whole_chunk_before_its_last_token_loads_nothing(
    engine: Engine, length: int
) -> None:
    tokens = prompt(length, seed=1000 + length)
    first = engine.ask(tokens)
    engine.clear_own_cache()
    before = engine.counters()
    again = engine.ask(tokens)
    assert (again.cached, again.tokens) == (0, first.tokens)
    assert "promised_tokens" not in engine.counted_since(before)


def test_a_cold_run_in_steps_saves_what_a_cold_run_computes(engine: Engine) -> None:
    """Dense float32 is exact however it is cut: the bytes saved are those of a run without a hit."""
    tokens = prompt(500, seed=7)
    first = engine.ask(tokens, logprobs=True)
    held = engine.kv_bytes(first.blocks)[: 448 // BLOCK]
    engine.clear_own_cache()
    again = engine.ask(tokens, logprobs=True)
    assert (first.cached, again.cached) == (0, 448)
    assert engine.kv_bytes(again.blocks)[: 448 // BLOCK] == held
    assert again.tokens == first.tokens
