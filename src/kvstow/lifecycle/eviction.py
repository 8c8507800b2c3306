"""Which frame to give up: least recently used, and never one that others still build on.

A chunk is worth nothing without the chunks before it, so a prefix is touched deepest chunk
first: every chunk is then at least as recent as all that follow it, and plain recency order
already lists the followers of a chunk before the chunk itself. What recency cannot know (pins,
a follower that is kept in another tier only) is asked of the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvstow.keys.ids import ChunkId

# A full scan of a tier whose every frame is pinned would make one save cost O(entries).
SCAN_MAX = 512


class RecencyOrder:
    """The frames of one tier and group, least recently used first. Not thread safe."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._order

    def add(self, chunk: ChunkId) -> None:
        """Enter ``chunk`` as the most recent."""
        self._order[chunk] = None
        self._order.move_to_end(chunk)

    def discard(self, chunk: ChunkId) -> None:
        """Forget ``chunk`` if it is there."""
        self._order.pop(chunk, None)

    def touch_prefix(self, deepest_first: Iterable[ChunkId]) -> None:
        """Make the chunks of one prefix the most recent, its first chunk the most of all."""
        order = self._order
        for chunk in deepest_first:
            if chunk in order:
                order.move_to_end(chunk)

    def demote(self, chunk: ChunkId) -> None:
        """Make ``chunk`` the least recent, if it is there."""
        if chunk in self._order:
            self._order.move_to_end(chunk, last=False)

    def victim(self, may_evict: Callable[[ChunkId], bool]) -> ChunkId | None:
        """The least recent chunk that ``may_evict`` allows, or None within `SCAN_MAX` tries.

        What it does not allow is in use, and counts as used: the next search begins behind it, and
        however many there are, all others are come to.
        """
        order = self._order
        for _ in range(min(SCAN_MAX, len(order))):
            chunk = next(iter(order))
            if may_evict(chunk):
                return chunk
            order.move_to_end(chunk)
        return None

    def oldest_first(self) -> list[ChunkId]:
        """All chunks, least recent first."""
        return list(self._order)
