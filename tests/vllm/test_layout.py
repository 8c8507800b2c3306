"""Where the blocks lie in the tensors that a real engine registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
import torch
from inprocess import BLOCK, CHUNK, Engine, prompt, running

from kvstow.adapters.vllm.caches import engine_layout

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS = 12
BLOCKS = 60
PAGE_BYTES = 2 * 2 * BLOCK * 32 * 4
"""K and V, two heads, a block's tokens, 32 floats."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tiny.make_llama(tmp_path_factory.mktemp("deep"), layers=LAYERS)) as engine:
        yield engine


def registered(engine: Engine) -> dict[str, torch.Tensor]:
    """The tensors by layer, put in the order in which names sort: not the order of the layers."""
    names = sorted(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))
    context = engine.core.vllm_config.compilation_config.static_forward_context
    return {name: context[name].kv_cache for name in names}


def test_segments_are_the_pages_in_numeric_order(engine: Engine) -> None:
    layout, regions = engine_layout(engine.scheduler.kv_cache_config, registered(engine), CHUNK)
    (group,) = layout.groups
    assert [segment.name for segment in group.segments] == [
        f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)
    ]
    assert (group.block_tokens, group.num_blocks, len(regions)) == (BLOCK, BLOCKS, 1)
    assert {segment.block_bytes for segment in group.segments} == {PAGE_BYTES}
    assert layout.payload_bytes(group.group) == CHUNK // BLOCK * LAYERS * PAGE_BYTES


def test_a_page_is_at_offset_plus_block_times_stride(engine: Engine) -> None:
    """Write through the registered views, read at the addresses of the segments."""
    caches = registered(engine)
    layout, regions = engine_layout(engine.scheduler.kv_cache_config, caches, CHUNK)
    (group,) = layout.groups
    for layer, segment in enumerate(group.segments):
        view = caches[segment.name]
        for block in (0, 1, BLOCKS // 2, BLOCKS - 1):
            view[block] = torch.randn(view[block].shape, generator=torch.Generator().manual_seed(layer))
            start = segment.offset_bytes + block * segment.block_stride_bytes
            page = regions[segment.region][start : start + segment.block_bytes]
            assert start + regions[segment.region].data_ptr() == view[block].data_ptr()
            assert page.numpy().tobytes() == view[block].contiguous().view(torch.uint8).numpy().tobytes()


def test_every_byte_of_the_memory_is_in_exactly_one_page(engine: Engine) -> None:
    layout, regions = engine_layout(engine.scheduler.kv_cache_config, registered(engine), CHUNK)
    (group,) = layout.groups
    touched = torch.zeros(regions[0].numel(), dtype=torch.uint8)
    for segment in group.segments:
        for block in range(group.num_blocks):
            start = segment.offset_bytes + block * segment.block_stride_bytes
            touched[start : start + segment.block_bytes] += 1
    assert touched.unique().tolist() == [1]


def test_every_layer_comes_back_to_its_own_place(engine: Engine) -> None:
    tokens = prompt(500, seed=1)
    first = engine.ask(tokens)
    held = engine.kv_bytes(first.blocks)[: 448 // BLOCK]
    # Layers differ, so one in another's place would be seen.
    assert len({held[0][layer * PAGE_BYTES : (layer + 1) * PAGE_BYTES] for layer in range(LAYERS)}) == LAYERS
    engine.clear_own_cache()
    again = engine.ask(tokens)
    assert again.cached == 448
    assert engine.kv_bytes(again.blocks)[: 448 // BLOCK] == held
    engine.expect_baseline()
