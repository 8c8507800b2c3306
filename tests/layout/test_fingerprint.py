"""A payload that means something else has another digest; a bigger pool has not."""

from __future__ import annotations

import msgspec
import pytest

from kvstow.layout.discover import TensorView, discover_segments
from kvstow.layout.fingerprint import layout_digest
from kvstow.layout.geometry import Group, GroupId, GroupKind, Layout, RegionId, Segment

replace = msgspec.structs.replace


def one_segment(name: str, size: int, inner: str) -> Segment:
    return Segment(name, RegionId(0), 0, size, size, inner)


SEGMENTS = (
    one_segment("layers.0", 1024, "bfloat16:2[1,2@256,16@16,16@1]"),
    one_segment("layers.1", 512, "uint8:1[1,512@1]"),
)
GROUP = Group(GroupId(0), GroupKind.WINDOW, 16, 300, "bfloat16", SEGMENTS, window_tokens=128)
LAYOUT = Layout((GROUP, replace(GROUP, group=GroupId(1), kind=GroupKind.PAGED, window_tokens=0)), 256)


def with_group(**changes: object) -> Layout:
    return replace(LAYOUT, groups=(replace(GROUP, **changes), LAYOUT.groups[1]))


def with_segment(**changes: object) -> Layout:
    return with_group(segments=(replace(SEGMENTS[0], **changes), SEGMENTS[1]))


def test_the_digest_never_changes_by_accident() -> None:
    assert layout_digest(LAYOUT).hex() == "df4e810fd817d0abee92e95a3fa2527527c881585dcedb5023bfd516269f1852"


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, chunk_tokens=512),
        replace(LAYOUT, groups=LAYOUT.groups[:1]),
        replace(LAYOUT, groups=LAYOUT.groups[::-1]),
        with_group(group=GroupId(2)),
        with_group(kind=GroupKind.STATE),
        with_group(block_tokens=32),
        with_group(window_tokens=256),
        with_group(dtype="float16"),
        with_group(segments=SEGMENTS[::-1]),
        with_group(segments=SEGMENTS[:1]),
        with_segment(block_bytes=1023),
        with_segment(inner="bfloat16:2[1,2@16,16@32,16@1]"),
    ],
)
def test_another_payload_has_another_digest(other: Layout) -> None:
    assert layout_digest(other) != layout_digest(LAYOUT)


@pytest.mark.parametrize(
    "same",
    [
        with_group(num_blocks=9000),
        with_segment(offset_bytes=4096),
        with_segment(block_stride_bytes=99999),
        with_segment(region=RegionId(3)),
        with_segment(name="model.layers.0.attn"),
    ],
)
def test_another_place_or_pool_has_the_same(same: Layout) -> None:
    assert layout_digest(same) == layout_digest(LAYOUT)


def digest_of(shape: tuple[int, ...], strides: tuple[int, ...], num_blocks: int) -> bytes:
    view = TensorView("layers.0", RegionId(0), 0, shape, strides, 2, "bfloat16")
    segments = discover_segments([view], num_blocks, [1 << 40])
    return layout_digest(
        Layout((Group(GroupId(0), GroupKind.PAGED, 16, num_blocks, "bfloat16", segments),), 256)
    )


def test_discovered_layouts_differ_by_the_order_inside_a_block_and_not_by_the_pool() -> None:
    def tokens_first(n: int) -> bytes:
        return digest_of((n, 2, 16, 8, 64), (16384, 8192, 512, 64, 1), n)

    def heads_first(n: int) -> bytes:
        return digest_of((n, 2, 16, 8, 64), (16384, 8192, 64, 1024, 1), n)

    def values_between_keys(n: int) -> bytes:
        return digest_of((n, 2, 16, 8, 64), (16384, 64, 1024, 128, 1), n)

    def halves(n: int) -> bytes:
        return digest_of((2, n, 16, 8, 64), (n * 8192, 8192, 512, 64, 1), n)

    kinds = (tokens_first, heads_first, values_between_keys, halves)
    assert len({kind(300) for kind in kinds}) == len(kinds)
    assert [kind(300) for kind in kinds] == [kind(7001) for kind in kinds]
