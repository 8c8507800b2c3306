"""The codec for any torch device, and for hosts without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvstow.codec.base import Region
from kvstow.codec.binding import check_range, check_segments, check_writable, transfer_ids
from kvstow.errors import LayoutError
from kvstow.layout.geometry import BlockId, Group, Segment

Tensor = Any

# `index_copy_` moves element by element: words are five times as fast as bytes. An integer type,
# because no device may take liberties with the bits of one.
WORD = torch.int64


class TorchCodec:
    """Copies with ``index_select`` and ``index_copy_``. See `kvstow.codec.base.Codec`.

    A region in host memory is read and written in place. On another device a segment goes through
    one staging tensor of its size, and the call returns when the bytes are there. It begins when all that the
    device was told before has ended: the engine computes on a stream of its own, which those of other
    threads do not wait for.

    Args:
        group: what to move.
        regions: flat uint8 tensors (or numpy arrays); kept for the codec's life.
        threads: torch's thread count during a call. It is put back afterwards, because the engine's
            own work on this thread must not notice.

    Raises:
        LayoutError: a region is not flat bytes, or a segment leaves its region.
    """

    name = "torch"

    def __init__(self, group: Group, regions: Sequence[Region], threads: int = 1) -> None:
        self.group = group
        self._threads = threads
        tensors = [_flat_tensor(region) for region in regions]
        check_segments(group, [tensor.numel() for tensor in tensors])
        bound = [(tensors[segment.region], segment) for segment in group.segments]
        self._devices = {tensor.device for tensor, _ in bound if tensor.device.type != "cpu"}
        self._byte_views = [
            _view(tensor, segment, group.num_blocks, torch.uint8) for tensor, segment in bound
        ]
        self._word_views = [
            _view(tensor, segment, group.num_blocks, WORD) if _in_words(tensor, segment) else None
            for tensor, segment in bound
        ]

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        """See `kvstow.codec.base.Codec.gather`."""
        check_writable(target)
        ids = transfer_ids(self.group, blocks, target)
        check_range(self.group, ids)
        if not target.nbytes:
            return
        self._wait_for_devices()
        index = torch.frombuffer(ids, dtype=torch.int64)
        with _torch_threads(self._threads):
            for view, part in self._parts(target, len(ids)):
                if view.device.type == "cpu":
                    torch.index_select(view, 0, index, out=part)
                else:
                    part.copy_(torch.index_select(view, 0, index.to(view.device)))

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        """See `kvstow.codec.base.Codec.scatter`."""
        ids = transfer_ids(self.group, blocks, source, skip_blocks)
        check_range(self.group, ids, skip_blocks)
        if not source.nbytes or skip_blocks == len(ids):
            return
        self._wait_for_devices()
        index = torch.frombuffer(ids, dtype=torch.int64)[skip_blocks:]
        with _torch_threads(self._threads):
            for view, part in self._parts(source, len(ids)):
                view.index_copy_(0, index.to(view.device), part[skip_blocks:].to(view.device))
                if view.device.type != "cpu":
                    # The caller owns `source` again once this returns.
                    torch.accelerator.synchronize(view.device)

    def _wait_for_devices(self) -> None:
        """Return when nothing that was told to a device before still writes or reads there."""
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def _parts(self, payload: memoryview, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each segment's view, and its share of the payload in the same shape: [count, elements]."""
        flat = _payload_tensor(payload)
        at = 0
        for segment, bytes_view, words_view in zip(
            self.group.segments, self._byte_views, self._word_views, strict=True
        ):
            size = count * segment.block_bytes
            share = flat[at : at + size]
            at += size
            if words_view is not None and _starts_on_word(share):
                yield words_view, share.view(WORD).view(count, -1)
            else:
                yield bytes_view, share.view(count, -1)


def _starts_on_word(tensor: Tensor) -> bool:
    """True if torch can see the tensor's bytes as words where they lie."""
    return bool(tensor.data_ptr() % WORD.itemsize == 0 and tensor.storage_offset() % WORD.itemsize == 0)


def _in_words(tensor: Tensor, segment: Segment) -> bool:
    """True if every share of the segment starts and ends on a word."""
    places = (segment.offset_bytes, segment.block_stride_bytes, segment.block_bytes)
    return _starts_on_word(tensor) and all(place % WORD.itemsize == 0 for place in places)


def _view(tensor: Tensor, segment: Segment, num_blocks: int, dtype: torch.dtype) -> Tensor:
    """The segment's shares in engine memory: ``dtype`` [num_blocks, block_bytes / item size]."""
    size = dtype.itemsize
    flat = tensor[: tensor.numel() // size * size].view(dtype)
    return torch.as_strided(
        flat,
        (num_blocks, segment.block_bytes // size),
        (segment.block_stride_bytes // size, 1),
        flat.storage_offset() + segment.offset_bytes // size,
    )


def _flat_tensor(region: Region) -> Tensor:
    tensor = region if isinstance(region, torch.Tensor) else torch.from_numpy(region)
    if tensor.dim() != 1 or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise LayoutError(
            f"a region of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot be bound; pass a flat, "
            f"contiguous uint8 view of the tensor's storage"
        )
    return tensor.detach()


def _payload_tensor(payload: memoryview) -> Tensor:
    """uint8 over the payload's bytes, which outlive it: both live inside one call."""
    if payload.readonly:
        # torch warns of a read-only buffer although a scatter only reads it, so hand it the address.
        address = np.frombuffer(payload, np.uint8).ctypes.data
        return torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=torch.uint8)
    return torch.frombuffer(payload, dtype=torch.uint8)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Run torch with ``threads`` threads, then as before.

    OpenMP keeps the count per thread, so threads that already run torch do not see the change (one
    that starts to meanwhile begins with it). With the default count a transfer shares cores with the
    engine and was seen at a tenth of its speed.
    """
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
