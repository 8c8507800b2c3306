"""Context parallelism is refused by name: its blocks hold other tokens than kvstow counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvstow.adapters.vllm.setup import check_engine
from kvstow.config.settings import Settings
from kvstow.errors import ConfigError


@pytest.mark.parametrize("key", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_ranks_are_refused(key: str) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            hash_block_size=16, prefix_caching_hash_algo="sha256", enable_prefix_caching=True
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(**sizes),
    )
    check_engine(config, groups, Settings(chunk_tokens=256))
    config.parallel_config = SimpleNamespace(**sizes | {key: 2})
    with pytest.raises(ConfigError, match=f"{key}=2"):
        check_engine(config, groups, Settings(chunk_tokens=256))
