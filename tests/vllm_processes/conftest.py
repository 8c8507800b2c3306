"""Real engines and servers in processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The tiny models are made by the same code as for the engines inside the tests' own process.
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm"))

import tiny
from vllm_children import HERE, Engine, Launcher, environment, start_forkserver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts a real process and takes its time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def forkserver() -> None:
    """The process that engines are forked from: vLLM is imported once, not for each of them."""
    environ = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONPATH=str(HERE), VLLM_LOGGING_LEVEL="INFO")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environ.keys():
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        start_forkserver()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, with a tokenizer of one word for each token."""
    return _with_tokenizer(tiny.make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return _with_tokenizer(tiny.make_llama(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture
def launcher(tmp_path: Path, forkserver: None) -> Iterator[Launcher]:
    """Starts engines and servers; whatever is left at the end of a test is killed."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory, llama: Path, forkserver: None) -> Iterator[Engine]:
    """An engine on `llama` without kvstow: what it says is right."""
    launcher = Launcher(tmp_path_factory.mktemp("oracle"))
    yield launcher.fork(llama)
    launcher.close()


def _with_tokenizer(model: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{token}": token for token in range(tiny.VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", bos_token="w1").save_pretrained(model)
    return model
