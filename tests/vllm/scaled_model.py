"""A model that vLLM does not have: int8 KV, with a scale for every token and head beside the paged tensor.

Llama otherwise. Attention is written out in torch, over the paged tensor and the scales alone, so what
it says depends on both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm import ModelRegistry

LEVELS = 127


class ScaledImpl(CPUAttentionBackendImpl):
    """Keeps [block, head, token, K then V] as int8, and the scales in the layer."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        slots = slot_mapping[: key.shape[0]]
        blocks, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        for part, (new, scales) in enumerate(zip((key, value), layer.scales(), strict=True)):
            largest = new.abs().amax(-1).clamp(min=1e-6)
            scales[blocks, offsets] = largest / LEVELS
            levels = (new / largest[..., None] * LEVELS).round().to(torch.int8)
            dims = slice(part * self.head_size, (part + 1) * self.head_size)
            kv_cache[blocks, :, offsets, dims] = levels

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, last = starts[request], starts[request + 1]
            blocks = attn_metadata.block_table[request, : -(-length // kv_cache.shape[2])].long()
            pages = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
            keys, values = (
                part * scales[blocks].flatten(0, 1)[:length, :, None]
                for part, scales in zip(pages.split(self.head_size, -1), layer.scales(), strict=True)
            )
            # One token at a time: the same sums in the same order, however a prompt was split.
            for row in range(first, last):
                seen = length - (last - 1 - row)
                output[row] = self._attend(query[row], keys[:seen], values[:seen])
        return output

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[heads, dim] for a query of [heads, dim], and keys and values of [tokens, kv heads, dim]."""
        grouped = query.view(self.num_kv_heads, -1, self.head_size)
        weights = torch.einsum("hgd,thd->hgt", grouped, keys).mul(self.scale).softmax(-1)
        return torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)


class ScaledBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[ScaledImpl]:
        return ScaledImpl


class ReportsScales(Attention):
    """Keeps its scales as [K or V, blocks, tokens, heads], and says how they travel."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, attn_backend=ScaledBackend, **options)
        self.kv_cache_torch_dtype = torch.int8

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        blocks, heads, tokens, _ = kv_cache.shape
        self.keep(torch.ones(2, blocks, tokens, heads))

    def keep(self, scales: torch.Tensor) -> None:
        self.kv_scale = scales

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_scale[0], self.kv_scale[1]

    def get_kv_transfer_scales(self, kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"k_scale": self.kv_scale[0], "v_scale": self.kv_scale[1]}


class KeepsScales(ReportsScales):
    """Keeps them as two tensors, blocks first, and says nothing."""

    get_kv_transfer_scales = property()  # type: ignore[assignment]  # hasattr() is False

    def keep(self, scales: torch.Tensor) -> None:
        self.k_scale_cache, self.v_scale_cache = scales.clone().unbind(0)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_scale_cache, self.v_scale_cache


def _model(layer: type[ReportsScales]) -> type[LlamaForCausalLM]:
    class ScaledAttention(LlamaAttention):
        def __init__(self, *args: Any, prefix: str = "", cache_config: Any = None, **options: Any) -> None:
            super().__init__(*args, prefix=prefix, cache_config=cache_config, **options)
            context = get_current_vllm_config().compilation_config.static_forward_context
            del context[f"{prefix}.attn"]
            self.attn = layer(
                self.num_heads,
                self.head_dim,
                self.scaling,
                num_kv_heads=self.num_kv_heads,
                cache_config=cache_config,
                prefix=f"{prefix}.attn",
            )

    class ScaledDecoderLayer(LlamaDecoderLayer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, attn_layer_type=ScaledAttention, **options)

    class ScaledLlama(LlamaForCausalLM):
        # vLLM looks for these two names.
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=ScaledDecoderLayer)

    return ScaledLlama


def make(folder: Path, layer: type[ReportsScales]) -> Path:
    """A model with such layers, known to vLLM in this process."""
    architecture = f"{layer.__name__}ForCausalLM"
    ModelRegistry.register_model(architecture, _model(layer))
    # With larger weights than usual, so that what is far back counts.
    tiny.make_llama(folder, spread=0.2)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layers_of(engine: Any) -> list[ReportsScales]:
    """The engine's attention layers, in order."""
    context = engine.core.vllm_config.compilation_config.static_forward_context
    return [module for module in context.values() if isinstance(module, ReportsScales)]
