"""The codec contract: blocks of engine memory <-> one flat payload, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvstow.layout.geometry import BlockId, Group

# A region as a codec takes it: a flat one-dimensional uint8 torch tensor or numpy array over
# engine memory. `Any`, because torch is imported only inside the codecs that need it.
Region = Any


class Codec(Protocol):
    """Moves one group's blocks to and from flat buffers.

    A codec is bound to a group and to its regions when it is made. It asks nothing about
    what the bytes mean. Any thread may call it; calls do not share state.
    """

    name: str
    group: Group

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        """Copy ``blocks`` out of engine memory into ``target``.

        Args:
            blocks: block ids, in payload order.
            target: writable, C-contiguous, exactly ``len(blocks) * group.block_bytes``
                bytes, laid out as `kvstow.layout.geometry` says (segment-major).

        Raises:
            ValueError: wrong size, or a block id outside ``[0, group.num_blocks)``.
        """
        ...

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        """Copy a payload back into engine memory.

        Args:
            blocks: block ids of the whole payload, in payload order.
            source: exactly ``len(blocks) * group.block_bytes`` bytes.
            skip_blocks: leave the first so many blocks of ``blocks`` untouched (they lie
                under the engine's floor and may be shared with other requests; their ids are
                not even checked).

        Raises:
            ValueError: wrong size, or a block id outside ``[0, group.num_blocks)``.
        """
        ...
