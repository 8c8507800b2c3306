"""The C kernel as a codec: one pass, the GIL released, its own threads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import kvstow.codec._native as _native
from kvstow.codec.base import Region
from kvstow.codec.binding import check_segments, check_writable, host_bytes, transfer_ids
from kvstow.layout.geometry import BlockId, Group


class NativeCodec:
    """Copies with the C kernel. See `kvstow.codec.base.Codec`.

    Importing this module fails where the extension was not built; `kvstow.codec.select` asks.

    Args:
        group: what to move.
        regions: numpy arrays or CPU tensors, flat uint8; kept for the codec's life.
        threads: most threads that one call uses; a small transfer uses fewer. They belong to the
            call: no pool, and no thread count of any library, is touched.

    Raises:
        LayoutError: a region is not flat bytes in host memory, or a segment leaves its region.
    """

    name = "native"

    def __init__(self, group: Group, regions: Sequence[Region], threads: int = 1) -> None:
        self.group = group
        self._threads = threads
        self._regions = [host_bytes(region) for region in regions]
        check_segments(group, [region.size for region in self._regions])
        fields = array("q")
        for segment in group.segments:
            fields.extend(
                (segment.region, segment.offset_bytes, segment.block_stride_bytes, segment.block_bytes)
            )
        self._bound = _native.bind(self._regions, fields, group.num_blocks)

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        """See `kvstow.codec.base.Codec.gather`. Blocks its thread, not the interpreter."""
        check_writable(target)
        ids = transfer_ids(self.group, blocks, target)
        _native.gather(self._bound, ids, target, self._threads)

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        """See `kvstow.codec.base.Codec.scatter`. Blocks its thread, not the interpreter."""
        ids = transfer_ids(self.group, blocks, source, skip_blocks)
        _native.scatter(self._bound, ids, source, skip_blocks, self._threads)
