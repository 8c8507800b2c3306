"""What comes back is bit for bit what the engine's own cache would have given."""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import BLOCK, Engine, prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTH = 500
HIT = 448
"""The whole chunks of so long a prompt."""


def test_a_dense_model_reloads_its_own_hit_from_arena_and_from_disk(llama: Path, tmp_path: Path) -> None:
    tokens = prompt(LENGTH, seed=1)
    stow = {"disk_path": str(tmp_path / "disk")}
    with running(llama, stow) as engine:
        # Leaves exactly HIT tokens in the engine's own cache.
        cold = engine.ask(tokens[:HIT])
        own = engine.ask(tokens, logprobs=True)
        assert (cold.cached, own.cached) == (0, HIT)
        held = engine.kv_bytes(own.blocks)[: HIT // BLOCK]

        engine.clear_own_cache()
        before = engine.counters()
        arena = engine.ask(tokens, logprobs=True)
        assert engine.counted_since(before)["loaded_tokens_arena"] == HIT
        assert arena.cached == HIT
        assert engine.kv_bytes(arena.blocks)[: HIT // BLOCK] == held
        assert (arena.tokens, arena.logprobs) == (own.tokens, own.logprobs)
        engine.expect_baseline()

    with running(llama, stow) as engine:
        disk = engine.ask(tokens, logprobs=True)
        assert engine.counters()["loaded_tokens_disk"] == HIT
        assert disk.cached == HIT
        assert engine.kv_bytes(disk.blocks)[: HIT // BLOCK] == held
        assert (disk.tokens, disk.logprobs) == (own.tokens, own.logprobs)

        # What came from disk is in the arena now.
        engine.clear_own_cache()
        before = engine.counters()
        promoted = engine.ask(tokens, logprobs=True)
        assert engine.counted_since(before)["loaded_tokens_arena"] == HIT
        assert engine.kv_bytes(promoted.blocks)[: HIT // BLOCK] == held
        assert promoted.logprobs == own.logprobs
        engine.expect_baseline()


def test_latent_attention_reloads_what_was_computed(deepseek: Path, tmp_path: Path) -> None:
    """vLLM gives this model no prefix cache of its own on a CPU, so the cold run is the oracle."""
    tokens = prompt(LENGTH, seed=2)
    stow = {"disk_path": str(tmp_path / "disk")}
    blocks = HIT // 16

    def run(engine: Engine) -> tuple[int, list[bytes], list[int], object]:
        answer = engine.ask(tokens, logprobs=True)
        return answer.cached, engine.kv_bytes(answer.blocks)[:blocks], answer.tokens, answer.logprobs

    with running(deepseek, stow, block_size=16, num_gpu_blocks_override=120) as engine:
        assert engine.block_tokens == 16
        cached, held, text, _ = run(engine)
        assert cached == 0
        engine.clear_own_cache()
        arena = run(engine)
        assert engine.counters()["loaded_tokens_arena"] == HIT
        assert arena[:3] == (HIT, held, text)
        engine.expect_baseline()

    with running(deepseek, stow, block_size=16, num_gpu_blocks_override=120) as engine:
        disk = run(engine)
        assert engine.counters()["loaded_tokens_disk"] == HIT
        # Log-probabilities too: the tail is computed over the same bytes at the same boundary.
        assert disk == arena
        engine.expect_baseline()


def test_a_reload_after_the_engine_evicted_by_itself(llama: Path) -> None:
    """No help from the test: fillers push the prefix out of the engine's cache."""
    tokens = prompt(LENGTH, seed=3)
    with running(llama) as engine:
        first = engine.ask(tokens)
        held = engine.kv_bytes(first.blocks)[: HIT // BLOCK]
        for seed in range(4):
            assert engine.ask(prompt(600, seed=100 + seed)).cached == 0
        before = engine.counters()
        again = engine.ask(tokens)
        assert engine.counted_since(before)["loaded_tokens_arena"] == HIT
        assert (again.cached, again.tokens) == (HIT, first.tokens)
        assert engine.kv_bytes(again.blocks)[: HIT // BLOCK] == held

        # Part of it is still in the engine: only the rest is loaded, above the engine's floor.
        longer = tokens + prompt(200, seed=4)
        engine.ask(longer)
        engine.clear_own_cache()
        assert engine.ask(tokens[:321]).cached == 320
        before = engine.counters()
        assert engine.ask(longer).cached == 640
        assert engine.counted_since(before)["loaded_tokens_arena"] == 320
        engine.expect_baseline()


def test_nothing_is_written_below_the_engines_floor(llama: Path) -> None:
    """The engine's own hit ends inside a chunk: its blocks may be others' too, and stay as they are."""
    tokens = prompt(LENGTH, seed=5)
    floor = 7 * BLOCK
    with running(llama) as engine:
        first = engine.ask(tokens)
        held = engine.kv_bytes(first.blocks)[: HIT // BLOCK]
        engine.clear_own_cache()
        engine.ask(tokens[: floor + 1], max_tokens=1)
        before = engine.counters()
        again = engine.ask(tokens)
        assert (again.cached, again.tokens) == (HIT, first.tokens)
        assert engine.counted_since(before)["loaded_tokens_arena"] == HIT - floor
        assert engine.kv_bytes(again.blocks)[: HIT // BLOCK] == held

        # Again, with a mark in every block of the engine's own hit: the load must not remove it.
        engine.clear_own_cache()
        engine.ask(tokens[: floor + 1], max_tokens=1)
        engine.settle()
        own = engine.ask(tokens[: floor + 1])
        assert own.cached == floor
        shared = own.blocks[: floor // BLOCK]
        for cache in engine.kv_caches:
            cache[shared] = -1.0
        mark = engine.kv_bytes(shared)
        again = engine.ask(tokens)
        assert (again.cached, again.blocks[: floor // BLOCK]) == (HIT, shared)
        assert engine.kv_bytes(shared) == mark
        assert engine.kv_bytes(again.blocks)[floor // BLOCK : HIT // BLOCK] == held[floor // BLOCK :]
        engine.expect_baseline()
