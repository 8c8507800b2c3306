"""What a resume at a boundary needs of a group, and which blocks that is: all in one place.

Boundaries are counted in chunks here: boundary ``b`` is the token ``b * chunk_tokens``, the end
of chunk ``b - 1``. A frame is named by the chunk at whose end it becomes whole:

========  ==============================  ==============================================
kind      boundary ``b`` needs            the frame of chunk ``i`` is
========  ==============================  ==============================================
PAGED     every chunk before it           all blocks of the chunk
WINDOW    chunks that reach into          the chunk's last blocks, as many as a window that
          ``window_tokens`` before it     ends with the chunk can reach
STATE     one image taken exactly there   the one block that holds the state at the chunk's end
========  ==============================  ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstow.errors import ConfigError
from kvstow.layout.ids import BlockId, GroupKind


class ResumeRule(msgspec.Struct, frozen=True):
    """The rule of one group. Making one that makes no sense raises ConfigError.

    Attributes:
        kind: what a resume needs.
        block_tokens: tokens per block.
        chunk_tokens: tokens per chunk; a multiple of ``block_tokens``.
        window_tokens: how far a WINDOW group looks back from a boundary, else 0.
    """

    kind: GroupKind
    block_tokens: int
    chunk_tokens: int
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ConfigError(f"block_tokens={self.block_tokens} of a {self.kind} group; use 1 or more")
        if self.chunk_tokens <= 0 or self.chunk_tokens % self.block_tokens:
            below = self.chunk_tokens // self.block_tokens * self.block_tokens
            use = f"{below} or {below + self.block_tokens}" if below > 0 else f"{self.block_tokens}"
            raise ConfigError(
                f"chunk_tokens={self.chunk_tokens} is not a multiple of block_tokens={self.block_tokens}; "
                f"use {use}"
            )
        if self.kind is GroupKind.WINDOW and self.window_tokens <= 0:
            raise ConfigError(f"window_tokens={self.window_tokens} of a window group; use 1 or more")
        if self.kind is not GroupKind.WINDOW and self.window_tokens:
            raise ConfigError(f"window_tokens={self.window_tokens} of a {self.kind} group; use 0")

    @property
    def reach_chunks(self) -> int | None:
        """How many chunks before a boundary are needed there; None: all of them."""
        if self.kind is GroupKind.PAGED:
            return None
        return -(-self.window_tokens // self.chunk_tokens) if self.kind is GroupKind.WINDOW else 1

    def needed(self, boundary: int) -> range:
        """Indexes of the chunks whose frames a resume at ``boundary`` needs.

        Args:
            boundary: in chunks, 1 or more.
        """
        reach = self.reach_chunks
        return range(0 if reach is None else max(0, boundary - reach), boundary)

    @property
    def frame_blocks(self) -> int:
        """Blocks in one frame.

        A WINDOW frame has no more than the window is long: every boundary that asks for the
        chunk is at its end or later, and from there the window does not reach further back.
        """
        if self.kind is GroupKind.STATE:
            return 1
        per_chunk = self.chunk_tokens // self.block_tokens
        if self.kind is GroupKind.PAGED:
            return per_chunk
        return min(per_chunk, -(-self.window_tokens // self.block_tokens))

    def frame_table(self, table: Sequence[BlockId], index: int) -> tuple[BlockId, ...]:
        """The blocks of the frame of chunk ``index``, in token order.

        Args:
            table: the request's blocks of this group, from its first token on.
            index: the chunk's.

        Returns:
            `frame_blocks` of them, `NO_BLOCK` among them where the engine keeps nothing; fewer
            if the table does not reach the chunk's end.
        """
        stop = (index + 1) * self.chunk_tokens // self.block_tokens
        return tuple(table[stop - self.frame_blocks : stop])

    def blocks_below(self, index: int, floor: int) -> int:
        """How many leading blocks of the frame of chunk ``index`` hold only tokens before ``floor``.

        Args:
            index: the chunk's.
            floor: tokens that the engine has itself, not past the chunk's end.
        """
        if self.kind is GroupKind.STATE:
            # A state is of its boundary, not of the tokens that its block is said to cover.
            return 0
        first_token = (index + 1) * self.chunk_tokens - self.frame_blocks * self.block_tokens
        return max(0, (floor - first_token) // self.block_tokens)
