"""What an engine's KV memory looks like, as plain frozen data (no torch, no addresses).

A *region* is one contiguous stretch of engine memory (a tensor's storage), seen as bytes.
A *segment* is one tensor's share of every block of a group: where block 0's share starts in
its region, how far apart blocks are, and how many bytes each block holds there. A *group* is
the ordered segments that share a block table. A *layout* is the groups.

A frame's payload (`kvstow.layout.resume` says which blocks are in it) is segment-major::

    segment 0: block 0, block 1, ... | segment 1: block 0, block 1, ... | ...

so the byte offset of block ``j`` of segment ``s`` in a frame of ``n`` blocks is
``n * sum(block_bytes of segments before s) + j * block_bytes[s]``.
"""

from __future__ import annotations

import msgspec

from kvstow.layout.ids import NO_BLOCK, BlockId, GroupId, GroupKind, RegionId
from kvstow.layout.resume import ResumeRule

__all__ = ["NO_BLOCK", "BlockId", "Group", "GroupId", "GroupKind", "Layout", "RegionId", "Segment"]


class Segment(msgspec.Struct, frozen=True):
    """One tensor's share of a block, in bytes.

    Attributes:
        name: the layer (and part, such as ``/k``) it belongs to; for logs and errors only.
        region: index of the region that holds it.
        offset_bytes: where block 0's share starts in the region.
        block_stride_bytes: distance between the shares of consecutive blocks.
        block_bytes: length of each share; a contiguous run.
        inner: how the elements lie inside the share (dtype, shape, strides), in the compact form
            of `kvstow.layout.discover`; part of the digest, "" where nobody described it.
    """

    name: str
    region: RegionId
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    inner: str = ""


class Group(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    Attributes:
        group: the group's index in the engine.
        kind: what a resume needs of it.
        block_tokens: tokens per block.
        num_blocks: blocks that the engine's memory holds.
        dtype: the engine's name for the element type; part of the digest.
        segments: in numeric layer order.
        window_tokens: the window of a WINDOW group, else 0.
        replicated: every rank of the engine holds the same bytes: one stored copy serves all.
    """

    group: GroupId
    kind: GroupKind
    block_tokens: int
    num_blocks: int
    dtype: str
    segments: tuple[Segment, ...]
    window_tokens: int = 0
    replicated: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all segments."""
        return sum(segment.block_bytes for segment in self.segments)


class Layout(msgspec.Struct, frozen=True):
    """All groups of one rank and the chunk that keys and stores them."""

    groups: tuple[Group, ...]
    chunk_tokens: int

    @property
    def replicated(self) -> frozenset[GroupId]:
        """The groups of which every rank holds the same bytes."""
        return frozenset(group.group for group in self.groups if group.replicated)

    def rule(self, group: GroupId) -> ResumeRule:
        """What a resume needs of ``group``; raises ConfigError if that makes no sense."""
        found = self.groups[group]
        return ResumeRule(found.kind, found.block_tokens, self.chunk_tokens, found.window_tokens)

    @property
    def rules(self) -> tuple[ResumeRule, ...]:
        """The rules of all groups, by group."""
        return tuple(self.rule(GroupId(index)) for index in range(len(self.groups)))

    def payload_bytes(self, group: GroupId) -> int:
        """Bytes of one frame's payload of ``group`` on this rank."""
        return self.rule(group).frame_blocks * self.groups[group].block_bytes
