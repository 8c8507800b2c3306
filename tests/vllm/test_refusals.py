"""What cannot work is refused at start, with the key, its value, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from inprocess import ask_twice, prompt, running, start
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from kvstow.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def refusal(model: Path, stow: dict[str, Any] | None = None, **options: Any) -> str:
    """Start an engine that must not start; what it says."""
    try:
        with pytest.raises(ConfigError) as refused:
            start(model, stow, **options)
    finally:
        ensure_kv_transfer_shutdown()
    return str(refused.value)


@pytest.mark.parametrize(
    ("stow", "options", "named"),
    [
        ({"chunk_token": 64}, {}, ["chunk_token", "kv_connector_extra_config", "chunk_tokens"]),
        ({"chunk_tokens": 100}, {}, ["chunk_tokens=100", "block_tokens=32", "96 or 128"]),
        ({"chunk_tokens": "64"}, {}, ["chunk_tokens='64'", "a whole number"]),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, ["prefix_caching_hash_algo='xxhash'", "sha256"]),
        ({}, {"transfer": {"kv_role": "kv_producer"}}, ["kv_role='kv_producer'", "'kv_both'", "role='save'"]),
        ({"arena_gib": 0.0001}, {}, ["arena", "107374 bytes", "512000 or more"]),
        ({}, {"load_format": "dummy"}, ["load_format='dummy'", "weights_digest"]),
    ],
    ids=["unknown key", "chunk", "type", "hash", "role", "arena", "dummy weights"],
)
def test_bad_settings(llama: Path, stow: dict[str, Any], options: dict[str, Any], named: list[str]) -> None:
    said = refusal(llama, stow, **options)
    assert not [part for part in named if part not in said], said


def test_windows_as_full_attention_work_too(tmp_path: Path) -> None:
    with running(
        tiny.make_gemma(tmp_path / "gemma"),
        num_gpu_blocks_override=300,
        disable_hybrid_kv_cache_manager=True,
    ) as engine:
        assert ask_twice(engine, seed=1) == 448
        engine.expect_baseline()


def test_dummy_weights_with_a_digest_are_served(llama: Path) -> None:
    with running(llama, {"weights_digest": "first try"}, load_format="dummy") as engine:
        tokens = prompt(200, seed=2)
        engine.ask(tokens)
        engine.clear_own_cache()
        assert engine.ask(tokens).cached == 192
        engine.expect_baseline()
