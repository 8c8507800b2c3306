"""EAGLE: a draft makes its entry for a token from the token after it, which other prompts have not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from inprocess import Answer, Engine, prompt, running
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHARED = 448


def make_head(folder: Path, model: Path) -> Path:
    """A draft of one layer for ``model``."""
    config = LlamaConfig.from_pretrained(model, num_hidden_layers=1, initializer_range=0.1)
    torch.manual_seed(1)
    state = {
        name.removeprefix("model."): weight.clone()
        for name, weight in LlamaForCausalLM(config).state_dict().items()
        if ".layers." in name and "input_layernorm" not in name
    }
    state["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.1
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def held(engine: Engine, answer: Answer) -> list[bytes]:
    """The bytes of all layers, the draft's too, in the prompt's shared blocks."""
    return [engine.group_bytes(0, block) for block in answer.blocks[: SHARED // engine.block_tokens]]


def test_what_a_draft_knows_of_the_next_token_is_not_taken_over(tmp_path: Path) -> None:
    model = tiny.make_llama(tmp_path / "model", spread=0.3)
    head = {"method": "eagle", "model": str(make_head(tmp_path / "head", model)), "num_speculative_tokens": 2}
    one, two = (prompt(SHARED, seed=1) + prompt(52, seed=seed) for seed in (2, 3))
    with running(model, speculative_config=head) as engine:
        cold = engine.ask(two, max_tokens=20)
        computed = held(engine, cold)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.ask(one, max_tokens=20)
        engine.clear_own_cache()
        hit = engine.ask(two, max_tokens=20)
        assert (hit.cached, hit.tokens) == (SHARED - 1, cold.tokens)
        assert held(engine, hit) == computed
        engine.expect_baseline()
