"""Scales of a quantised KV cache that lie outside of the registered tensors.

A block that is brought back with the scales of whoever had it before is wrong, and nothing says so.
Every layer with a KV cache is looked up in vLLM's forward context, and asked in this order:

1. It has ``get_kv_transfer_scales(kv_cache)``. It is called once, with the tensor that vLLM
   registered for the layer, and gives all that must travel with a block: a mapping from names to
   tensors, or a pair (scales of K, scales of V), where None stands for none. The first axis of each
   tensor counts blocks. It is believed, whatever the layer's dtype; an empty mapping says that
   nothing travels. The tensors stay where they are as long as the engine lives.
2. Else, if its cache is quantised, the attributes of the layer and of its ``impl`` are searched. A
   cache is quantised if vLLM says so (``kv_quant_mode``) or its elements have one byte; a recurrent
   state is not. An attribute counts if it is a tensor, or a mapping or sequence of tensors, with
   "scale" in its name and none of the words (between underscores) that name other things: `_OTHERS`,
   such as ``q`` or ``softmax``. Modules below the layer are not searched: their scales are of weights.

What a quantised layer keeps is then one of these:

- one element, or a number: a scale of the whole layer. It is constant. If its name is of K or V it goes
  into the namespace of the rank (not into what ranks agree on: pipeline stages have other layers).
- the first axis counts blocks, or a whole number of parts of each: it becomes segments of the
  layer's group, named ``layer/attribute``.
- it lies within the layer's blocks in the registered tensor: it travels with them already.
- anything else refuses the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvstow.adapters.vllm.setup import layer_spec
from kvstow.errors import LayoutError
from kvstow.keys.digest import digest
from kvstow.keys.namespace import canonical_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HOOK = "get_kv_transfer_scales"
"""The method that a layer may have, to say what travels with its blocks."""

_PAIR = ("k_scale", "v_scale")
_KEYS_OR_VALUES = frozenset({"k", "v", "kv", "key", "value", "cache"})
# fmt: off
_OTHERS = frozenset({
    "w", "weight", "weights", "q", "query", "p", "prob", "o", "out", "output", "input", "softmax", "sm",
    "bmm1", "bmm2", "logit", "logits", "rope",
})
# fmt: on


class Scales(msgspec.Struct, frozen=True):
    """What one rank keeps beside its registered tensors.

    Attributes:
        carried: by group, tensors with blocks on their first axis, by ``layer/attribute``.
        constant: scales of whole layers by ``layer/attribute``, exact (``float.hex``).
    """

    carried: tuple[Mapping[str, Any], ...]
    constant: Mapping[str, str]

    def into(self, layout_digest: bytes) -> bytes:
        """A digest of the layout and of the constant scales; that of the layout, if there are none."""
        if not self.constant:
            return layout_digest
        return digest(b"kvstow.vllm.scales.v1", layout_digest, canonical_json(self.constant, "scales"))


def find_scales(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> Scales:
    """Everything of that sort that this rank's layers have.

    Args:
        vllm_config: has the layers by name.
        kv_cache_config: the engine's groups.
        kv_caches: registered tensors, by layer.

    Raises:
        LayoutError: scales that cannot travel; names the layer, the attribute and its shape.
    """
    modules = vllm_config.compilation_config.static_forward_context
    carried: list[dict[str, torch.Tensor]] = []
    constant: dict[str, str] = {}
    for group in kv_cache_config.kv_cache_groups:
        found: dict[str, torch.Tensor] = {}
        for layer in group.layer_names:
            cache = kv_caches.get(layer)
            module = modules.get(layer)
            if module is None or not isinstance(cache, torch.Tensor):
                # Refused where the layout is made, with more to tell.
                continue
            asked = _Layer(layer, module, cache, kv_cache_config.num_blocks)
            spec = layer_spec(group.kv_cache_spec, layer)
            if hasattr(module, HOOK):
                found |= asked.reported()
            elif _is_quantised(spec, cache):
                found |= asked.kept()
            if _is_quantised(spec, cache):
                constant |= asked.constant()
        carried.append(found)
    return Scales(tuple(carried), constant)


class _Layer:
    """One layer and what it says."""

    def __init__(self, name: str, module: Any, cache: torch.Tensor, num_blocks: int) -> None:
        self._name = name
        self._module = module
        self._cache = cache
        self._num_blocks = num_blocks

    def reported(self) -> dict[str, torch.Tensor]:
        """What its hook gives."""
        report = getattr(self._module, HOOK)(self._cache)
        if report is None:
            report = {}
        elif isinstance(report, Sequence) and len(report) == len(_PAIR):
            report = dict(zip(_PAIR, report, strict=True))
        if not isinstance(report, Mapping):
            raise LayoutError(
                f"layer {self._name}: {HOOK} gave a {type(report).__name__}; it must give a mapping from "
                "names to tensors, or a pair of tensors for K and V"
            )
        found = {}
        for name, scale in report.items():
            if scale is None:
                continue
            if not isinstance(scale, torch.Tensor):
                raise LayoutError(
                    f"layer {self._name}: {HOOK} gave a {type(scale).__name__} as {name}; give a tensor"
                )
            if not self._counts_blocks(scale):
                raise self._refusal(str(name), scale, f"and {HOOK} must give them block first")
            found[f"{self._name}/{name}"] = scale
        return found

    def kept(self) -> dict[str, torch.Tensor]:
        """Its attributes that hold scales of blocks."""
        found = {}
        for name, scale in self._attributes():
            if scale.numel() <= 1 or self._lies_inside(scale):
                continue
            if not self._counts_blocks(scale):
                raise self._refusal(
                    name, scale, f"keep them block first, or give them so from {HOOK}(kv_cache)"
                )
            found[f"{self._name}/{name}"] = scale
        return found

    def constant(self) -> dict[str, str]:
        """Scales of K and V with one element."""
        return {
            f"{self._name}/{name}": float(scale.item()).hex()
            for name, scale in self._attributes()
            if scale.numel() == 1 and _KEYS_OR_VALUES.intersection(_words(name))
        }

    def _attributes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors whose names say that they are scales, and of nothing else."""
        for holder in (self._module, getattr(self._module, "impl", None)):
            if holder is None:
                continue
            attributes = dict(getattr(holder, "__dict__", {}))
            # Where torch keeps those that are registered.
            for registered in ("_buffers", "_parameters"):
                attributes |= attributes.get(registered) or {}
            for name, value in attributes.items():
                if "scale" in name.lower() and not _OTHERS.intersection(_words(name)):
                    yield from _tensors(name, value)

    def _counts_blocks(self, scale: torch.Tensor) -> bool:
        return bool(scale.dim() and scale.shape[0] and scale.shape[0] % self._num_blocks == 0)

    def _lies_inside(self, scale: torch.Tensor) -> bool:
        """Whether a block of ``scale`` is a part of the run of bytes that is the layer's block."""
        cache = self._cache
        if scale.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
            return False
        if not (self._counts_blocks(scale) and self._counts_blocks(cache)):
            return False
        inner, outer = (tensor.unflatten(0, (self._num_blocks, -1)) for tensor in (scale, cache))
        starts, stops = zip(*map(_extent, (inner[0], outer[0])), strict=True)
        strides = [tensor.stride(0) * tensor.element_size() for tensor in (inner, outer)]
        has_gaps = stops[1] - starts[1] != outer[0].numel() * outer.element_size()
        return strides[0] == strides[1] and not has_gaps and starts[0] >= starts[1] and stops[0] <= stops[1]

    def _refusal(self, name: str, scale: torch.Tensor, remedy: str) -> LayoutError:
        return LayoutError(
            f"layer {self._name}: {name} (shape {tuple(scale.shape)}, {scale.dtype}) holds scales of its KV "
            f"cache (shape {tuple(self._cache.shape)}, {self._cache.dtype}), and its first axis does not "
            f"count the {self._num_blocks} blocks, so it cannot travel with them; {remedy}"
        )


def _is_quantised(spec: Any, cache: torch.Tensor) -> bool:
    if isinstance(spec, MambaSpec):
        # Its elements may have one byte because the tensor packs states of any dtype.
        return False
    return bool(getattr(spec, "kv_quant_mode", 0)) or cache.element_size() == 1


def _words(name: str) -> list[str]:
    return re.split(r"[_/]+", name.lower())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, float):
        # vLLM keeps its scales of whole layers so too, for kernels that want them on the host.
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, list | tuple):
        parts = iter(enumerate(value))
    for key, part in parts:
        if isinstance(part, torch.Tensor):
            yield f"{name}/{key}", part


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and of the first behind it; strides are not negative in torch."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
