"""What is read from vLLM's configuration at start, and refused there when it cannot work."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.adapters.vllm.compat import resolved_hash_tokens
from kvstow.config.load import load_settings
from kvstow.config.settings import Settings, check_chunk
from kvstow.errors import ConfigError
from kvstow.layout.geometry import GroupKind
from kvstow.layout.resume import ResumeRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

STABLE_HASHES = ("sha256", "sha256_cbor")


def read_settings(vllm_config: VllmConfig) -> Settings:
    """Settings from ``kv_connector_extra_config``, the environment and the settings file."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    return load_settings(extra)


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
    """Refuse what cannot work, and set what must be set.

    Raises:
        ConfigError: names the key, the value, and what would be right.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role={transfer.kv_role!r}: a cache reads and writes, use 'kv_both'; to do only one of "
            "them set role='save' or role='load' in kv_connector_extra_config"
        )
    if transfer.kv_load_failure_policy != "recompute":
        # vLLM reads this after it has made the connector. With "fail", a bad disk block would
        # be an error to the client; a cache must only ever cost a recompute.
        logger.info(
            "kvstow: kv_load_failure_policy set from %r to 'recompute'", transfer.kv_load_failure_policy
        )
        transfer.kv_load_failure_policy = "recompute"
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in STABLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} differs from process to process; "
            f"use --prefix-caching-hash-algo {STABLE_HASHES[0]} or {STABLE_HASHES[1]}"
        )
    for group in range(len(kv_cache_config.kv_cache_groups)):
        kind = group_kind(kv_cache_config, group)
        if kind is not GroupKind.PAGED:
            names = kv_cache_config.kv_cache_groups[group].layer_names
            raise ConfigError(_refusal(group, kind, names))
    check_chunk(settings.chunk_tokens, block_tokens_of(kv_cache_config))
    hash_tokens = hash_tokens_of(vllm_config, kv_cache_config)
    if settings.chunk_tokens % hash_tokens:
        raise ConfigError(
            f"chunk_tokens={settings.chunk_tokens} is not a multiple of the {hash_tokens} tokens that one "
            f"prefix-cache hash covers; use {-(-settings.chunk_tokens // hash_tokens) * hash_tokens}"
        )


def _refusal(group: int, kind: GroupKind, names: list[str]) -> str:
    layers = f"{len(names)} layers, first {names[0]}" if names else "no layers"
    if kind is GroupKind.WINDOW:
        return (
            f"KV cache group {group} ({layers}) is a window group, which kvstow does not carry yet; start "
            "vLLM with --disable-hybrid-kv-cache-manager, which keeps such layers as full attention"
        )
    return (
        f"KV cache group {group} ({layers}) is a {kind.value} group, which kvstow does not carry yet; "
        "run this model without the connector"
    )


def block_tokens_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Tokens per block, by group."""
    return tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)


def rules_of(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> tuple[ResumeRule, ...]:
    """What a resume needs, by group, of an engine that `check_engine` accepts: all PAGED."""
    return tuple(
        ResumeRule(group_kind(kv_cache_config, group), block_tokens, chunk_tokens)
        for group, block_tokens in enumerate(block_tokens_of(kv_cache_config))
    )


def hash_tokens_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one of the request's block hashes covers."""
    resolved = resolved_hash_tokens(vllm_config, kv_cache_config)
    return resolved or math.gcd(*block_tokens_of(kv_cache_config))


def group_kind(kv_cache_config: KVCacheConfig, group: int) -> GroupKind:
    """What a resume needs of a group.

    Raises:
        ConfigError: a kind of cache that nothing is known about.
    """
    return _kind_of(kv_cache_config.kv_cache_groups[group].kv_cache_spec, group)


def _kind_of(spec: Any, group: int) -> GroupKind:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {_kind_of(layer, group) for layer in spec.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
    elif isinstance(spec, FullAttentionSpec) and spec.prefix_cacheable:
        return GroupKind.PAGED
    elif isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return GroupKind.WINDOW
    elif isinstance(spec, MambaSpec):
        return GroupKind.STATE
    raise ConfigError(
        f"KV cache group {group} is a {type(spec).__name__}, which kvstow does not know; "
        "run this model without the connector"
    )
