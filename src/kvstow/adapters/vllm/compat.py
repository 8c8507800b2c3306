"""What differs between the supported versions of vLLM, and the check that this one is supported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core import kv_cache_utils

import vllm
from vllm import envs

logger = logging.getLogger(__name__)

SUPPORTED = ((0, 30), (0, 33))
"""First and last minor version that the hooks are known for."""


def vllm_version() -> str:
    """The installed version, with its local part (``0.32.0+cpu``)."""
    return str(vllm.__version__)


def check_version() -> None:
    """Log one warning if this vLLM is outside the supported range; the hooks may still fit."""
    first, last = SUPPORTED
    parts = vllm_version().split(".")
    try:
        minor = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        minor = (0, 0)
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


def block_tables(scheduler_output: Any, kv_cache_manager: Any) -> Callable[[str], Any]:
    """Gives a request's block ids by group, as they are now."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    if state is not None:
        return state.resolve_block_ids  # type: ignore[no-any-return]
    return kv_cache_manager.get_block_ids  # type: ignore[no-any-return]
