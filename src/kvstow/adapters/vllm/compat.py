"""What differs between the supported versions of vLLM, and the check that this one is supported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core import kv_cache_utils

import vllm
from kvstow.lifecycle.messages import Tier
from vllm import envs

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 30), (0, 33))
"""First and last minor version that the hooks are known for."""


LATER_HOOKS = {"get_external_cache_hit_sources": (0, 32)}
"""Hooks of ours that the first supported version does not call, by the version that does."""


def vllm_version() -> str:
    """The installed version, with its local part (``0.32.0+cpu``)."""
    return str(vllm.__version__)


def minor_version() -> tuple[int, int]:
    """Major and minor; (0, 0) for a version that does not say."""
    parts = vllm_version().split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0


def check_version() -> None:
    """Log one warning if this vLLM is outside the supported range; the hooks may still fit."""
    first, last = SUPPORTED
    minor = minor_version()
    if not first <= minor <= last:
        logger.warning(
            "kvstow: vLLM %s is outside the range %d.%d to %d.%d that kvstow was written for",
            vllm_version(),
            *first,
            *last,
        )


def log_with_vllm() -> None:
    """Send kvstow's log where vLLM's goes, unless the application configured it."""
    ours, theirs = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def block_hashes_are_stable() -> bool:
    """Whether block hashes of a stable algorithm start from the seed that all processes share.

    A PYTHONHASHSEED in the environment replaces that seed.
    """
    try:
        return bool(kv_cache_utils.get_none_hash_seed() == kv_cache_utils.DEFAULT_NONE_HASH_SEED)
    except AttributeError:
        # Before these names existed the seed could not be asked for: hash tokens instead.
        return False


AdapterIdentity = Callable[[Any], tuple[str, ...]]
"""From a LoRA request to what the engine's own caches know its adapter by."""


def adapter_identity_of(vllm_config: Any) -> AdapterIdentity:
    """How this engine's caches tell LoRA adapters apart: block hashes, and hashes of images.

    Block hashes have an adapter's path in them since 0.31; the hash of an image that an adapter's
    encoder sees has the name alone (vllm-project/vllm#42125, #44939).
    """
    lora = vllm_config.lora_config
    if minor_version() < (0, 31) or (lora is not None and lora.enable_tower_connector_lora):
        return lambda request: (request.lora_name,)
    return lambda request: (request.lora_name, request.lora_path)


def resolved_hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens per block hash as the engine core resolved them; None where it does not say."""
    for config in (kv_cache_config, vllm_config.cache_config):
        resolved = getattr(config, "hash_block_size", None)
        if resolved:
            return int(resolved)
    return None


def worker_grace_s(executor_backend: object) -> float | None:
    """How long vLLM waits for a worker process that it asked to end before it kills it.

    None where workers share the process of whoever made the engine, and nobody kills them.
    """
    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING and executor_backend == "uni":
        return None
    # Before it could be chosen it was a constant.
    return float(getattr(envs, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", 5))


def on_one_host(parallel: Any) -> bool:
    """Whether all ranks of an engine surely run on this host, as processes of one parent.

    Args:
        parallel: vLLM's ParallelConfig.
    """
    if parallel.distributed_executor_backend not in ("mp", "uni"):
        return False
    # Engines of several hosts came later; before, several hosts took another executor.
    return int(getattr(parallel, "nnodes_within_dp", 1)) == 1


def hit_sources(tokens: Mapping[Tier, int], external: int) -> dict[Any, int]:
    """Where ``external`` promised tokens come from, as vLLM counts it; its hook came with 0.32.

    Args:
        tokens: by kvstow's tier, as far as that is known.
        external: tokens promised.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if sum(tokens.values()) != external:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: external} if external else {}
    sources = {Tier.ARENA: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}
    return {sources[tier]: count for tier, count in tokens.items() if count}


NULL_BLOCK = 0
"""The block that stands where a table keeps nothing: the first that vLLM's pool gives out."""


def boundary_states(scheduler_output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """By request: (group, block, tokens) of recurrent states that are whole after this step's forward.

    Before they were offered there was no way to know them: nothing is kept then.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return getattr(state, "boundary_state_offloads", None) or {}


def block_tables(scheduler_output: Any, kv_cache_manager: Any) -> Callable[[str], Any]:
    """Gives a request's block ids by group, as they are now."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    if state is not None:
        return state.resolve_block_ids  # type: ignore[no-any-return]
    return kv_cache_manager.get_block_ids  # type: ignore[no-any-return]
