"""Scales that a layer keeps beside the registered tensor travel with its blocks, or the start is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import scaled_model
import torch
from inprocess import BLOCK, Engine, prompt, running, start
from scaled_model import KeepsScales, ReportsScales, layers_of
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.model_executor.layers.attention import attention

from kvstow.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HIT = 448
LENGTH = 500


@pytest.fixture(scope="class", params=[ReportsScales, KeepsScales], ids=["reported", "found"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = scaled_model.make(tmp_path_factory.mktemp("scaled"), request.param)
    # Room for one prompt: the next one evicts it.
    with running(path, num_gpu_blocks_override=34) as engine:
        yield engine


def scales_of(engine: Engine, blocks: Sequence[int]) -> list[torch.Tensor]:
    return [scale[list(blocks)].clone() for layer in layers_of(engine) for scale in layer.scales()]


def noise(engine: Engine) -> None:
    """Other scales in every block, as a stranger's would be."""
    generator = torch.Generator().manual_seed(5)
    for layer in layers_of(engine):
        for scale in layer.scales():
            scale.copy_(torch.rand(scale.shape, generator=generator))


class TestCarried:
    def test_what_the_model_says_depends_on_the_scales(self, engine: Engine) -> None:
        """The oracle of this file: wrong scales alone, on an engine's own hit, are wrong answers."""
        tokens = prompt(LENGTH, seed=1)
        first = engine.ask(tokens, logprobs=True)
        assert [cache.dtype for cache in engine.kv_caches] == [torch.int8] * 3
        again = engine.ask(tokens, logprobs=True)
        assert (again.cached > 0, again.tokens, again.logprobs) == (True, first.tokens, first.logprobs)
        noise(engine)
        wrong = engine.ask(tokens, logprobs=True)
        assert wrong.cached > 0
        assert wrong.logprobs != first.logprobs
        assert wrong.tokens != first.tokens

    def test_scales_come_back_with_their_blocks(self, engine: Engine) -> None:
        tokens = prompt(LENGTH, seed=2)
        cold = engine.ask(tokens, logprobs=True)
        held = engine.kv_bytes(cold.blocks)[: HIT // BLOCK]
        scales = scales_of(engine, cold.blocks[: HIT // BLOCK])
        engine.ask(prompt(900, seed=3))  # evicts it
        engine.clear_own_cache()
        noise(engine)
        again = engine.ask(tokens, logprobs=True)
        assert again.cached == HIT
        assert engine.kv_bytes(again.blocks)[: HIT // BLOCK] == held
        for found, want in zip(scales_of(engine, again.blocks[: HIT // BLOCK]), scales, strict=True):
            assert torch.equal(found, want)
        assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
        engine.expect_baseline()


def test_without_the_report_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = scaled_model.make(tmp_path / "silent", ReportsScales)
    monkeypatch.delattr(ReportsScales, "get_kv_transfer_scales")
    try:
        with pytest.raises(ConfigError) as refused:
            start(path)
    finally:
        ensure_kv_transfer_shutdown()
    said = str(refused.value)
    assert "layer model.layers.0.self_attn.attn: kv_scale (shape (2, 60, 32, 2), torch.float32)" in said
    assert "the 60 blocks" in said
    assert "get_kv_transfer_scales" in said


def test_the_scales_of_whole_layers_are_in_the_namespace(llama: Path, tmp_path: Path) -> None:
    """Frames of an fp8 cache are not found by an engine that would read them with other scales."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has fp8 caches on CPUs with AVX-512 only")
    stow = {"disk_path": str(tmp_path / "disk")}
    tokens = prompt(LENGTH, seed=4)
    hits = []
    for scale in (1.0, 1.0, 2.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "set_default_quant_scales", _scales(scale))
            with running(llama, stow, kv_cache_dtype="fp8") as engine:
                hits.append(engine.ask(tokens).cached)
                engine.settle()
    assert hits == [0, HIT, 0]


def _scales(value: float) -> Callable[..., None]:
    """vLLM's way to give a layer its scales, and another scale of K."""
    set_default = attention.set_default_quant_scales

    def set_all(layer: torch.nn.Module, register_buffer: bool = False) -> None:
        set_default(layer, register_buffer)
        layer._k_scale.fill_(value)
        layer._k_scale_float = value

    return set_all
