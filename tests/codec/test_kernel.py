"""The C kernel trusts nobody: what reaches it past the Python checks is refused there too."""

from __future__ import annotations

from array import array

import pytest

native = pytest.importorskip("kvstow.codec._native", reason="the C kernel is not built")


def bound(num_blocks: int = 4) -> object:
    return native.bind([bytearray(40)], array("q", [0, 0, 10, 10]), num_blocks)


@pytest.mark.parametrize(
    "fields",
    [
        [0, 0, 11, 10],
        [0, 1, 10, 10],
        [0, -1, 10, 10],
        [0, 41, 0, 1],
        [0, 0, 1 << 62, 10],
        [0, 0, -1, 10],
        [0, 0, 10, 0],
        [0, 0, 0, (1 << 63) - 1],
        [1, 0, 10, 10],
        [-1, 0, 10, 10],
        [0, 0, 10],
    ],
)
def test_a_segment_that_leaves_its_region_is_refused(fields: list[int]) -> None:
    with pytest.raises(ValueError, match="segment"):
        native.bind([bytearray(40)], array("q", fields), 4)


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        bound(-1)


def test_a_read_only_region_is_refused() -> None:
    with pytest.raises(BufferError):
        native.bind([bytes(40)], array("q", [0, 0, 10, 10]), 4)


@pytest.mark.parametrize("regions", [[3], 3, [None]])
def test_regions_must_be_buffers(regions: object) -> None:
    with pytest.raises(TypeError):
        native.bind(regions, array("q", [0, 0, 10, 10]), 4)


@pytest.mark.parametrize("block", [-1, 4, 1 << 62])
def test_block_ids_are_checked(block: int) -> None:
    with pytest.raises(ValueError, match="block id"):
        native.gather(bound(), array("q", [block]), bytearray(10), 1)
    with pytest.raises(ValueError, match="block id"):
        native.scatter(bound(), array("q", [block]), bytes(10), 0, 1)


def test_sizes_and_skips_are_checked() -> None:
    one = array("q", [1])
    with pytest.raises(ValueError, match="does not hold"):
        native.gather(bound(), one, bytearray(11), 1)
    with pytest.raises(ValueError, match="does not hold"):
        native.scatter(bound(), one, bytes(9), 0, 1)
    for skip in (-1, 2):
        with pytest.raises(ValueError, match="skip_blocks"):
            native.scatter(bound(), one, bytes(10), skip, 1)
    with pytest.raises(ValueError, match="int64"):
        native.gather(bound(), bytes(7), bytearray(0), 1)


def test_only_a_bound_object_is_taken() -> None:
    with pytest.raises(ValueError, match="PyCapsule"):
        native.gather(object(), array("q"), bytearray(), 1)


def test_a_bound_object_holds_the_memory_of_its_regions() -> None:
    region = bytearray(range(40))
    held = native.bind([region], array("q", [0, 0, 10, 10]), 4)
    with pytest.raises(BufferError):
        region.clear()
    target = bytearray(10)
    native.gather(held, array("q", [2]), target, 1)
    assert target == bytes(range(20, 30))
    del held
    region.clear()


def test_the_plain_loop_copies_the_same_bytes() -> None:
    region = bytearray(range(40))
    held = native.bind([region], array("q", [0, 0, 10, 10]), 4)
    target = bytearray(20)
    native.memcpy_gather(held, array("q", [3, 0]), target)
    assert target == bytes(range(30, 40)) + bytes(range(10))
    native.memcpy_scatter(held, array("q", [0, 3]), bytes(target))
    assert region[:10] == bytes(range(30, 40))
    assert region[30:] == bytes(range(10))
