"""The fake engine's blocks: reference counts, a free list in order of use, and its own prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvstow.layout.geometry import BlockId, GroupId

CacheKey = tuple[GroupId, int]
"""A group, and the identity of the last token that a whole block (or an image) covers."""


class BlockPool:
    """Block ids 0 .. num_blocks - 1, shared by all groups; a block has one group at a time.

    A block that is released keeps its content, and its place in the cache, until it is taken
    again: least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._free: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(block), None) for block in range(num_blocks)
        )
        self._cache: dict[CacheKey, BlockId] = {}
        self._keys: dict[BlockId, CacheKey] = {}
        self._fresh: list[BlockId] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def take(self, count: int) -> list[BlockId] | None:
        """So many blocks with one owner each, or None: all or nothing."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._uncache(block)
            self._owners[block] = 1
        self._fresh.extend(blocks)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more owner for blocks that the cache holds."""
        for block in blocks:
            self._owners[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One owner less; a prefix goes deepest block first, so that its start is kept longest."""
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise AssertionError(f"block {block} is released more often than it was taken")
            if not self._owners[block]:
                self._free[block] = None

    def cache(self, key: CacheKey, block: BlockId) -> None:
        """Offer a whole block for reuse; the first of equal content stays."""
        if key not in self._cache and block not in self._keys:
            self._cache[key] = block
            self._keys[block] = key

    def find(self, key: CacheKey) -> BlockId | None:
        """The block that holds this content."""
        return self._cache.get(key)

    def drop_cache(self) -> None:
        """Forget all cached content, as an engine does when it is told to reset its cache."""
        self._cache.clear()
        self._keys.clear()

    def take_fresh(self) -> list[BlockId]:
        """Blocks that got a new owner since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _uncache(self, block: BlockId) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._cache[key]
