"""An adapter that takes another's place: vLLM's own cache may take its prompts for the other's.

Until 0.30 it knows an adapter by its name, later by its name and path (vllm-project/vllm#42125). An
answer that begins from such a block is wrong, and vLLM's affair; it must not outlive that cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import BLOCK, Engine, prompt, running
from lora_adapters import LORA, make_adapter
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HIT = 448


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with running(llama, **LORA) as engine:
        yield engine


def expect_right(engine: Engine, tokens: list[int], lora: LoRARequest) -> None:
    """What kvstow brings, if anything, is what the adapter computes when nothing is reused."""
    engine.clear_own_cache()
    cold = engine.ask(tokens, lora=lora, uses_caches=False)
    computed = engine.kv_bytes(cold.blocks)[: HIT // BLOCK]
    engine.clear_own_cache()
    again = engine.ask(tokens, lora=lora)
    held = engine.kv_bytes(again.blocks)[: HIT // BLOCK]
    engine.clear_own_cache()
    assert (cold.cached, again.tokens) == (0, cold.tokens)
    assert held == computed


def test_new_files_in_the_same_folder(engine: Engine, tmp_path: Path) -> None:
    tokens = prompt(500, seed=1)
    folder = make_adapter(tmp_path / "adapter", seed=1)
    lora = LoRARequest("same folder", 1, str(folder), load_inplace=True)
    engine.ask(tokens, lora=lora)
    make_adapter(folder, seed=2)
    engine.ask(tokens, lora=lora)
    expect_right(engine, tokens, lora)


def test_another_folder_under_the_same_name_and_number(engine: Engine, tmp_path: Path) -> None:
    """What vLLM's server makes of a name that is loaded once more, in place."""
    tokens = prompt(500, seed=2)
    old = LoRARequest("same number", 2, str(make_adapter(tmp_path / "old", seed=1)))
    new = LoRARequest("same number", 2, str(make_adapter(tmp_path / "new", seed=2)), load_inplace=True)
    engine.ask(tokens, lora=old)
    engine.ask(tokens, lora=new)
    expect_right(engine, tokens, new)


def test_another_folder_under_the_same_name(engine: Engine, tmp_path: Path) -> None:
    tokens = prompt(500, seed=3)
    old = LoRARequest("same name", 3, str(make_adapter(tmp_path / "old", seed=1)))
    new = LoRARequest("same name", 4, str(make_adapter(tmp_path / "new", seed=2)))
    engine.ask(tokens, lora=old)
    engine.ask(tokens, lora=new)
    expect_right(engine, tokens, new)
    expect_right(engine, tokens, old)
