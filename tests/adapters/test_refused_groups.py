"""Groups whose bytes follow from more than the tokens before them are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.adapters.vllm.setup import rules_of
from kvstow.errors import ConfigError

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
CAUSAL = FullAttentionSpec(**SIZES)
PREFIX_LM = FullAttentionSpec(**SIZES, non_causal=True)


@pytest.mark.parametrize(
    "spec",
    [
        CrossAttentionSpec(**SIZES),
        # What it says is kept in a window, so an answer's tokens have other keys than a prompt's.
        RSWASpec(**SIZES, rswa_window=32),
        PREFIX_LM,
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer.0": CAUSAL, "layer.1": PREFIX_LM}),
    ],
    ids=["looks at another sequence", "answers in a window", "looks ahead", "one layer looks ahead"],
)
def test_what_no_other_prompt_may_use_is_refused(spec: Any) -> None:
    groups = [KVCacheGroupSpec(["layer.0"], CAUSAL), KVCacheGroupSpec(["layer.1"], spec)]
    with pytest.raises(ConfigError, match="KV cache group 1 is a "):
        rules_of(SimpleNamespace(kv_cache_groups=groups), chunk_tokens=64)  # type: ignore[arg-type]
