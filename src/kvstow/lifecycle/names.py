"""What a rank calls its frames: in a store, in a header, and in a message."""

from __future__ import annotations

from kvstow.keys.chain import frame_key
from kvstow.keys.ids import ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, GroupKind, Layout
from kvstow.stores.base import FrameName
from kvstow.stores.framing import FrameIdentity, FrameKind


class FrameNames:
    """The names of one rank's frames.

    Args:
        rank: this rank.
        namespace: digest of this rank's namespace.
        layout: what the blocks look like.
    """

    def __init__(self, rank: Rank, namespace: NamespaceDigest, layout: Layout) -> None:
        self._rank = rank
        self._namespace = namespace
        self._kinds = [
            FrameKind.IMAGE if rule.kind is GroupKind.STATE else FrameKind.CHUNK for rule in layout.rules
        ]
        self._payload_bytes = [layout.payload_bytes(GroupId(index)) for index in range(len(layout.groups))]

    def name(self, ref: ChunkRef) -> FrameName:
        """What stores keep it under."""
        return FrameName(frame_key(self._namespace, ref.group, ref.chunk), ref)

    def payload_bytes(self, ref: ChunkRef) -> int:
        """Bytes of its payload."""
        return self._payload_bytes[ref.group]

    def identity(self, ref: ChunkRef) -> FrameIdentity:
        """What its header must say."""
        return FrameIdentity(
            kind=self._kinds[ref.group],
            key=frame_key(self._namespace, ref.group, ref.chunk),
            namespace=self._namespace,
            rank=self._rank,
            payload_bytes=self._payload_bytes[ref.group],
        )


def shown(ref: ChunkRef) -> str:
    """``ref`` for people."""
    return f"chunk {ref.index} of group {ref.group} ({ref.chunk.hex()[:16]})"
