"""What decides a prompt's bytes besides its tokens: salt, adapter, embeddings; and who takes no hit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inprocess import BLOCK, Engine, prompt, running
from lora_adapters import LORA, make_adapter
from vllm.inputs import EmbedsPrompt
from vllm.lora.request import LoRARequest

from kvstow.adapters.vllm.compat import minor_version

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HIT = 448
OPTIONS = {**LORA, "enable_prompt_embeds": True}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with running(llama, **OPTIONS) as engine:
        yield engine


def cached(engine: Engine, tokens: list[int], **options: object) -> int:
    """Tokens of a prompt that kvstow brought; the engine's own cache is empty before and after."""
    before = engine.counters()
    answer = engine.ask(tokens, **options)
    engine.clear_own_cache()
    loaded = engine.counted_since(before).get("loaded_tokens_arena", 0)
    assert loaded == answer.cached
    return answer.cached


def test_a_salt_keeps_tenants_apart(engine: Engine) -> None:
    tokens = prompt(500, seed=1)
    assert cached(engine, tokens, salt="one") == 0
    assert cached(engine, tokens, salt="two") == 0
    assert cached(engine, tokens) == 0
    for salt in ("one", "two", None):
        assert cached(engine, tokens, salt=salt) == HIT
    assert cached(engine, tokens, salt="three") == 0


def test_adapters_under_one_name_share_nothing(engine: Engine, tmp_path: Path) -> None:
    tokens = prompt(500, seed=2)
    one = LoRARequest("same", 1, str(make_adapter(tmp_path / "one", seed=1)))
    two = LoRARequest("same", 2, str(make_adapter(tmp_path / "two", seed=2)))
    bare = engine.ask(tokens)
    bare_bytes = engine.kv_bytes(bare.blocks)[: HIT // BLOCK]
    engine.clear_own_cache()
    first = engine.ask(tokens, lora=one)
    first_bytes = engine.kv_bytes(first.blocks)[: HIT // BLOCK]
    engine.clear_own_cache()
    second = engine.ask(tokens, lora=two)
    second_bytes = engine.kv_bytes(second.blocks)[: HIT // BLOCK]
    engine.clear_own_cache()
    assert (bare.cached, first.cached, second.cached) == (0, 0, 0)
    # The adapters do something, so sharing would have been wrong.
    assert bare_bytes[0] != first_bytes[0] != second_bytes[0]

    # Before 0.31 the engine's own cache took the two for one; then neither is cached.
    hit = HIT if minor_version() >= (0, 31) else 0
    for lora, expected, text, computed in (
        (None, HIT, bare.tokens, bare_bytes),
        (one, hit, first.tokens, first_bytes),
        (two, hit, second.tokens, second_bytes),
    ):
        again = engine.ask(tokens, lora=lora)
        assert (again.cached, again.tokens) == (expected, text)
        assert engine.kv_bytes(again.blocks)[: HIT // BLOCK] == computed
        engine.clear_own_cache()


def test_an_adapter_that_changes_on_disk_is_not_cached(engine: Engine, tmp_path: Path) -> None:
    """The engine computes with what it read first, or may read it anew: nobody can tell."""
    tokens = prompt(500, seed=3)
    folder = make_adapter(tmp_path / "adapter", seed=1)
    lora = LoRARequest("changing", 3, str(folder))
    assert cached(engine, tokens, lora=lora) == 0
    assert cached(engine, tokens, lora=lora) == HIT
    make_adapter(folder, seed=2)
    assert cached(engine, tokens, lora=lora) == 0
    assert cached(engine, tokens, lora=lora) == 0


def embeddings(seed: int) -> torch.Tensor:
    return torch.randn(500, 64, generator=torch.Generator().manual_seed(seed))


def test_prompt_embeddings_are_their_own_prompt(engine: Engine) -> None:
    one, two = embeddings(1), embeddings(2)
    # Differs in its last chunk only.
    near = one.clone()
    near[-100:] += 1.0

    def ask(tensor: torch.Tensor) -> int:
        return cached(engine, [], content=EmbedsPrompt(prompt_embeds=tensor))

    assert ask(one) == 0
    assert ask(one) == HIT
    assert ask(two) == 0
    assert ask(two) == HIT
    # What is alike may be shared; what is not must not be.
    assert ask(near) <= 384
    assert ask(one) == HIT


def test_a_request_for_log_probabilities_of_its_prompt_takes_no_hit(engine: Engine) -> None:
    """What is not computed has none: a hit would leave holes in the answer."""
    tokens = prompt(500, seed=4)
    cold = engine.ask(tokens, prompt_logprobs=True)
    assert (cold.cached, len(cold.prompt_logprobs)) == (0, 499)
    # vLLM's own decision, and against it.
    for uses_caches in (None, True):
        engine.clear_own_cache()
        before = engine.counters()
        again = engine.ask(tokens, prompt_logprobs=True, uses_caches=uses_caches)
        assert "promised_tokens" not in engine.counted_since(before)
        assert (again.cached, again.prompt_logprobs) == (0, cold.prompt_logprobs)
    # What it computed is there for others.
    engine.clear_own_cache()
    assert cached(engine, tokens) == HIT
    engine.expect_baseline()
