"""An image and an adapter in one request: each decides the bytes, and both are in the keys.

With adapters of the language model, under both ways in which kvstow names a chunk; and with adapters
that change the image's encoder too, for which vLLM puts the adapter's name before the image's hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from family_check import Seen, together
from inprocess import CHUNK, Engine, prompt, running
from lora_adapters import LORA, Modules, make_adapter
from vision_families import IMAGE, OPTIONS, VISION_END, VISION_START, asked, make_qwen2_vl, picture
from vllm.lora.request import LoRARequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIDE = 112
"""Pixels of a side: 16 tokens."""
HIT = 448

LANGUAGE: Modules = {
    f"model.language_model.layers.{layer}.self_attn.{name}": (128, outputs)
    for layer in range(2)
    for name, outputs in (("q_proj", 128), ("v_proj", 64))
}
ENCODER: Modules = {f"model.visual.blocks.{layer}.attn.qkv": (64, 192) for layer in range(2)}


@dataclass(frozen=True)
class Setting:
    """What an engine is started with.

    Attributes:
        hash_seed: where the engine's block hashes start from; kvstow then hashes tokens itself.
        modules: what an adapter changes.
    """

    modules: Modules
    hash_seed: str | None = None

    @property
    def adapts_encoder(self) -> bool:
        return ENCODER.items() <= self.modules.items()

    @property
    def options(self) -> Mapping[str, Any]:
        return {**OPTIONS, **LORA, "enable_tower_connector_lora": self.adapts_encoder}


ENGINES_HASHES, OWN_HASHES, WITH_ENCODER = (
    Setting(LANGUAGE),
    Setting(LANGUAGE, hash_seed="7"),
    Setting({**LANGUAGE, **ENCODER}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_vl(tmp_path_factory.mktemp("qwen2-vl"))


@pytest.fixture(
    scope="module",
    params=[ENGINES_HASHES, OWN_HASHES, WITH_ENCODER],
    ids=["the engine's hashes", "hashes of our own", "with the encoder"],
)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture(scope="module")
def engine(setting: Setting, model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if setting.hash_seed is not None:
            patch.setenv("PYTHONHASHSEED", setting.hash_seed)
        with running(model, **setting.options) as engine:
            yield engine


class Adapters:
    """Adapters for one engine, which knows them by number.

    Args:
        folder: for their files.
        modules: what they change.
    """

    def __init__(self, folder: Path, modules: Modules) -> None:
        self._folder = folder
        self._modules = modules
        self._numbers = count(1)

    def make(self, name: str, seed: int) -> LoRARequest:
        """One in a folder of its own; ``seed`` decides what it contains."""
        number = next(self._numbers)
        folder = make_adapter(self._folder / str(number), seed, self._modules)
        return LoRARequest(name, number, str(folder))

    def rename(self, adapter: LoRARequest, name: str) -> LoRARequest:
        """The same files under another name."""
        return LoRARequest(name, next(self._numbers), adapter.lora_path)


@pytest.fixture(scope="module")
def adapters(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), setting.modules)


def ask(engine: Engine, content: dict[str, Any], lora: LoRARequest | None = None, **options: Any) -> Seen:
    """One request that the engine has forgotten before and forgets afterwards."""
    before = engine.counters()
    [seen] = together(engine, [content], CHUNK, lora=lora, **options)
    engine.clear_own_cache()
    assert engine.counted_since(before).get("loaded_tokens_arena", 0) == seen.answer.cached
    return seen


def cached(engine: Engine, content: dict[str, Any], lora: LoRARequest | None = None) -> int:
    return ask(engine, content, lora).answer.cached


def about(image: int, seed: int, before: int = 0, length: int = 460) -> dict[str, Any]:
    """``before`` tokens, the image of a seed, and text up to ``length`` tokens."""
    head, tail = prompt(before, seed), prompt(length - before - 18, seed + 500)
    return asked([*head, VISION_START, IMAGE, VISION_END, *tail], [picture(image, SIDE)])


def expect_same(seen: Seen, computed: Seen) -> None:
    assert seen.held == computed.held
    assert (seen.answer.tokens, seen.answer.logprobs) == (computed.answer.tokens, computed.answer.logprobs)


def expect_each_its_own(engine: Engine, content: dict[str, Any], *loras: LoRARequest | None) -> None:
    """The same request with each of ``loras``: cold the first time, and a hit on its own bytes the second."""
    first = [ask(engine, content, lora) for lora in loras]
    assert [seen.answer.cached for seen in first] == [0] * len(loras)
    # The adapters do something, so sharing would have been wrong.
    assert all(one.held != other.held for one in first for other in first if one is not other)
    for lora, computed in zip(loras, first, strict=True):
        again = ask(engine, content, lora)
        assert again.answer.cached == HIT
        expect_same(again, computed)
    engine.expect_baseline()


def test_an_image_with_either_adapter_and_with_none(engine: Engine, adapters: Adapters) -> None:
    one, two = adapters.make("one", seed=1), adapters.make("two", seed=2)
    expect_each_its_own(engine, about(1, seed=10), one, two, None)


def test_an_image_with_adapters_under_one_name(engine: Engine, adapters: Adapters, setting: Setting) -> None:
    """vLLM remembers an image as the first one's encoder saw it (vllm-project/vllm#44939).

    What it says with the second then is wrong, and its own affair; kvstow must not keep it.
    """
    one, two = adapters.make("same", seed=1), adapters.make("same", seed=2)
    content = about(1, seed=20)
    first = ask(engine, content, one)
    assert (first.answer.cached, cached(engine, content, two)) == (0, 0)
    engine.core.reset_encoder_cache()
    second = ask(engine, content, two, uses_caches=False)
    assert first.held != second.held
    for lora, computed in ((two, second), (one, first)):
        engine.core.reset_encoder_cache()
        again = ask(engine, content, lora)
        expect_same(again, computed)
        # With the encoder nobody can tell which saw an image.
        assert setting.adapts_encoder or again.answer.cached == HIT


def test_another_image_shares_the_text_before_it_with_the_same_adapter_only(
    engine: Engine, adapters: Adapters
) -> None:
    one, two = adapters.make("text-one", seed=1), adapters.make("text-two", seed=2)
    assert cached(engine, about(1, seed=30, before=200), one) == 0
    for other in (two, None):
        assert cached(engine, about(2, seed=30, before=200), other) == 0
    assert cached(engine, about(3, seed=30, before=200), one) == 3 * CHUNK
    assert cached(engine, about(1, seed=30, before=200), one) == HIT
    engine.expect_baseline()


def test_a_name_is_part_of_an_adapter(engine: Engine, adapters: Adapters) -> None:
    """Content alone would do, but vLLM's hashes begin with the name, and kvstow's follow."""
    one = adapters.make("before", seed=1)
    assert cached(engine, about(1, seed=40), one) == 0
    renamed = adapters.rename(one, "after")
    assert cached(engine, about(1, seed=40), renamed) == 0
    assert cached(engine, about(1, seed=40), renamed) == HIT


def test_an_adapter_in_another_folder(engine: Engine, adapters: Adapters, setting: Setting) -> None:
    """vLLM's hashes have its path in them; kvstow's own have its content."""
    here, there = adapters.make("moved", seed=1), adapters.make("moved", seed=1)
    computed = ask(engine, about(1, seed=50), here)
    assert computed.answer.cached == 0
    moved = ask(engine, about(1, seed=50), there)
    assert moved.answer.cached == (HIT if setting is OWN_HASHES else 0)
    expect_same(moved, computed)


@pytest.mark.parametrize("setting", [Setting(ENCODER)], indirect=True, ids=["the encoder alone"])
def test_an_adapter_of_the_encoder_alone(engine: Engine, adapters: Adapters) -> None:
    one, two = adapters.make("one", seed=1), adapters.make("two", seed=2)
    expect_each_its_own(engine, about(1, seed=60), one, two, None)
