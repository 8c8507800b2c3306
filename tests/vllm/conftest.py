"""Real engines in this process: what they read from the environment, and the models they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from gates import Gates, gated

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # A request's name is its id, so that an id can be used twice.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """What an engine reads, for one module at a time: other folders' tests start processes."""
    threads = torch.get_num_threads()
    # Two OpenMP threads wait for each other on a busy machine far longer than one computes.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # vLLM puts a function that refuses in its place.
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        for name in [name for name in os.environ if name.startswith(("KVSTOW_", "VLLM_"))]:
            patch.delenv(name)
        patch.delenv("PYTHONHASHSEED", raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model."""
    return tiny.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with latent attention."""
    return tiny.make_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def gates() -> Iterator[Gates]:
    """Gates that a module's engine is started behind."""
    with gated() as gates:
        yield gates
