"""From the tensors that vLLM registers in a worker to a layout and the memory under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvstow.adapters.vllm.setup import group_kind, group_specs, layer_spec, window_tokens_of
from kvstow.errors import LayoutError
from kvstow.keys.digest import digest
from kvstow.layout.discover import TensorView, discover_segments
from kvstow.layout.geometry import Group, GroupId, Layout, RegionId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def engine_layout(
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    chunk_tokens: int,
    scales: Sequence[Mapping[str, torch.Tensor]] = (),
) -> tuple[Layout, list[torch.Tensor]]:
    """Measure every group's segments.

    Args:
        kv_cache_config: the engine's groups.
        kv_caches: registered tensors, by layer.
        chunk_tokens: tokens per chunk.
        scales: by group, what else travels with its blocks, block first (`kvstow.adapters.vllm.scales`).

    Returns:
        The layout, and the regions its segments point into: one flat uint8 tensor over each
        storage, in the order of the region ids.

    Raises:
        LayoutError: a tensor that cannot be carried; names it, its shape and its strides.
    """
    regions = _Regions()
    groups = []
    carried: set[str] = set()
    for index, (spec, tensors) in enumerate(
        zip(kv_cache_config.kv_cache_groups, group_tensors(kv_cache_config, kv_caches, scales), strict=True)
    ):
        views = [
            _view(name, tensor, _page_bytes(spec, name), regions, kv_cache_config)
            for name, tensor in tensors.items()
        ]
        carried.update(spec.layer_names)
        segments = discover_segments(views, kv_cache_config.num_blocks, regions.sizes)
        groups.append(
            Group(
                group=GroupId(index),
                kind=group_kind(kv_cache_config, index),
                block_tokens=spec.kv_cache_spec.block_size,
                num_blocks=kv_cache_config.num_blocks,
                dtype=_element_type(group_specs(kv_cache_config)[index], views),
                segments=segments,
                window_tokens=window_tokens_of(group_specs(kv_cache_config)[index]),
            )
        )
    _check_all_carried(kv_caches, carried)
    return Layout(tuple(groups), chunk_tokens), regions.tensors


def group_tensors(
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    scales: Sequence[Mapping[str, torch.Tensor]] = (),
) -> list[dict[str, torch.Tensor]]:
    """What the engine keeps of each group's blocks: registered tensors by layer, then scales.

    Raises:
        LayoutError: a layer registered nothing.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if name not in kv_caches:
                raise LayoutError(f"layer {name} of KV cache group {index} has no registered tensor")
        registered = {name: kv_caches[name] for name in group.layer_names}
        groups.append(registered | (dict(scales[index]) if scales else {}))
    return groups


def agreed_digest(layout: Layout) -> bytes:
    """What ranks must agree on: groups, kinds and block sizes; pipeline stages differ in layers."""
    parts = [
        f"{group.kind}{group.window_tokens or ''} {group.block_tokens} {group.dtype}".encode()
        for group in layout.groups
    ]
    return digest(b"kvstow.vllm.groups.v1", str(layout.chunk_tokens).encode(), *parts)


def attention_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Names of the attention backends, as loaded: they decide what is inside a block."""
    context = vllm_config.compilation_config.static_forward_context
    names = set()
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            module = context.get(layer)
            if module is None:
                raise LayoutError(f"layer {layer} has a KV cache and is not in the engine's forward context")
            names.add(module.get_attn_backend().get_name())
    return " ".join(sorted(names))


class _Regions:
    """The distinct storages under the registered tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._ids: dict[int, RegionId] = {}

    @property
    def sizes(self) -> list[int]:
        return [tensor.numel() for tensor in self.tensors]

    def add(self, tensor: torch.Tensor) -> tuple[RegionId, int]:
        """The region of ``tensor``, and where in it its first element lies, in bytes."""
        storage = tensor.untyped_storage()
        region = self._ids.get(storage.data_ptr())
        if region is None:
            region = RegionId(len(self.tensors))
            self._ids[storage.data_ptr()] = region
            self.tensors.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return region, tensor.data_ptr() - storage.data_ptr()


def _view(
    name: str, tensor: Any, page_bytes: int | None, regions: _Regions, kv_cache_config: KVCacheConfig
) -> TensorView:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"layer {name} registers a {type(tensor).__name__}, and kvstow carries tensors; "
            "run without the connector"
        )
    region, offset = regions.add(tensor)
    # vLLM puts the block axis first where a backend does not keep K and V regions apart.
    is_first = tensor.shape[0] % kv_cache_config.num_blocks == 0
    return TensorView(
        name=name,
        region=region,
        offset_bytes=offset,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_axis=0 if is_first else None,
        page_bytes=page_bytes,
    )


def _element_type(spec: Any, views: Sequence[TensorView]) -> str:
    """Of a group, by name; on every rank the same."""
    if isinstance(spec, MambaSpec):
        # Registered as bytes, in which the parts of a state lie one behind the other: half of one type is as
        # long as half of another.
        return " ".join(
            f"{dtype}{list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
    # A pipeline stage may have no layer of a group.
    return views[0].dtype if views else str(spec.dtype).removeprefix("torch.")


def _page_bytes(group: KVCacheGroupSpec, name: str) -> int | None:
    """Bytes of one block of one layer; a group of unlike layers has a spec for each. None for scales."""
    if name not in group.layer_names:
        return None
    spec = group.kv_cache_spec
    of_layer = layer_spec(spec, name)
    return int(of_layer.page_size_bytes)


def _check_all_carried(kv_caches: dict[str, torch.Tensor], carried: set[str]) -> None:
    """Refuse a registered tensor that no group names, unless it shares memory with one that is."""
    known = {kv_caches[name].data_ptr() for name in carried}
    for name, tensor in kv_caches.items():
        if name not in carried and tensor.data_ptr() not in known:
            raise LayoutError(
                f"layer {name} (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}) has a KV "
                "cache that belongs to no group; kvstow cannot tell which blocks it has"
            )
