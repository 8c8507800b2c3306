"""The layouts that MiniMax-M3 registers at once, in real tensors, there and back.

Shapes and strides are those seen on MiniMax-M3-MXFP4 with an fp8 cache (one rank of four): dense layers
with K and V interleaved, sparse layers with K and V in regions of their own, an index cache for each
sparse layer, and the sparse layers' scales on the layer, where only its hook tells of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvstow.adapters.vllm.blocks import TensorBlocks
from kvstow.adapters.vllm.caches import engine_layout, group_tensors
from kvstow.adapters.vllm.scales import Scales, find_scales
from kvstow.clock import SystemClock
from kvstow.codec.select import make_codec
from kvstow.errors import LayoutError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, Layout
from kvstow.lifecycle.executors import ThreadExecutor
from kvstow.lifecycle.self_test import SelfTest
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.framing import frame_bytes

BLOCKS, TOKENS, DIM = 9, 128, 128
DENSE, SPARSE = (0, 1, 2), (3, 4, 10)
NAMESPACE = NamespaceDigest(b"m" * 32)


class SparseLayer:
    """Keeps one scale of K and one of V for each token: [K or V, blocks, heads, tokens]."""

    def __init__(self) -> None:
        self.kv_scale = torch.ones(2, BLOCKS, 1, TOKENS)
        self.impl = SimpleNamespace(scale=0.1)


class ReportingLayer(SparseLayer):
    def get_kv_transfer_scales(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_scale[0], self.kv_scale[1]


class Model:
    """What vLLM would register, in no order, and its configuration."""

    def __init__(self, sparse_layer: type[SparseLayer] = ReportingLayer) -> None:
        pair = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=DIM, dtype=torch.uint8)
        index = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=DIM, dtype=torch.float8_e4m3fn)
        self.caches: dict[str, torch.Tensor] = {}
        self.layers: dict[str, Any] = {}
        specs = {}
        for number in reversed((*DENSE, *SPARSE)):
            name = f"model.layers.{number}.self_attn.attn"
            specs[name] = pair
            self.layers[name] = (
                sparse_layer() if number in SPARSE else SimpleNamespace(_k_scale=torch.ones(()))
            )
            if number in DENSE:
                self.caches[name] = torch.zeros((BLOCKS, 1, TOKENS, 2 * DIM), dtype=torch.uint8)
                continue
            region = BLOCKS * TOKENS * DIM
            self.caches[name] = torch.zeros(2 * region, dtype=torch.uint8).as_strided(
                (BLOCKS, 2, TOKENS, 1, DIM), (TOKENS * DIM, region, DIM, DIM, 1)
            )
            specs[f"{name}.index_cache"] = index
            self.layers[f"{name}.index_cache"] = SimpleNamespace()
            self.caches[f"{name}.index_cache"] = torch.zeros((BLOCKS, TOKENS, DIM), dtype=torch.float8_e4m3fn)
        spec = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
        self.config = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=[SimpleNamespace(layer_names=list(specs), kv_cache_spec=spec)],
        )

    def scales(self) -> Scales:
        context = SimpleNamespace(static_forward_context=self.layers)
        return find_scales(SimpleNamespace(compilation_config=context), self.config, self.caches)

    def layout(self) -> tuple[Layout, list[torch.Tensor]]:
        return engine_layout(self.config, self.caches, 2 * TOKENS, self.scales().carried)


def test_every_tensor_becomes_its_runs_with_its_layer() -> None:
    layout, _ = Model().layout()
    half, line = TOKENS * DIM, 4 * TOKENS
    told = [(part.name.split("layers.")[1], part.block_bytes) for part in layout.groups[0].segments]
    dense = [(f"{number}.self_attn.attn", 2 * half) for number in DENSE]
    sparse = [
        (f"{number}.self_attn.attn{part}", size)
        for number in SPARSE
        for part, size in (
            ("/0", half),
            ("/1", half),
            (".index_cache", half),
            ("/k_scale", line),
            ("/v_scale", line),
        )
    ]
    assert told == dense + sparse
    assert {part.inner.split("[")[0] for part in layout.groups[0].segments} == {
        "uint8:1",
        "float8_e4m3fn:1",
        "float32:4",
    }


def test_a_sparse_layer_that_cannot_report_its_scales_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layers\.10\.self_attn\.attn: kv_scale \(shape \(2, 9, 1, 128\)"):
        Model(SparseLayer).layout()


@pytest.mark.parametrize("prefer", ["native", "torch", "reference"])
def test_they_come_back_as_they_were(prefer: str) -> None:
    model = Model()
    layout, regions = model.layout()
    frames = [frame_bytes(layout.payload_bytes(GroupId(0)))]
    arena, clock = Arena((1,), frames, 1), SystemClock()
    executors = Executors(*(ThreadExecutor(f"minimax-{kind}", 1, 8) for kind in "slrw"))
    codec = make_codec(layout.groups[0], regions, prefer=prefer)
    worker = Worker(
        Rank(0),
        NAMESPACE,
        layout,
        [codec],
        arena,
        None,
        WorkerLimits(load_timeout_s=10.0, save_timeout_s=10.0, shutdown_s_max=1.0, load_parts=1),
        executors,
        clock,
        Recorder(),
    )
    tensors = group_tensors(model.config, model.caches, model.scales().carried)
    blocks = TensorBlocks(tensors, regions, BLOCKS)
    try:
        tested = SelfTest(worker, layout, blocks, arena, executors.writer, [codec.name], clock).run(
            with_disk=False
        )
    finally:
        worker.shutdown()
        arena.close()
    assert tested.payload_bytes == 2 * (3 * 2 * TOKENS * DIM + 3 * (3 * TOKENS * DIM + 2 * 4 * TOKENS))
    assert all(
        bool((layer.kv_scale == 1).all()) for layer in model.layers.values() if hasattr(layer, "kv_scale")
    )
