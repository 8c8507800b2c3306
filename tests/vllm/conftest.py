"""Real engines in this process: what vLLM reads from the environment when it is imported."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    # A request's name is its id, so that an id can be used twice.
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
    # Two OpenMP threads wait for each other on a busy machine far longer than one computes.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model."""
    return tiny.make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with latent attention."""
    return tiny.make_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVSTOW_* variable of whoever runs the tests must not decide them."""
    for name in [name for name in os.environ if name.startswith("KVSTOW_")]:
        monkeypatch.delenv(name)
