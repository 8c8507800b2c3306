"""The oracle: the plainest codec that can be right. Slow; tests compare the others with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstow.codec.base import Region
from kvstow.codec.binding import check_range, check_segments, check_writable, host_bytes, transfer_ids
from kvstow.layout.geometry import BlockId, Group

Bytes = npt.NDArray[np.uint8]


class ReferenceCodec:
    """Copies block by block with numpy. See `kvstow.codec.base.Codec`.

    Args:
        group: what to move.
        regions: numpy arrays or CPU tensors, flat uint8; kept for the codec's life.

    Raises:
        LayoutError: a region is not flat bytes in host memory, or a segment leaves its region.
    """

    name = "reference"

    def __init__(self, group: Group, regions: Sequence[Region]) -> None:
        self.group = group
        self._regions = [host_bytes(region) for region in regions]
        check_segments(group, [region.size for region in self._regions])

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        """See `kvstow.codec.base.Codec.gather`."""
        check_writable(target)
        check_range(self.group, transfer_ids(self.group, blocks, target))
        for _, in_engine, in_payload in self._pairs(blocks, np.frombuffer(target, np.uint8)):
            in_payload[:] = in_engine

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        """See `kvstow.codec.base.Codec.scatter`."""
        check_range(self.group, transfer_ids(self.group, blocks, source, skip_blocks), skip_blocks)
        for index, in_engine, in_payload in self._pairs(blocks, np.frombuffer(source, np.uint8)):
            if index >= skip_blocks:
                in_engine[:] = in_payload

    def _pairs(self, blocks: Sequence[BlockId], payload: Bytes) -> Iterator[tuple[int, Bytes, Bytes]]:
        """Each share of each block: its index in ``blocks``, its engine bytes, its payload bytes."""
        at = 0
        for segment in self.group.segments:
            size = segment.block_bytes
            for index, block in enumerate(blocks):
                start = segment.offset_bytes + block * segment.block_stride_bytes
                yield index, self._regions[segment.region][start : start + size], payload[at : at + size]
                at += size
