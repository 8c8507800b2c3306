"""What the planner may do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstow.layout.geometry import BlockId
from kvstow.layout.resume import ResumeRule

BlockTables = Sequence[Sequence[BlockId]]
"""Block ids of a request, by group, in token order; `NO_BLOCK` where the engine keeps nothing."""


class PlannerLimits(msgspec.Struct, frozen=True):
    """What the planner may do.

    Attributes:
        chunk_tokens: tokens per chunk.
        rules: what a resume needs, by group.
        loads, saves: whether this engine reads and writes at all.
        min_load_tokens: smaller hits are recomputed.
        load_timeout_s: the workers' bound on a load. A rank that says nothing for twice that long,
            and for `kvstow.lifecycle.silence.SILENT_STEPS`, is taken for dead.
        pending_loads_max, pending_saves_max, pending_writes_max: jobs, chunks and frames in
            flight at once.
        disk_cooldown_s: how long nothing is promised from disk after it timed out.
    """

    chunk_tokens: int
    rules: tuple[ResumeRule, ...]
    loads: bool
    saves: bool
    min_load_tokens: int
    load_timeout_s: float
    pending_loads_max: int
    pending_saves_max: int
    pending_writes_max: int
    disk_cooldown_s: float
