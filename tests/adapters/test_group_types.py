"""What the ranks agree on of a group, where the registered tensors do not say it."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvstow.adapters.vllm.caches import agreed_digest, engine_layout
from kvstow.layout.fingerprint import layout_digest
from kvstow.layout.geometry import Layout

BLOCKS = 8
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def layout_of(caches: dict[str, torch.Tensor], *groups: KVCacheGroupSpec) -> Layout:
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=list(groups))
    return engine_layout(config, caches, 16)[0]


def test_states_of_one_size_and_two_types_are_not_the_same() -> None:
    def digests(dtype: torch.dtype, *shapes: tuple[int, int]) -> tuple[bytes, bytes]:
        spec = MambaSpec(
            block_size=16, shapes=shapes, dtypes=(dtype,) * len(shapes), mamba_cache_mode="align"
        )
        # As vLLM registers it: bytes.
        caches = {"layers.0": torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)}
        layout = layout_of(caches, KVCacheGroupSpec(["layers.0"], spec))
        return agreed_digest(layout), layout_digest(layout)

    kinds = [
        digests(torch.bfloat16, (3, 8), (4, 4)),
        digests(torch.float16, (3, 8), (4, 4)),
        digests(torch.bfloat16, (8, 3), (4, 4)),
    ]
    assert len({agreed for agreed, _ in kinds}) == len({own for _, own in kinds}) == len(kinds)


def test_a_stage_without_a_layer_of_a_group_agrees_with_one_that_has_some() -> None:
    cache = torch.zeros(BLOCKS, 2, 16, 8)
    first, second = KVCacheGroupSpec(["layers.0"], ATTENTION), KVCacheGroupSpec(["layers.1"], ATTENTION)
    none = KVCacheGroupSpec([], ATTENTION)
    here, there = layout_of({"layers.0": cache}, first, none), layout_of({"layers.1": cache}, none, second)
    assert here.groups[1].segments == ()
    assert agreed_digest(here) == agreed_digest(there)
