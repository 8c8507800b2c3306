"""What every codec must do: inherit `CodecContract`, say how to make yours, and run pytest.

::

    class TestMyCodec(CodecContract):
        def make(self, group, regions, threads=1):
            return MyCodec(group, regions, threads)

Regions are numpy arrays unless `regions` makes something else of them over the same memory: tensors
on the host share it as they are. A codec for an accelerator (in triton, say) has memory of its own, and
the contract looks at the arrays after each scatter: such a codec inherits with a small wrapper, made in
`make`, that copies the arrays to device regions before each call and the regions back after it, one call
at a time.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.codec.base import Codec, Region
from kvstow.errors import LayoutError
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, RegionId, Segment

Bytes = npt.NDArray[np.uint8]

# Around the sizes where a kernel changes its way: a byte, a line, a page, and odd ones between.
BLOCK_BYTES = st.one_of(st.integers(1, 200), st.sampled_from([511, 512, 513, 640, 1024, 4096, 5000]))

repeatable = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


def group_of(segments: Sequence[Segment], num_blocks: int) -> Group:
    """A paged group with these segments."""
    return Group(GroupId(0), GroupKind.PAGED, 16, num_blocks, "uint8", tuple(segments))


def segment_of(region: int, offset: int, stride: int, size: int) -> Segment:
    """A segment named by its place."""
    return Segment(f"layers.{region}/{offset}", RegionId(region), offset, stride, size)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, list[int]]:
    """A group and the bytes of its regions: segments apart or interleaved, with odd gaps."""
    num_blocks = draw(st.integers(1, 9))
    segments: list[Segment] = []
    region_sizes: list[int] = []
    for region in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(BLOCK_BYTES, min_size=1, max_size=3))
        gaps = [draw(st.sampled_from([0, 0, 1, 7, 64])) for _ in sizes]
        at = draw(st.sampled_from([0, 3, 64]))
        if draw(st.booleans()):  # interleaved: block 0 of every segment, then block 1, ...
            stride = sum(sizes) + sum(gaps)
            for size, gap in zip(sizes, gaps, strict=True):
                segments.append(segment_of(region, at, stride, size))
                at += size + gap
            at = segments[-1].offset_bytes + (num_blocks - 1) * stride + sizes[-1]
        else:
            for size, gap in zip(sizes, gaps, strict=True):
                segments.append(segment_of(region, at, size + gap, size))
                at += num_blocks * (size + gap)
        region_sizes.append(at + draw(st.sampled_from([0, 5])))
    ordered = draw(st.permutations(segments))
    return group_of(ordered, num_blocks), region_sizes


def noise(size: int, seed: int) -> Bytes:
    """Bytes that repeat nowhere near."""
    return np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()


def shares(group: Group, blocks: Sequence[int]) -> list[tuple[int, int, slice]]:
    """(index in ``blocks``, region, bytes in the region) in payload order."""
    return [
        (index, segment.region, slice(start, start + segment.block_bytes))
        for segment in group.segments
        for index, block in enumerate(blocks)
        for start in [segment.offset_bytes + block * segment.block_stride_bytes]
    ]


def payload_of(group: Group, regions: Sequence[Bytes], blocks: Sequence[int]) -> bytes:
    """What a gather must produce."""
    return b"".join(regions[region][place].tobytes() for _, region, place in shares(group, blocks))


def ids(blocks: Sequence[int]) -> list[BlockId]:
    """Typed ids."""
    return [BlockId(block) for block in blocks]


class CodecContract:
    """Inherit, and override `make`."""

    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        """The codec under test, bound to ``group`` and ``regions``."""
        raise NotImplementedError

    def regions(self, arrays: Sequence[Bytes]) -> Sequence[Region]:
        """The regions as this codec's user has them; override for tensors."""
        return arrays

    def make_over(self, group: Group, arrays: Sequence[Bytes], threads: int = 1) -> Codec:
        """The codec under test over the memory of ``arrays``."""
        return self.make(group, self.regions(arrays), threads)

    @repeatable
    @given(groups(), st.data())
    def test_gather_gives_the_blocks_bytes_in_payload_order(
        self, drawn: tuple[Group, list[int]], data: st.DataObject
    ) -> None:
        group, region_sizes = drawn
        arrays = [noise(size, seed) for seed, size in enumerate(region_sizes)]
        before = [array.copy() for array in arrays]
        blocks = data.draw(st.lists(st.integers(0, group.num_blocks - 1), max_size=12))
        shift = data.draw(st.sampled_from([0, 1, 32, 63]))
        size = len(blocks) * group.block_bytes
        target = bytearray(shift + size + 1)
        self.make_over(group, arrays).gather(ids(blocks), memoryview(target)[shift : shift + size])
        assert bytes(target[shift : shift + size]) == payload_of(group, arrays, blocks)
        assert not any(target[:shift])
        assert target[-1] == 0
        assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))

    @repeatable
    @given(groups(), st.data())
    def test_scatter_writes_the_named_blocks_and_no_other_byte(
        self, drawn: tuple[Group, list[int]], data: st.DataObject
    ) -> None:
        group, region_sizes = drawn
        arrays = [noise(size, seed) for seed, size in enumerate(region_sizes)]
        expected = [array.copy() for array in arrays]
        order = data.draw(st.permutations(range(group.num_blocks)))
        blocks = order[: data.draw(st.integers(0, len(order)))]
        skip = data.draw(st.integers(0, len(blocks)))
        shift = data.draw(st.sampled_from([0, 1, 32, 63]))
        source = noise(shift + len(blocks) * group.block_bytes, 99)
        at = shift
        for index, region, place in shares(group, blocks):
            size = place.stop - place.start
            if index >= skip:
                expected[region][place] = source[at : at + size]
            at += size
        self.make_over(group, arrays).scatter(ids(blocks), memoryview(source.data)[shift:], skip)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))

    @pytest.mark.parametrize("threads", [1, 2, 3, 64])
    @pytest.mark.parametrize("stride", [40_000, 40_001, 90_000])
    def test_a_large_transfer_is_the_same_with_any_number_of_threads(self, threads: int, stride: int) -> None:
        num_blocks = 24
        group = group_of(
            [segment_of(0, 0, stride, 40_000), segment_of(1, 5, 7_000, 7_000), segment_of(2, 0, 3, 3)],
            num_blocks,
        )
        sizes = [stride * num_blocks, 5 + 7_000 * num_blocks, 3 * num_blocks]
        arrays = [noise(size, seed) for seed, size in enumerate(sizes)]
        blocks = [5, 6, 7, 8, 0, 1, 23, 22, 11, 12, 13, 14, 15, 16, 2]
        codec = self.make_over(group, arrays, threads)
        payload = bytearray(len(blocks) * group.block_bytes)
        codec.gather(ids(blocks), memoryview(payload))
        assert bytes(payload) == payload_of(group, arrays, blocks)
        targets = [np.zeros_like(array) for array in arrays]
        self.make_over(group, targets, threads).scatter(ids(blocks), memoryview(payload), 3)
        assert payload_of(group, targets, blocks[3:]) == payload_of(group, arrays, blocks[3:])
        assert sum(np.count_nonzero(target) for target in targets) == np.count_nonzero(
            np.frombuffer(payload_of(group, arrays, blocks[3:]), np.uint8)
        )

    def test_calls_from_several_threads_do_not_meet(self) -> None:
        group = group_of([segment_of(0, 0, 6_000, 6_000), segment_of(1, 0, 9_000, 5_000)], 64)
        arrays = [noise(64 * 6_000, 1), noise(64 * 9_000, 2)]
        codec = self.make_over(group, arrays)
        parts = [list(range(first, 64, 4)) for first in range(4)]

        def move(blocks: list[int]) -> bytes:
            payload = bytearray(len(blocks) * group.block_bytes)
            codec.gather(ids(blocks), memoryview(payload))
            codec.scatter(ids(blocks), memoryview(payload))
            return bytes(payload)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(move, parts)) == [payload_of(group, arrays, blocks) for blocks in parts]

    def test_a_read_only_source_is_fine_and_a_read_only_target_is_not(self) -> None:
        codec, arrays = self._small()
        codec.scatter(ids([1]), memoryview(bytes(range(10))))
        assert arrays[0][10:20].tobytes() == bytes(range(10))
        with pytest.raises(ValueError, match="read-only"):
            codec.gather(ids([1]), memoryview(bytes(10)))

    @pytest.mark.parametrize("size", [0, 19, 21, 10])
    def test_a_payload_of_the_wrong_size_is_refused(self, size: int) -> None:
        codec, arrays = self._small()
        before = arrays[0].copy()
        with pytest.raises(ValueError, match=r"20"):
            codec.gather(ids([0, 1]), memoryview(bytearray(size)))
        with pytest.raises(ValueError, match=r"20"):
            codec.scatter(ids([0, 1]), memoryview(bytearray(size)))
        assert np.array_equal(arrays[0], before)

    def test_a_payload_with_gaps_is_refused(self) -> None:
        codec, _ = self._small()
        with pytest.raises(ValueError, match="contiguous"):
            codec.gather(ids([0, 1]), memoryview(bytearray(40))[::2])

    @pytest.mark.parametrize("bad", [-1, 4, 5, 1 << 40, -(1 << 63), 1 << 63])
    def test_a_block_id_out_of_range_touches_nothing(self, bad: int) -> None:
        codec, arrays = self._small()
        before = arrays[0].copy()
        target = bytearray(20)
        with pytest.raises(ValueError, match=r"\[0, 4\)"):
            codec.gather(ids([0, bad]), memoryview(target))
        with pytest.raises(ValueError, match=r"\[0, 4\)"):
            codec.scatter(ids([0, bad]), memoryview(bytes(20)))
        assert not any(target)
        assert np.array_equal(arrays[0], before)

    def test_ids_under_the_skip_are_not_checked(self) -> None:
        codec, arrays = self._small()
        codec.scatter(ids([-7, 99, 2]), memoryview(bytes(30)), 2)
        assert not arrays[0][20:30].any()
        assert arrays[0][:20].any()
        assert arrays[0][30:].any()

    @pytest.mark.parametrize("skip", [-1, 3])
    def test_a_skip_out_of_range_is_refused(self, skip: int) -> None:
        codec, _ = self._small()
        with pytest.raises(ValueError, match="skip_blocks"):
            codec.scatter(ids([0, 1]), memoryview(bytes(20)), skip)

    def test_nothing_is_a_transfer_too(self) -> None:
        codec, arrays = self._small()
        before = arrays[0].copy()
        codec.gather([], memoryview(bytearray()))
        codec.scatter([], memoryview(b""))
        codec.scatter(ids([1, 2]), memoryview(bytes(20)), 2)
        assert np.array_equal(arrays[0], before)

    def test_the_codec_keeps_its_regions(self) -> None:
        group = group_of([segment_of(0, 0, 1 << 16, 1 << 16)], 16)
        codec = self.make_over(group, [noise(1 << 20, 7)])
        gc.collect()
        target = bytearray(2 << 16)
        codec.gather(ids([3, 15]), memoryview(target))
        assert bytes(target) == payload_of(group, [noise(1 << 20, 7)], [3, 15])

    @pytest.mark.parametrize(
        "segment",
        [
            segment_of(0, 0, 11, 10),  # 3 * 11 + 10 > 40
            segment_of(0, 1, 10, 10),
            segment_of(0, -1, 10, 10),
            segment_of(0, 0, 1 << 62, 10),
            segment_of(0, 0, 9, 10),  # blocks overlap
            segment_of(0, 0, -10, 10),
            segment_of(0, 0, 10, 0),
            segment_of(1, 0, 10, 10),
            segment_of(-1, 0, 10, 10),
        ],
    )
    def test_a_segment_that_leaves_its_region_is_not_bound(self, segment: Segment) -> None:
        with pytest.raises(LayoutError, match=segment.name):
            self.make_over(group_of([segment], 4), [noise(40, 0)])

    def test_a_region_that_is_not_flat_bytes_is_not_bound(self) -> None:
        group = group_of([segment_of(0, 0, 10, 10)], 4)
        with pytest.raises(LayoutError, match=r"\(4, 10\)"):
            self.make_over(group, [noise(40, 0).reshape(4, 10)])

    def _small(self) -> tuple[Codec, list[Bytes]]:
        arrays = [noise(40, 3)]
        return self.make_over(group_of([segment_of(0, 0, 10, 10)], 4), arrays), arrays
