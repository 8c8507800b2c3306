"""What every codec checks: when it is bound to regions, and before each transfer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow.codec.base import Region
from kvstow.errors import LayoutError
from kvstow.layout.geometry import BlockId, Group


def is_cpu_memory(region: Region) -> bool:
    """True for a numpy array and for a torch tensor in host memory."""
    return isinstance(region, np.ndarray) or bool(region.device.type == "cpu")


def host_bytes(region: Region) -> npt.NDArray[np.uint8]:
    """A region in host memory as a numpy array over the same bytes.

    Raises:
        LayoutError: it is not flat, contiguous, writable uint8 in host memory.
    """
    if not is_cpu_memory(region):
        raise LayoutError(f"a region on {region.device} is not host memory; use the torch codec")
    flat: Any = region if isinstance(region, np.ndarray) else region.detach().numpy()
    if flat.ndim != 1 or flat.dtype != np.uint8 or not flat.flags.c_contiguous or not flat.flags.writeable:
        raise LayoutError(
            f"a region of shape {flat.shape} and dtype {flat.dtype} cannot be bound; pass a flat, "
            f"contiguous, writable uint8 view of the tensor's storage"
        )
    array_1d: npt.NDArray[np.uint8] = flat
    return array_1d


def check_segments(group: Group, region_sizes: Sequence[int]) -> None:
    """Check that every block of every segment lies in its region, and that none overlap.

    Args:
        group: the group to bind.
        region_sizes: bytes of each region.

    Raises:
        LayoutError: names the segment and the sizes on both sides.
    """
    for segment in group.segments:
        if not 0 <= segment.region < len(region_sizes):
            raise LayoutError(
                f"segment {segment.name} is in region {segment.region}, and {len(region_sizes)} were given"
            )
        size = region_sizes[segment.region]
        steps = max(group.num_blocks - 1, 0)
        end = segment.offset_bytes + steps * segment.block_stride_bytes + segment.block_bytes
        if segment.offset_bytes < 0 or segment.block_bytes < 1 or end > size:
            raise LayoutError(
                f"segment {segment.name}: {group.num_blocks} blocks of {segment.block_bytes} bytes from "
                f"{segment.offset_bytes}, {segment.block_stride_bytes} apart, end at {end}, and region "
                f"{segment.region} has {size} bytes; measure the layout again"
            )
        if steps and segment.block_stride_bytes < segment.block_bytes:
            raise LayoutError(
                f"segment {segment.name}: blocks of {segment.block_bytes} bytes overlap, they lie "
                f"{segment.block_stride_bytes} bytes apart; the stride must be at least the block"
            )


def transfer_ids(
    group: Group, blocks: Sequence[BlockId], payload: memoryview, skip_blocks: int = 0
) -> array[int]:
    """Check a transfer's sizes before it touches memory; `check_range` checks the ids.

    Returns:
        The block ids as int64 [len(blocks)].

    Raises:
        ValueError: a payload of the wrong size or not contiguous, ids that are not integers of
            64 bits, or a skip out of range.
    """
    size = len(blocks) * group.block_bytes
    if not payload.c_contiguous or payload.nbytes != size:
        raise ValueError(
            f"a payload of {payload.nbytes} bytes does not hold {len(blocks)} blocks of "
            f"{group.block_bytes} bytes; pass a contiguous buffer of {size}"
        )
    if not 0 <= skip_blocks <= len(blocks):
        raise ValueError(f"skip_blocks={skip_blocks} is outside [0, {len(blocks)}]")
    try:
        return array("q", blocks)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"block ids must be integers in [0, {group.num_blocks}): {error}") from error


def check_range(group: Group, ids: array[int], skip_blocks: int = 0) -> None:
    """Check the ids of a transfer after the first ``skip_blocks``. The C kernel does so itself.

    Raises:
        ValueError: an id outside ``[0, group.num_blocks)``.
    """
    moved = ids[skip_blocks:]
    if moved and not (min(moved) >= 0 and max(moved) < group.num_blocks):
        raise ValueError(
            f"block ids {min(moved)} to {max(moved)} are not all inside [0, {group.num_blocks}), the blocks "
            f"of group {group.group}"
        )


def check_writable(target: memoryview) -> None:
    """Check that a gather may write to ``target``.

    Raises:
        ValueError: it is read-only.
    """
    if target.readonly:
        raise ValueError(f"a gather's target of {target.nbytes} bytes is read-only; pass a writable buffer")
