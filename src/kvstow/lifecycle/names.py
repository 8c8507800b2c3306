"""What a rank calls its frames: in a store, in a header, and in a message."""

from __future__ import annotations

from kvstow.errors import InvariantError
from kvstow.keys.chain import frame_key
from kvstow.keys.ids import ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, GroupKind, Layout
from kvstow.stores.base import FrameName
from kvstow.stores.framing import FrameIdentity, FrameKind


class FrameNames:
    """The names of one rank's frames.

    Those of a replicated group have the first rank's names, on every rank.

    Args:
        rank: this rank.
        namespace: digest of this rank's namespace.
        layout: what the blocks look like.
        first_namespace: digest of the first rank's; needed only where a group is replicated.
    """

    def __init__(
        self,
        rank: Rank,
        namespace: NamespaceDigest,
        layout: Layout,
        first_namespace: NamespaceDigest | None = None,
    ) -> None:
        if first_namespace is None and rank and any(group.replicated for group in layout.groups):
            raise InvariantError(
                f"rank {rank} has replicated groups and is not told the first rank's namespace"
            )
        own, first = (rank, namespace), (Rank(0), first_namespace or namespace)
        self._owners = [first if group.replicated else own for group in layout.groups]
        self._kinds = [
            FrameKind.IMAGE if rule.kind is GroupKind.STATE else FrameKind.CHUNK for rule in layout.rules
        ]
        self._payload_bytes = [layout.payload_bytes(GroupId(index)) for index in range(len(layout.groups))]

    def name(self, ref: ChunkRef) -> FrameName:
        """What stores keep it under."""
        _, namespace = self._owners[ref.group]
        return FrameName(frame_key(namespace, ref.group, ref.chunk), ref)

    def payload_bytes(self, ref: ChunkRef) -> int:
        """Bytes of its payload."""
        return self._payload_bytes[ref.group]

    def identity(self, ref: ChunkRef) -> FrameIdentity:
        """What its header must say."""
        rank, namespace = self._owners[ref.group]
        return FrameIdentity(
            kind=self._kinds[ref.group],
            key=frame_key(namespace, ref.group, ref.chunk),
            namespace=namespace,
            rank=rank,
            payload_bytes=self._payload_bytes[ref.group],
        )


def shown(ref: ChunkRef) -> str:
    """``ref`` for people."""
    return f"chunk {ref.index} of group {ref.group} ({ref.chunk.hex()[:16]})"
