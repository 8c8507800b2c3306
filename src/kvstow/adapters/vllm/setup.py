"""What is read from vLLM's configuration at start, and refused there when it cannot work."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow.adapters.vllm.compat import on_one_host, resolved_hash_tokens
from kvstow.config.load import load_settings
from kvstow.config.settings import Settings, check_chunk, choose_chunk
from kvstow.errors import ConfigError
from kvstow.layout.geometry import GroupKind
from kvstow.layout.resume import ResumeRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

STABLE_HASHES = ("sha256", "sha256_cbor")


def read_settings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Settings:
    """Settings from ``kv_connector_extra_config``, the environment and the settings file.

    What they leave to the engine's layout is filled in.
    """
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config or {}) if transfer is not None else {}
    return choose_chunk(
        load_settings(extra),
        [*block_tokens_of(kv_cache_config), hash_tokens_of(vllm_config, kv_cache_config)],
        keeps_images=bool(state_groups(kv_cache_config)),
    )


def check_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model whose prefixes no other prompt may use.

    Raises:
        ConfigError: names the group, or the pooling.
    """
    for group in range(len(kv_cache_config.kv_cache_groups)):
        group_kind(kv_cache_config, group)
    model = vllm_config.model_config
    pooler = model.pooler_config
    if pooler is not None and not model.is_prefix_caching_supported:
        raise ConfigError(
            f"seq_pooling_type={pooler.seq_pooling_type!r}, tok_pooling_type={pooler.tok_pooling_type!r}: "
            "this pooling needs every token of a prompt computed, and a hit leaves most of them out; "
            "run this model without the connector"
        )


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
    parallel = vllm_config.parallel_config
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key) > 1:
            # A block then holds more tokens than its size says, and ranks hold other tokens.
            raise ConfigError(
                f"{key}={getattr(parallel, key)} is not supported; use 1, or run without the connector"
            )
    if transfer.kv_load_failure_policy != "recompute":
        # vLLM reads this after it has made the connector. With "fail", a bad disk block would
        # be an error to the client; a cache must only ever cost a recompute.
        logger.info(
            "kvstow: kv_load_failure_policy set from %r to 'recompute' (below another connector, such as "
            "MultiConnector, set it beside that one: kvstow cannot)",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in STABLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} differs from process to process; "
            f"use --prefix-caching-hash-algo {STABLE_HASHES[0]} or {STABLE_HASHES[1]}"
        )
    media = vllm_config.model_config.multimodal_config
    if media is not None and not (
        media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigError(
            f"mm_processor_cache_gb={media.mm_processor_cache_gb:g} without prefix caching: vLLM "
            "numbers images instead of hashing them, and the next start gives the same numbers to others; "
            "use --mm-processor-cache-gb 1, or --enable-prefix-caching"
        )
    for group in state_groups(kv_cache_config):
        _check_state(group_specs(kv_cache_config)[group], group)
    check_chunk(settings.chunk_tokens, block_tokens_of(kv_cache_config))
    hash_tokens = hash_tokens_of(vllm_config, kv_cache_config)
    if settings.chunk_tokens % hash_tokens:
        raise ConfigError(
            f"chunk_tokens={settings.chunk_tokens} is not a multiple of the {hash_tokens} tokens that one "
            f"prefix-cache hash covers; use {-(-settings.chunk_tokens // hash_tokens) * hash_tokens}"
        )


def _check_state(spec: MambaSpec, group: int) -> None:
    mode = spec.mamba_cache_mode
    if mode != "align":
        raise ConfigError(
            f"KV cache group {group} holds recurrent state and mamba_cache_mode={mode!r} keeps none that a "
            "request can resume from; start vLLM with --enable-prefix-caching --mamba-cache-mode align"
        )


def keep_images(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
    """Have the engine make and keep the states that ``image_interval_tokens`` asks for.

    To be called in the scheduler before it makes its cache.

    Raises:
        ConfigError: the interval is not a whole number of chunks.
    """
    groups = state_groups(kv_cache_config)
    interval, chunk = settings.image_interval_tokens, settings.chunk_tokens
    if not groups:
        return
    if interval % chunk:
        raise ConfigError(
            f"image_interval_tokens={interval} is not a multiple of chunk_tokens={chunk}; "
            f"use {-(-interval // chunk) * chunk}, or 0 for states at the ends of prompts only"
        )
    block_tokens = block_tokens_of(kv_cache_config)[groups[0]]
    if not interval and chunk != block_tokens:
        logger.warning(
            "kvstow: chunk_tokens=%d, and the engine keeps states every %d tokens: those that are not at the "
            "end of a chunk are lost; leave chunk_tokens out, or set image_interval_tokens=%d",
            chunk,
            block_tokens,
            chunk,
        )
    if interval:
        if not kv_cache_config.prefix_cache_retention_interval:
            kv_cache_config.prefix_cache_retention_interval = interval
        # A state exists only where a step's prefill ends. vLLM has a bound on that for one prompt among
        # others; a prompt that is alone takes the whole budget of a step.
        scheduler = vllm_config.scheduler_config
        if not 0 < scheduler.long_prefill_token_threshold <= interval:
            scheduler.long_prefill_token_threshold = interval
        if scheduler.max_num_batched_tokens > interval:
            logger.warning(
                "kvstow: image_interval_tokens=%d, and a step may compute %d tokens of one prompt: states "
                "lie so far apart when a request is alone; use --max-num-batched-tokens %d for more",
                interval,
                scheduler.max_num_batched_tokens,
                interval,
            )
    logger.info(
        "kvstow: groups %s hold recurrent state; kept where prompts end or part%s",
        ", ".join(map(str, groups)),
        f", and every {interval} tokens" if interval else "",
    )


def state_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """The groups that hold recurrent state."""
    specs = group_specs(kv_cache_config)
    return [group for group, spec in enumerate(specs) if isinstance(spec, MambaSpec)]


def replicated_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """The groups of which every rank holds the same bytes: latents, and states that are not split up.

    None where ranks have other layers or other tokens, or may be on other hosts.
    """
    parallel = vllm_config.parallel_config
    if not on_one_host(parallel):
        return frozenset()
    if parallel.world_size != parallel.tensor_parallel_size or parallel.tensor_parallel_size == 1:
        return frozenset()
    if parallel.decode_context_parallel_size > 1:
        return frozenset()
    found = set()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = _layer_specs(group.kv_cache_spec)
        if all(isinstance(one, MLAAttentionSpec) or getattr(one, "tp_replicated", False) for one in specs):
            found.add(index)
    return frozenset(found)


def image_shares(kv_cache_config: KVCacheConfig, settings: Settings) -> tuple[float, ...]:
    """The part of a budget that each group has for itself: only images have."""
    groups = state_groups(kv_cache_config)
    share = settings.image_share / len(groups) if groups else 0.0
    return tuple(share if group in groups else 0.0 for group in range(len(group_specs(kv_cache_config))))


def group_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """One spec for each group: of layers that differ in sizes only, one of theirs."""
    return [_layer_specs(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]


def layer_spec(spec: Any, layer: str) -> Any:
    """The spec of one layer of a group that has ``spec``."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers, or the one that they share."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def block_tokens_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Tokens per block, by group."""
    return tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)


def rules_of(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> tuple[ResumeRule, ...]:
    """What a resume needs, by group."""
    return tuple(
        ResumeRule(group_kind(kv_cache_config, group), block_tokens, chunk_tokens, window_tokens_of(spec))
        for group, (spec, block_tokens) in enumerate(
            zip(group_specs(kv_cache_config), block_tokens_of(kv_cache_config), strict=True)
        )
    )


def window_tokens_of(spec: Any) -> int:
    """Tokens before a boundary that a resume there may look at; 0 for what has no window."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window + spec.extra_retained_tokens)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 0


def hash_tokens_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one of the request's block hashes covers."""
    resolved = resolved_hash_tokens(vllm_config, kv_cache_config)
    return resolved or math.gcd(*block_tokens_of(kv_cache_config))


def recomputes_last(vllm_config: VllmConfig, rules: Sequence[ResumeRule]) -> bool:
    """Whether a draft's layers look one token ahead (EAGLE, MTP), and a hit may end inside a block."""
    drafts = vllm_config.speculative_config
    is_paged = all(rule.kind is GroupKind.PAGED for rule in rules)
    return drafts is not None and drafts.use_eagle() and is_paged


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
    elif getattr(spec, "non_causal", False) or isinstance(spec, RSWASpec):
        # vLLM turns its own prefix cache off for these, and asks a connector all the same.
        raise ConfigError(
            f"KV cache group {group} is a {type(spec).__name__} whose keys and values depend on more than "
            "the tokens before them, so no other prompt may use them; run this model without the connector"
        )
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
