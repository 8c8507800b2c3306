"""What the planner may do, and the arithmetic of chunks and blocks that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstow.keys.ids import ChunkRef
from kvstow.layout.geometry import BlockId

BlockTables = Sequence[Sequence[BlockId]]
"""Block ids of a request, by group, in token order."""


class PlannerLimits(msgspec.Struct, frozen=True):
    """What the planner may do.

    Attributes:
        chunk_tokens: tokens per chunk.
        block_tokens: tokens per block, by group.
        loads, saves: whether this engine reads and writes at all.
        min_load_tokens: smaller hits are recomputed.
        load_timeout_s: the workers' bound on a load; the planner's own is twice that, so that
            it only ever speaks when a worker's report was lost.
        pending_loads_max, pending_saves_max, pending_writes_max: jobs, chunks and frames in
            flight at once.
        disk_cooldown_s: how long nothing is promised from disk after it timed out.
    """

    chunk_tokens: int
    block_tokens: tuple[int, ...]
    loads: bool
    saves: bool
    min_load_tokens: int
    load_timeout_s: float
    pending_loads_max: int
    pending_saves_max: int
    pending_writes_max: int
    disk_cooldown_s: float

    def chunk_blocks(self, blocks: BlockTables, ref: ChunkRef) -> tuple[BlockId, ...]:
        """The blocks of one chunk in its group's table."""
        per_chunk = self.chunk_tokens // self.block_tokens[ref.group]
        return tuple(blocks[ref.group][ref.index * per_chunk : (ref.index + 1) * per_chunk])

    def blocks_reach(self, blocks: BlockTables, stop: int) -> bool:
        """Whether every group's table covers the first ``stop`` chunks."""
        return len(blocks) == len(self.block_tokens) and all(
            len(table) * tokens >= stop * self.chunk_tokens
            for table, tokens in zip(blocks, self.block_tokens, strict=True)
        )
