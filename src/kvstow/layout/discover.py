"""From the tensors that an engine registers to ordered segments; plain numbers, no torch.

A tensor's share of one block is what is left of its view when the block axis is fixed. It is a
contiguous run of bytes, or a few runs (K and V in regions of their own); each run becomes a segment.
How the elements lie in a run is written into `Segment.inner` as ``dtype:itemsize[axis,axis,...]``,
axes in the tensor's order, the block axis as the kernel blocks in a block: ``16@512`` is an axis of 16
with a stride of 512 elements inside the run, ``2@/`` an axis of 2 whose parts are runs of their own,
``1`` an axis of one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstow.errors import LayoutError
from kvstow.layout.geometry import Layout, RegionId, Segment

RUNS_MAX = 8
"""Most runs of one block in one tensor. More means that the block axis is not what we took it for,
or an engine layout that copies would be slow for; both are better said at start."""


class TensorView(msgspec.Struct, frozen=True):
    """One registered tensor, as numbers.

    Attributes:
        name: the layer's name, and a part (``layers.3/conv``) where a layer has several tensors.
        region: index of the region that holds it.
        offset_bytes: where its first element lies in the region.
        shape: sizes of its axes.
        strides: elements between neighbours along each axis.
        itemsize: bytes of an element.
        dtype: the engine's name for the element type.
        block_axis: the axis that counts blocks, where the sizes alone do not tell.
        page_bytes: bytes of a block that the engine says this tensor has, padding included; checked.
    """

    name: str
    region: RegionId
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    block_axis: int | None = None
    page_bytes: int | None = None

    @property
    def memory(self) -> tuple[object, ...]:
        """All that decides which bytes it shows, and how."""
        return self.region, self.offset_bytes, self.shape, self.strides, self.itemsize, self.dtype


class _Axis(msgspec.Struct, frozen=True):
    """An axis of a tensor's share of one block, in elements."""

    size: int
    stride: int


class _Share(msgspec.Struct, frozen=True):
    """A tensor's share of block 0: where its runs start and how long each is, in elements."""

    axes: tuple[_Axis, ...]
    split: frozenset[int]
    run: int
    starts: tuple[int, ...]
    block_stride: int


def discover_segments(
    views: Sequence[TensorView], num_blocks: int, region_sizes: Sequence[int]
) -> tuple[Segment, ...]:
    """Describe the tensors of one group as segments, in numeric layer order.

    The engine may split each block into k kernel blocks: an axis of ``num_blocks * k`` then carries
    k consecutive ones as one block. Layers that share one tensor (identical views) become one segment,
    under the name of the first.

    Args:
        views: every tensor of the group, in any order.
        num_blocks: blocks that the group's block table can name.
        region_sizes: bytes of each region.

    Raises:
        LayoutError: a tensor whose blocks are not runs of bytes inside its region, whose block axis is
            not clear, or that shares memory with another; names it, its shape and its strides.
    """
    if num_blocks < 1:
        raise LayoutError(f"num_blocks={num_blocks} leaves nothing to carry; the engine needs 1 or more")
    ordered = sorted(views, key=lambda view: natural_order(view.name))
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise LayoutError(f"two tensors are named {after.name}; name the parts of a layer apart")
    distinct = {view.memory: view for view in reversed(ordered)}  # the first of each wins
    found = [
        (view, segment)
        for view in ordered
        if distinct[view.memory] is view
        for segment in _segments(view, num_blocks, region_sizes)
    ]
    for (view, segment), (other, other_segment) in itertools.combinations(found, 2):
        if shares_memory(segment, other_segment, num_blocks):
            raise LayoutError(
                f"{segment.name} and {other_segment.name} share memory and are not the same view: "
                f"{_told(view)}; {_told(other)}; a block of one would overwrite the other, so register "
                f"identical views or separate memory"
            )
    return tuple(segment for _, segment in found)


def natural_order(name: str) -> tuple[object, ...]:
    """A sort key that puts ``layers.2`` before ``layers.10``."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def shares_memory(first: Segment, second: Segment, num_blocks: int) -> bool:
    """True if some block of ``first`` and some block of ``second`` have a byte in common.

    Both belong to one group, so a common byte would be written for two layers, or two blocks, at once.
    (Different groups may lie over each other: the engine gives a block id to one of them at a time.)
    """
    if first.region != second.region:
        return False
    distance = second.offset_bytes - first.offset_bytes
    stride = first.block_stride_bytes
    if stride == second.block_stride_bytes:
        if stride == 0:
            return -second.block_bytes < distance < first.block_bytes
        # Blocks d apart meet if -second.block_bytes < distance + d * stride < first.block_bytes.
        lowest = (-second.block_bytes - distance) // stride + 1
        highest = -((distance - first.block_bytes) // stride) - 1
        return max(lowest, 1 - num_blocks) <= min(highest, num_blocks - 1)
    if stride == 0:
        return shares_memory(second, first, num_blocks)
    starts = second.offset_bytes + second.block_stride_bytes * np.arange(num_blocks, dtype=np.int64)
    ends = starts + second.block_bytes
    # Only the last block of `first` that starts before the end can reach past the start.
    last = np.minimum((ends - 1 - first.offset_bytes) // stride, num_blocks - 1)
    reach = first.offset_bytes + last * stride + first.block_bytes
    return bool(np.any((last >= 0) & (reach > starts)))


def describe(layout: Layout) -> list[str]:
    """One line per distinct tensor layout, for the log at start."""
    lines: list[str] = []
    for group in layout.groups:
        kind = f"{group.kind}({group.window_tokens})" if group.window_tokens else f"{group.kind}"
        counts = Counter(
            (segment.inner or group.dtype, segment.block_bytes, segment.block_stride_bytes)
            for segment in group.segments
        )
        lines += [
            f"group {group.group} {kind}, {group.num_blocks} blocks of {group.block_tokens} tokens: "
            f"{count} x {inner}, {size} bytes per block, {stride} apart"
            for (inner, size, stride), count in counts.items()
        ]
    return lines


def _segments(view: TensorView, num_blocks: int, region_sizes: Sequence[int]) -> list[Segment]:
    """The runs of one tensor, in the order of its axes."""
    if len(view.shape) != len(view.strides) or view.itemsize < 1 or not 0 <= view.region < len(region_sizes):
        raise LayoutError(
            f"{_told(view)} is no tensor of the {len(region_sizes)} regions; give a stride for every axis, "
            f"an itemsize, and a region's index"
        )
    share = _share(view, _block_axis(view, num_blocks), num_blocks)
    run_bytes = share.run * view.itemsize
    stride_bytes = share.block_stride * view.itemsize
    total_bytes = run_bytes * len(share.starts)
    if view.page_bytes is not None and total_bytes > view.page_bytes:
        raise LayoutError(
            f"{_told(view)} has {total_bytes} bytes per block, and the engine says {view.page_bytes}; "
            f"num_blocks={num_blocks} or the block axis is wrong"
        )
    segments = [
        Segment(
            name=view.name if len(share.starts) == 1 else f"{view.name}/{index}",
            region=view.region,
            offset_bytes=view.offset_bytes + start * view.itemsize,
            block_stride_bytes=stride_bytes,
            block_bytes=run_bytes,
            inner=_inner(view, share),
        )
        for index, start in enumerate(share.starts)
    ]
    end = max(segment.offset_bytes for segment in segments) + (num_blocks - 1) * stride_bytes + run_bytes
    if view.offset_bytes < 0 or end > region_sizes[view.region]:
        raise LayoutError(
            f"{_told(view)} spans bytes {view.offset_bytes} to {end} of region {view.region}, which has "
            f"{region_sizes[view.region]}; give the whole storage as the region"
        )
    if num_blocks > 1 and stride_bytes < run_bytes:
        raise LayoutError(
            f"{_told(view)}: blocks overlap, {run_bytes} bytes long and {stride_bytes} bytes apart; an "
            f"expanded tensor cannot be carried, register the memory under it"
        )
    return segments


def _block_axis(view: TensorView, num_blocks: int) -> int:
    """The axis that counts blocks: the hint, else the only one that can be."""
    hint = view.block_axis
    if hint is not None:
        if not 0 <= hint < len(view.shape) or view.shape[hint] < 1 or view.shape[hint] % num_blocks:
            raise LayoutError(
                f"{_told(view)}: block_axis={hint} does not count blocks; its size must be "
                f"num_blocks={num_blocks} or a multiple of it"
            )
        return hint
    exact = [axis for axis, size in enumerate(view.shape) if size == num_blocks]
    multiple = [
        axis for axis, size in enumerate(view.shape) if size > num_blocks > 1 and not size % num_blocks
    ]
    if not exact and not multiple:
        raise LayoutError(
            f"{_told(view)} has no axis of num_blocks={num_blocks} or a multiple of it; check num_blocks, "
            f"or pass block_axis"
        )
    usable = [axis for axis in exact + multiple if _can_carry(view, axis, num_blocks)]
    if len(exact) > 1 or len(usable) > 1:
        raise LayoutError(
            f"{_told(view)}: axes {exact if len(exact) > 1 else usable} could each count the {num_blocks} "
            f"blocks; pass block_axis"
        )
    return usable[0] if usable else (exact + multiple)[0]


def _can_carry(view: TensorView, axis: int, num_blocks: int) -> bool:
    try:
        _share(view, axis, num_blocks)
    except LayoutError:
        return False
    return True


def _share(view: TensorView, block_axis: int, num_blocks: int) -> _Share:
    """Split the view's share of block 0 into the fewest runs.

    Axes join the run from the smallest stride up, as long as each starts where the run so far ends;
    the parts of the others are runs of their own.
    """
    kernel_blocks = view.shape[block_axis] // num_blocks
    axes = tuple(
        _Axis(kernel_blocks if axis == block_axis else size, stride)
        for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True))
    )
    if any(axis.size < 1 for axis in axes):
        raise LayoutError(f"{_told(view)} has an empty axis; there is nothing to carry")
    run = 1
    split: list[int] = []
    for index in sorted(range(len(axes)), key=lambda index: axes[index].stride):
        axis = axes[index]
        if axis.size == 1:
            continue
        if axis.stride == run:
            run *= axis.size
        elif axis.stride < run:
            raise LayoutError(
                f"{_told(view)}: elements overlap along axis {index}; an expanded tensor cannot be carried, "
                f"register the memory under it"
            )
        else:
            split.append(index)
    split.sort()
    count = math.prod(axes[index].size for index in split)
    if count > RUNS_MAX:
        raise LayoutError(
            f"{_told(view)}: a block is {count} runs of {run * view.itemsize} bytes along axis "
            f"{block_axis}, and {RUNS_MAX} is the most; pass block_axis if another axis counts blocks, or "
            f"use a kernel layout that keeps a block together"
        )
    places = itertools.product(
        *([i * axes[index].stride for i in range(axes[index].size)] for index in split)
    )
    starts = tuple(sum(place) for place in places)
    if any(after - before < run for before, after in itertools.pairwise(sorted(starts))):
        raise LayoutError(f"{_told(view)}: runs of a block overlap; register the memory under it")
    return _Share(axes, frozenset(split), run, starts, kernel_blocks * view.strides[block_axis])


def _inner(view: TensorView, share: _Share) -> str:
    """The compact form that the module's docstring gives.

    The stride of a split axis is left out: it depends on the size of the pool.
    """
    axes = [
        "1" if axis.size == 1 else f"{axis.size}@/" if index in share.split else f"{axis.size}@{axis.stride}"
        for index, axis in enumerate(share.axes)
    ]
    return f"{view.dtype}:{view.itemsize}[{','.join(axes)}]"


def _told(view: TensorView) -> str:
    """A tensor for an error message."""
    return f"{view.name} (shape {view.shape}, strides {view.strides}, {view.dtype})"
