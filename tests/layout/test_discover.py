"""Tensors as engines register them, and the segments they must become."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import LayoutError
from kvstow.layout.discover import RUNS_MAX, TensorView, describe, discover_segments, shares_memory
from kvstow.layout.geometry import Group, GroupId, GroupKind, Layout, RegionId, Segment

NUM_BLOCKS = 300
repeatable = settings(max_examples=80, deadline=None, derandomize=True, database=None)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def view(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    region: int = 0,
    offset: int = 0,
    itemsize: int = 2,
    dtype: str = "bfloat16",
    block_axis: int | None = None,
    page_bytes: int | None = None,
) -> TensorView:
    strides = contiguous(shape) if strides is None else strides
    return TensorView(name, RegionId(region), offset, shape, strides, itemsize, dtype, block_axis, page_bytes)


def discover(*views: TensorView, num_blocks: int = NUM_BLOCKS, size: int = 1 << 40) -> tuple[Segment, ...]:
    regions = 1 + max(view.region for view in views)
    return discover_segments(views, num_blocks, [size] * regions)


def segment(offset: int, stride: int, size: int, region: int = 0) -> Segment:
    return Segment("s", RegionId(region), offset, stride, size)


class TestOrdinaryTensors:
    def test_one_tensor_with_k_and_v_together_is_one_segment(self) -> None:
        (found,) = discover(view("layers.0", (NUM_BLOCKS, 2, 16, 8, 64), offset=64))
        assert found == Segment(
            "layers.0", RegionId(0), 64, 32768, 32768, "bfloat16:2[1,2@8192,16@512,8@64,64@1]"
        )

    def test_k_and_v_in_halves_of_one_tensor_are_two_segments(self) -> None:
        key, value = discover(view("layers.0", (2, NUM_BLOCKS, 16, 8, 64)))
        assert (key.name, key.offset_bytes, key.block_bytes) == ("layers.0/0", 0, 16384)
        assert (value.name, value.offset_bytes) == ("layers.0/1", NUM_BLOCKS * 16384)
        assert key.block_stride_bytes == value.block_stride_bytes == 16384
        assert key.inner == value.inner == "bfloat16:2[2@/,1,16@512,8@64,64@1]"

    def test_heads_first_in_memory_is_told_from_tokens_first(self) -> None:
        shape = (NUM_BLOCKS, 2, 16, 8, 64)
        (tokens_first,) = discover(view("l", shape))
        (heads_first,) = discover(view("l", shape, (16384, 8192, 64, 1024, 1)))
        assert heads_first.block_bytes == tokens_first.block_bytes
        assert heads_first.inner != tokens_first.inner

    def test_a_padded_page_carries_only_its_bytes(self) -> None:
        (found,) = discover(
            view("mamba", (NUM_BLOCKS, 1, 1, 68608), (131072, 68608, 68608, 1), itemsize=1, page_bytes=131072)
        )
        assert (found.block_bytes, found.block_stride_bytes) == (68608, 131072)

    def test_layers_interleaved_in_one_pool(self) -> None:
        page = 2 * 16 * 8 * 64
        views = [
            view(
                f"layers.{layer}",
                (NUM_BLOCKS, 2, 16, 8, 64),
                (30 * page, 8192, 512, 64, 1),
                offset=2 * layer * page,
            )
            for layer in range(30)
        ]
        found = discover(*views)
        assert [part.offset_bytes for part in found] == [layer * 2 * page for layer in range(30)]
        assert {part.block_stride_bytes for part in found} == {60 * page}

    def test_layers_are_ordered_by_number(self) -> None:
        names = ["layers.10", "layers.2", "layers.1/k", "layers.1/conv", "layers.0"]
        views = [view(name, (NUM_BLOCKS, 64), region=index) for index, name in enumerate(names)]
        assert [part.name for part in discover(*views)] == [
            "layers.0",
            "layers.1/conv",
            "layers.1/k",
            "layers.2",
            "layers.10",
        ]


class TestKernelBlocks:
    def test_consecutive_kernel_blocks_are_carried_as_one_block(self) -> None:
        (found,) = discover(view("l", (NUM_BLOCKS * 4, 2, 16, 8, 64)))
        assert found.block_bytes == found.block_stride_bytes == 4 * 32768
        assert found.inner == "bfloat16:2[4@16384,2@8192,16@512,8@64,64@1]"

    def test_and_with_k_and_v_apart(self) -> None:
        key, value = discover(view("l", (2, NUM_BLOCKS * 2, 16, 8, 64)))
        assert key.block_bytes == key.block_stride_bytes == 2 * 16384
        assert value.offset_bytes == NUM_BLOCKS * 2 * 16384

    def test_and_with_a_gap_between_kernel_blocks(self) -> None:
        found = discover(view("l", (NUM_BLOCKS * 2, 16, 64), (2048, 64, 1)))
        assert [(part.offset_bytes, part.block_bytes) for part in found] == [(0, 2048), (4096, 2048)]
        assert {part.block_stride_bytes for part in found} == {8192}


class TestMixedSparseModel:
    """Dense layers interleaved as bytes, sparse layers with K and V regions apart, an fp8 index cache."""

    def test_every_tensor_becomes_its_runs(self) -> None:
        dense_page = 2 * 32 * 4 * 128 * 2
        half = 32 * 4 * 128
        dense = [
            view(
                f"model.layers.{layer}.attn",
                (NUM_BLOCKS, dense_page),
                (3 * dense_page, 1),
                offset=index * dense_page,
                itemsize=1,
                dtype="uint8",
                page_bytes=dense_page,
            )
            for index, layer in enumerate((0, 1, 2))
        ]
        # [blocks, K or V, tokens, heads, dim]: stride(1) jumps over the whole K region.
        sparse = [
            view(
                f"model.layers.{layer}.attn",
                (NUM_BLOCKS, 2, 32, 4, 128),
                (half, NUM_BLOCKS * half, 512, 128, 1),
                region=1 + index,
                page_bytes=2 * half * 2,
            )
            for index, layer in enumerate((3, 10))
        ]
        index = [
            view(
                f"model.layers.{layer}.index",
                (NUM_BLOCKS, 32, 132),
                region=3 + i,
                itemsize=1,
                dtype="fp8_e4m3",
            )
            for i, layer in enumerate((3, 10))
        ]
        found = discover(*index, *sparse, *dense)
        assert [(part.name, part.region, part.block_bytes) for part in found] == [
            ("model.layers.0.attn", 0, dense_page),
            ("model.layers.1.attn", 0, dense_page),
            ("model.layers.2.attn", 0, dense_page),
            ("model.layers.3.attn/0", 1, half * 2),
            ("model.layers.3.attn/1", 1, half * 2),
            ("model.layers.3.index", 3, 32 * 132),
            ("model.layers.10.attn/0", 2, half * 2),
            ("model.layers.10.attn/1", 2, half * 2),
            ("model.layers.10.index", 4, 32 * 132),
        ]
        assert found[4].offset_bytes == NUM_BLOCKS * half * 2
        layout = Layout(
            (Group(GroupId(0), GroupKind.PAGED, 32, NUM_BLOCKS, "mixed", found),), chunk_tokens=256
        )
        assert describe(layout) == [
            "group 0 paged, 300 blocks of 32 tokens: 3 x uint8:1[1,65536@1], 65536 bytes per block, "
            "196608 apart",
            "group 0 paged, 300 blocks of 32 tokens: 4 x bfloat16:2[1,2@/,32@512,4@128,128@1], "
            "32768 bytes per block, 32768 apart",
            "group 0 paged, 300 blocks of 32 tokens: 2 x fp8_e4m3:1[1,32@132,132@1], 4224 bytes per block, "
            "4224 apart",
        ]


class TestMiniMaxM3:
    """117 tensors in three layouts, as one rank of four registered them, and scales beside them."""

    BLOCKS, TOKENS, DIM = 59454, 128, 128

    def views(self) -> list[TensorView]:
        blocks, tokens, dim = self.BLOCKS, self.TOKENS, self.DIM
        found = []
        for layer in reversed(range(60)):
            name = f"model.layers.{layer}.self_attn.attn"
            if layer < 3:
                shape: tuple[int, ...] = (blocks, 1, tokens, 2 * dim)
                found.append(view(name, shape, region=3 * layer, itemsize=1, dtype="uint8", block_axis=0))
                continue
            found += [
                view(
                    name,
                    (blocks, 2, tokens, 1, dim),
                    (16384, 974094336, 128, 128, 1),
                    region=3 * layer,
                    itemsize=1,
                    dtype="uint8",
                    block_axis=0,
                    page_bytes=2 * tokens * dim,
                ),
                view(
                    f"{name}.index_cache",
                    (blocks, tokens, dim),
                    region=3 * layer + 1,
                    itemsize=1,
                    dtype="float8_e4m3fn",
                    block_axis=0,
                ),
            ]
            # K's and V's lie in one tensor of [2, blocks, heads, tokens].
            lines = blocks * tokens
            found += [
                view(
                    f"{name}/{part}_scale",
                    (blocks, 1, tokens),
                    region=3 * layer + 2,
                    offset=4 * lines * index,
                    itemsize=4,
                    dtype="float32",
                    block_axis=0,
                )
                for index, part in enumerate("kv")
            ]
        return found

    def test_every_tensor_becomes_its_runs_behind_its_layer(self) -> None:
        found = discover(*self.views(), num_blocks=self.BLOCKS)
        half, line = self.TOKENS * self.DIM, 4 * self.TOKENS
        parts = [("/0", half), ("/1", half), (".index_cache", half), ("/k_scale", line), ("/v_scale", line)]
        assert [(part.name, part.block_bytes) for part in found] == [
            (f"model.layers.{layer}.self_attn.attn{part}", size)
            for layer in range(60)
            for part, size in ([("", 2 * half)] if layer < 3 else parts)
        ]
        assert {part.block_stride_bytes for part in found if part.name.endswith(("/0", "/1"))} == {half}

    def test_v_begins_where_the_region_of_k_ends(self) -> None:
        key, value = (
            part
            for part in discover(*self.views(), num_blocks=self.BLOCKS)
            if part.name.startswith("model.layers.59.self_attn.attn/") and part.block_bytes == 16384
        )
        assert (key.region, value.offset_bytes - key.offset_bytes) == (value.region, 974094336)
        assert key.inner == value.inner == "uint8:1[1,2@/,128@128,1,128@1]"


class TestSharedMemory:
    def test_layers_that_share_their_cache_become_one_segment(self) -> None:
        shape = (NUM_BLOCKS, 2, 16, 8, 64)
        found = discover(view("layers.9", shape), view("layers.4", shape), view("layers.5", shape, region=1))
        assert [part.name for part in found] == ["layers.4", "layers.5"]

    def test_other_views_of_the_same_memory_are_refused(self) -> None:
        with pytest.raises(LayoutError, match=r"layers\.4 and layers\.9 share memory"):
            discover(
                view("layers.9", (NUM_BLOCKS, 1024)),
                view("layers.4", (NUM_BLOCKS, 2048), itemsize=1, dtype="uint8"),
            )

    def test_a_block_of_one_over_another_block_of_another_is_refused(self) -> None:
        with pytest.raises(LayoutError, match="share memory"):
            discover(view("a", (NUM_BLOCKS, 64)), view("b", (NUM_BLOCKS, 64), offset=128 * 7))

    @repeatable
    @given(
        st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 9)),
        st.integers(1, 6),
        st.booleans(),
    )
    def test_sharing_is_what_the_bytes_say(
        self, first: tuple[int, int, int], second: tuple[int, int, int], num_blocks: int, same_stride: bool
    ) -> None:
        one = segment(first[0], first[1] + first[2], first[2])
        stride = one.block_stride_bytes if same_stride else second[1] + second[2]
        two = segment(second[0], max(stride, second[2]) if not same_stride else stride, second[2])

        def touched(part: Segment) -> set[int]:
            return {
                part.offset_bytes + block * part.block_stride_bytes + byte
                for block, byte in product(range(num_blocks), range(part.block_bytes))
            }

        expected = bool(touched(one) & touched(two))
        assert shares_memory(one, two, num_blocks) == expected
        assert shares_memory(two, one, num_blocks) == expected

    def test_regions_never_meet(self) -> None:
        assert not shares_memory(segment(0, 10, 10), segment(0, 10, 10, region=1), 4)
        assert shares_memory(segment(0, 0, 10), segment(5, 7, 3), 1)
        assert shares_memory(segment(0, 7, 3), segment(1, 0, 3), 1)
        assert not shares_memory(segment(0, 0, 10), segment(10, 0, 10), 1)


class TestBlockAxis:
    def test_two_axes_of_the_right_size_need_a_hint(self) -> None:
        shape = (NUM_BLOCKS, NUM_BLOCKS, 4)
        with pytest.raises(LayoutError, match=r"l \(shape \(300, 300, 4\).*\[0, 1\].*pass block_axis"):
            discover(view("l", shape))
        (found,) = discover(view("l", shape, block_axis=0))
        assert found.block_bytes == NUM_BLOCKS * 4 * 2

    def test_an_axis_of_the_right_size_that_cannot_be_carried_gives_way_to_kernel_blocks(self) -> None:
        (found,) = discover(view("l", (32, 2, 16, 4)), num_blocks=16)
        assert found.block_bytes == 2 * 2 * 16 * 4 * 2

    def test_a_multiple_that_could_count_blocks_too_needs_a_hint(self) -> None:
        with pytest.raises(LayoutError, match=r"axes \[0, 1\] could each"):
            discover(view("l", (4, 8, 16)), num_blocks=4)
        assert discover(view("l", (4, 8, 16), block_axis=0), num_blocks=4)[0].block_bytes == 256

    def test_no_axis_of_the_right_size(self) -> None:
        with pytest.raises(LayoutError, match=r"l \(shape \(301, 4\), strides \(4, 1\).*num_blocks=300"):
            discover(view("l", (301, 4)))

    @pytest.mark.parametrize("hint", [-1, 1, 2])
    def test_a_wrong_hint(self, hint: int) -> None:
        with pytest.raises(LayoutError, match=f"block_axis={hint}"):
            discover(view("l", (NUM_BLOCKS, 4), block_axis=hint))

    def test_one_block(self) -> None:
        (found,) = discover(view("l", (1, 2, 16), block_axis=0), num_blocks=1)
        assert found.block_bytes == 64


class TestRefused:
    def test_too_many_runs(self) -> None:
        with pytest.raises(LayoutError, match=rf"l \(shape \(9, 300, 16\).*9 runs of 32 bytes.*{RUNS_MAX}"):
            discover(view("l", (9, NUM_BLOCKS, 16)))
        assert len(discover(view("l", (RUNS_MAX, NUM_BLOCKS, 16)))) == RUNS_MAX

    @pytest.mark.parametrize(
        ("shape", "strides", "what"),
        [
            ((NUM_BLOCKS, 4, 16), (64, 0, 1), "elements overlap"),
            ((NUM_BLOCKS, 4, 16), (64, 8, 1), "elements overlap"),
            ((NUM_BLOCKS, 4), (4, -1), "elements overlap"),
            ((NUM_BLOCKS, 16), (0, 1), "blocks overlap"),
            ((NUM_BLOCKS, 16), (8, 1), "blocks overlap"),
            ((NUM_BLOCKS, 2, 2, 4), (100, 6, 7, 1), "runs of a block overlap"),
            ((NUM_BLOCKS, 2, 4), (4, 8, 1), "share memory"),
            ((NUM_BLOCKS, 4, 0), (4, 1, 1), "empty"),
            ((NUM_BLOCKS, 4), (4,), "stride for every axis"),
        ],
    )
    def test_memory_that_overlaps_itself_or_is_none(
        self, shape: tuple[int, ...], strides: tuple[int, ...], what: str
    ) -> None:
        with pytest.raises(LayoutError, match=what):
            discover(view("layers.3", shape, strides))

    def test_a_run_outside_its_region(self) -> None:
        size = NUM_BLOCKS * 32
        assert discover(view("l", (NUM_BLOCKS, 16)), size=size)
        for offset in (-2, 2):
            with pytest.raises(
                LayoutError, match=rf"{offset} to {size + offset} of region 0, which has {size}"
            ):
                discover(view("l", (NUM_BLOCKS, 16), offset=offset), size=size)
        with pytest.raises(LayoutError, match="region's index"):
            discover_segments([view("l", (NUM_BLOCKS, 16), region=1)], NUM_BLOCKS, [size])

    def test_more_bytes_than_the_engines_page(self) -> None:
        with pytest.raises(LayoutError, match="32768 bytes per block, and the engine says 16384"):
            discover(view("l", (NUM_BLOCKS, 2, 16, 8, 64), page_bytes=16384))

    def test_two_tensors_of_one_name(self) -> None:
        with pytest.raises(LayoutError, match="two tensors are named l"):
            discover(view("l", (NUM_BLOCKS, 4)), view("l", (NUM_BLOCKS, 8), region=1))

    def test_no_blocks(self) -> None:
        with pytest.raises(LayoutError, match="num_blocks=0"):
            discover(view("l", (0, 4)), num_blocks=0)


@repeatable
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 5),
    st.data(),
)
def test_the_segments_hold_exactly_the_views_bytes(
    inner: list[int], kernel_blocks: int, padding: int, data: st.DataObject
) -> None:
    """Over a real array: every element of block b of the view, and nothing else, is in block b's runs."""
    num_blocks = 11
    shape = [num_blocks * kernel_blocks, *inner]
    order = data.draw(st.permutations(range(len(shape))))  # the axes, outermost in memory first
    storage_shape = [shape[axis] for axis in order]
    storage_shape[-1] += padding
    storage = np.arange(prod(storage_shape), dtype=np.int32).reshape(storage_shape)
    trimmed = storage[..., : shape[order[-1]]]
    tensor = trimmed.transpose(np.argsort(order))
    assert list(tensor.shape) == shape
    strides = tuple(stride // 4 for stride in tensor.strides)
    try:
        found = discover_segments(
            [TensorView("l", RegionId(0), 0, tuple(shape), strides, 4, "int32", 0)],
            num_blocks,
            [storage.nbytes],
        )
    except LayoutError:
        return  # refused is never wrong; the tests above say what must not be refused
    for block in range(num_blocks):
        held: list[int] = []
        for part in found:
            start = part.offset_bytes + block * part.block_stride_bytes
            assert start % 4 == 0
            held += range(start // 4, (start + part.block_bytes) // 4)
        expected = tensor[block * kernel_blocks : (block + 1) * kernel_blocks]
        assert sorted(held) == sorted(expected.ravel().tolist())
