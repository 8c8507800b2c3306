"""Which of a layer's attributes are scales of its KV cache, and what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec

from kvstow.adapters.vllm.scales import Scales, find_scales
from kvstow.errors import LayoutError

BLOCKS, TOKENS, HEADS, DIM = 6, 16, 2, 8
LAYER = "model.layers.3.self_attn.attn"


def spec(mode: KVQuantMode = KVQuantMode.NONE) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.int8, kv_quant_mode=mode
    )


def cache(dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=dtype)


def find(layer: Any, tensor: torch.Tensor | None = None, kind: Any = None) -> Scales:
    return find_scales(
        SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={LAYER: layer})),
        SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=[SimpleNamespace(layer_names=[LAYER], kv_cache_spec=kind or spec())],
        ),
        {LAYER: cache() if tensor is None else tensor},
    )


def carried(layer: Any, tensor: torch.Tensor | None = None) -> dict[str, tuple[int, ...]]:
    (group,) = find(layer, tensor).carried
    return {name.removeprefix(f"{LAYER}/"): tuple(scale.shape) for name, scale in group.items()}


def layer(**attributes: Any) -> Any:
    """An attention layer as vLLM makes them, with more in it."""
    made = nn.Module()
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        made.register_buffer(name, torch.tensor(1.0))
    made._k_scale_float = made._v_scale_float = made._q_scale_float = 1.0
    made._o_scale_float = None
    made.scale = DIM**-0.5
    made.impl = SimpleNamespace(scale=made.scale, alibi_slopes=None)
    made.proj = nn.Linear(4, 4)
    made.proj.weight_scale = torch.ones(4, 4)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


PER_TOKEN = (BLOCKS, TOKENS, HEADS)


class TestFound:
    def test_an_ordinary_layer_has_none(self) -> None:
        assert carried(layer()) == {}
        assert find(layer(), cache(torch.bfloat16)) == Scales(({},), {})

    @pytest.mark.parametrize("name", ["k_scale", "_v_scales", "kv_scale_cache", "token_scales", "scale"])
    def test_tensors_with_the_block_axis_first(self, name: str) -> None:
        assert carried(layer(**{name: torch.ones(PER_TOKEN)})) == {name: PER_TOKEN}

    def test_in_the_impl_in_buffers_and_in_containers(self) -> None:
        made = layer(k_scales=[torch.ones(PER_TOKEN), torch.ones(PER_TOKEN)])
        made.register_buffer("v_scale_cache", torch.ones(PER_TOKEN), persistent=False)
        made.impl._key_scale = torch.ones(PER_TOKEN)
        made.impl.scales = {"z": torch.ones(PER_TOKEN)}
        assert set(carried(made)) == {"k_scales/0", "k_scales/1", "v_scale_cache", "_key_scale", "scales/z"}

    def test_slots_as_the_first_axis_are_parts_of_blocks(self) -> None:
        slots = (BLOCKS * TOKENS, HEADS)
        assert carried(layer(k_scale=torch.ones(slots))) == {"k_scale": slots}

    @pytest.mark.parametrize(
        "name",
        ["W_K_scale", "_w_scale", "_q_scale", "softmax_scale", "sm_scale", "output_scale", "prob_scale"],
    )
    def test_scales_of_other_things_are_left_alone(self, name: str) -> None:
        assert carried(layer(**{name: torch.ones(5, 7)})) == {}

    def test_modules_below_are_not_searched_and_empty_tensors_are_nothing(self) -> None:
        assert carried(layer(k_scale=torch.tensor([]))) == {}

    def test_an_unquantised_cache_is_not_searched(self) -> None:
        assert carried(layer(k_scale=torch.ones(5, 7)), cache(torch.float16)) == {}

    def test_vllm_may_say_that_a_cache_is_quantised(self) -> None:
        made = layer(k_scale=torch.ones(PER_TOKEN))
        (group,) = find(made, cache(torch.float16), spec(KVQuantMode.INT8_PER_TOKEN_HEAD)).carried
        assert len(group) == 1

    def test_a_state_of_bytes_is_not_quantised(self) -> None:
        state = MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(torch.float32,))
        assert find(layer(k_scale=torch.ones(5, 7)), cache(), state) == Scales(({},), {})

    def test_a_view_into_the_layers_own_blocks_travels_already(self) -> None:
        paged = torch.zeros((BLOCKS, HEADS, TOKENS, DIM + 4), dtype=torch.uint8)
        whole = torch.empty(0).set_(paged.untyped_storage())
        inline = whole.as_strided(PER_TOKEN, (HEADS * TOKENS * 3, 3, TOKENS * 3), 2)
        assert carried(layer(k_scale_cache=inline), paged) == {}

    def test_a_view_into_the_padding_behind_them_does_not(self) -> None:
        page = HEADS * TOKENS * DIM
        pool = torch.zeros((BLOCKS, page + 4 * HEADS * TOKENS), dtype=torch.uint8)
        paged = pool[:, :page].unflatten(1, (HEADS, TOKENS, DIM))
        whole = torch.empty(0).set_(pool.untyped_storage())
        behind = whole.as_strided(PER_TOKEN, (pool.shape[1] // 4, HEADS, 1), page // 4)
        assert carried(layer(k_scale_cache=behind), paged) == {"k_scale_cache": PER_TOKEN}


class TestRefused:
    @pytest.mark.parametrize(
        "shape", [(2, BLOCKS, TOKENS, HEADS), (HEADS,), (BLOCKS + 1, HEADS), (HEADS, BLOCKS, TOKENS)]
    )
    def test_another_first_axis(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(LayoutError) as refused:
            find(layer(kv_scale=torch.ones(shape)))
        said = str(refused.value)
        assert f"layer {LAYER}: kv_scale (shape {shape}, torch.float32)" in said
        assert f"the {BLOCKS} blocks" in said
        assert "get_kv_transfer_scales" in said


class TestReported:
    def reporting(self, report: Any, **attributes: Any) -> Any:
        made = layer(**attributes)
        made.get_kv_transfer_scales = lambda kv_cache: report(kv_cache) if callable(report) else report
        return made

    def test_a_mapping_or_a_pair(self) -> None:
        k, v = torch.ones(PER_TOKEN), torch.ones(PER_TOKEN)
        assert set(carried(self.reporting({"k": k, "v": v, "w": None}))) == {"k", "v"}
        assert set(carried(self.reporting((k, v)))) == {"k_scale", "v_scale"}
        assert set(carried(self.reporting([k, None]))) == {"k_scale"}

    @pytest.mark.parametrize("nothing", [None, {}, (None, None)])
    def test_nothing_is_believed(self, nothing: Any) -> None:
        assert carried(self.reporting(nothing, kv_scale=torch.ones(2, BLOCKS))) == {}

    def test_it_is_asked_whatever_the_dtype_with_the_registered_tensor(self) -> None:
        paged = cache(torch.float32)
        made = self.reporting(lambda given: {"same": given} if given is paged else {})
        assert set(carried(made, paged)) == {"same"}

    def test_another_first_axis_is_refused(self) -> None:
        with pytest.raises(LayoutError, match=r"k_scale \(shape \(2, 6, 16\).*block first"):
            find(self.reporting((torch.ones(HEADS, BLOCKS, TOKENS), None)))

    @pytest.mark.parametrize("report", [torch.ones(3), "k_scale", {"k": 1.0}, (1.0, 2.0)])
    def test_what_is_no_report_is_refused(self, report: Any) -> None:
        with pytest.raises(LayoutError, match=f"layer {LAYER}: get_kv_transfer_scales gave a"):
            find(self.reporting(report))


class TestScalesOfTheWholeLayer:
    def test_are_told_exactly(self) -> None:
        made = layer()
        made._k_scale.fill_(0.1)
        found = find(made).constant
        assert found[f"{LAYER}/_k_scale"] == float(torch.tensor(0.1)).hex()
        assert found[f"{LAYER}/_v_scale"] == (1.0).hex()
        assert not [name for name in found if "_q_" in name or name.endswith("/scale")]

    def test_change_the_namespace(self) -> None:
        layout = b"l" * 32
        one, other = layer(), layer(_v_scale_float=0.5)
        assert find(one).into(layout) != find(other).into(layout) != layout
        assert find(one).into(layout) == find(layer()).into(layout)

    def test_of_an_unquantised_cache_change_nothing(self) -> None:
        assert find(layer(_v_scale_float=0.5), cache(torch.float32)).into(b"l" * 32) == b"l" * 32
