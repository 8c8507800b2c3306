"""Options of the engine that are in no model's configuration, and change the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import COMMON, saved
from inprocess import Answer, prompt, running
from transformers import Phi3Config, Phi3ForCausalLM

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def make_phi3(folder: Path) -> Path:
    """Two sets of rotary factors; ``max_model_len`` chooses."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 1024,
    }
    config = Phi3Config(
        **COMMON | {"hidden_size": 128},
        intermediate_size=128,
        num_hidden_layers=2,
        original_max_position_embeddings=1024,
        rope_parameters=rope,
    )
    return saved(Phi3ForCausalLM, config, folder)


def test_the_other_rope_is_a_miss(tmp_path: Path) -> None:
    model = make_phi3(tmp_path / "model")
    stow = {"disk_path": str(tmp_path / "disk")}

    def ask(max_model_len: int) -> Answer:
        with running(model, stow, max_model_len=max_model_len, num_gpu_blocks_override=100) as engine:
            answer = engine.ask(prompt(500, seed=1), logprobs=True)
            engine.expect_baseline()
            return answer

    short, long = ask(1024), ask(2048)
    assert (short.cached, long.cached) == (0, 0)
    assert short.logprobs != long.logprobs
    assert (ask(1024).cached, ask(2048).cached) == (448, 448)
