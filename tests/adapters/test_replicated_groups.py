"""Which groups are kept once for all ranks: those with the same bytes on each, if all are on one host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from kvstow.adapters.vllm.compat import on_one_host
from kvstow.adapters.vllm.setup import replicated_groups

LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)


def parallel(**changes: Any) -> SimpleNamespace:
    options = {
        "world_size": 2,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "nnodes_within_dp": 1,
    }
    return SimpleNamespace(**{**options, **changes})


def found(config: SimpleNamespace, *specs: Any) -> frozenset[int]:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return replicated_groups(
        SimpleNamespace(parallel_config=config),  # type: ignore[arg-type]
        SimpleNamespace(kv_cache_groups=groups),  # type: ignore[arg-type]
    )


def test_latents_are_the_same_on_every_rank_of_a_tensor_parallel_engine() -> None:
    assert found(parallel(), LATENT, FULL) == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 1, "tensor_parallel_size": 1},
        {"world_size": 4},  # pipeline parallel too: ranks have other layers
        {"decode_context_parallel_size": 2},  # ranks have other tokens
        {"nnodes_within_dp": 2},
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": "external_launcher"},
        {"distributed_executor_backend": object},
    ],
    ids=str,
)
def test_nothing_is_kept_once_where_ranks_differ_or_may_be_elsewhere(changes: dict[str, Any]) -> None:
    assert found(parallel(**changes), LATENT) == frozenset()


def test_a_version_without_several_hosts_is_on_one() -> None:
    config = parallel()
    del config.nnodes_within_dp
    assert on_one_host(config)
