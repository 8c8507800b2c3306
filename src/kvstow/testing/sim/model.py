"""The models of the simulator: groups of a kind, a page for each block, a few words for each token."""

from __future__ import annotations

import math

import msgspec

from kvstow.layout.geometry import Group, GroupId, GroupKind, Layout, RegionId, Segment

WORD_BYTES = 8
_GAP_WORDS = 1


class SimGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    Attributes:
        kind: what a resume needs.
        block_tokens: tokens per block.
        layers: each has one word per token, or one per image in a STATE group.
        window_tokens: of a WINDOW group, else 0.
        replicated: every rank computes the same words.
    """

    kind: GroupKind
    block_tokens: int
    layers: int
    window_tokens: int = 0
    replicated: bool = False

    @property
    def block_words(self) -> int:
        """Words of one block."""
        return self.layers if self.kind is GroupKind.STATE else self.layers * self.block_tokens


class SimModel(msgspec.Struct, frozen=True):
    """Groups, and the chunk that is stored."""

    groups: tuple[SimGroup, ...]
    chunk_tokens: int

    @property
    def unit_tokens(self) -> int:
        """Where every group's blocks end together."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def state_tokens(self) -> int:
        """The image grid; 0 without a state group."""
        sizes = [group.block_tokens for group in self.groups if group.kind is GroupKind.STATE]
        return math.lcm(*sizes) if sizes else 0

    @property
    def page_words(self) -> int:
        """Words of one block's page: all groups overlay the same pages, with a gap between pages."""
        return max(group.block_words for group in self.groups) + _GAP_WORDS

    def layout(self, num_blocks: int) -> Layout:
        """The layout that a worker measures."""
        return Layout(
            tuple(self._group(index, group, num_blocks) for index, group in enumerate(self.groups)),
            self.chunk_tokens,
        )

    def _group(self, index: int, group: SimGroup, num_blocks: int) -> Group:
        share_bytes = group.block_words // group.layers * WORD_BYTES
        segments = tuple(
            Segment(
                f"layers.{layer}",
                RegionId(0),
                layer * share_bytes,
                self.page_words * WORD_BYTES,
                share_bytes,
            )
            for layer in range(group.layers)
        )
        return Group(
            GroupId(index),
            group.kind,
            group.block_tokens,
            num_blocks,
            "uint64",
            segments,
            group.window_tokens,
            group.replicated,
        )
