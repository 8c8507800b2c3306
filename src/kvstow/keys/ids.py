"""The names by which content is known: chunk ids, frame keys, and what identifies a frame."""

from __future__ import annotations

from typing import NewType

import msgspec

from kvstow.layout.geometry import GroupId

Rank = NewType("Rank", int)
"""A worker's index in its engine, 0 .. world size - 1."""

ChunkId = NewType("ChunkId", bytes)
"""32 bytes naming a prefix up to and including one chunk: tokens and extras, chained. The same
on every rank and in every namespace."""

Key = NewType("Key", bytes)
"""32 bytes naming one frame: H(namespace, group, rank, chunk id)."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes over all that must agree before bytes are shared."""

ROOT_CHUNK = ChunkId(bytes(32))
"""The parent of a prompt's first chunk."""


class ChunkRef(msgspec.Struct, frozen=True):
    """One chunk of one group, and its place in its prefix.

    Attributes:
        group: the group whose blocks it holds.
        index: 0 for the first chunk of a prompt.
        chunk: the chunk's id.
        parent: the id of the chunk before it, or `ROOT_CHUNK`.
    """

    group: GroupId
    index: int
    chunk: ChunkId
    parent: ChunkId
