"""Frames whose bytes are a function of their names, for contracts, benches and tests."""

from __future__ import annotations

import hashlib
import mmap

from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef, Key, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import FrameName
from kvstow.stores.framing import FrameIdentity, FrameKind, frame_bytes, open_frame, payload_of, seal

NAMESPACE = NamespaceDigest(hashlib.sha256(b"namespace of the store contract").digest())
RANK = Rank(3)
PAYLOAD_BYTES = 70_000
"""Not a multiple of a page, so that every frame has padding."""

GROUP = GroupId(0)


def sample_name(index: int, group: GroupId = GROUP) -> FrameName:
    """A frame's name: chunk ``index`` of one prompt that all samples share."""
    key = Key(hashlib.sha256(b"key %d %d" % (group, index)).digest())
    parent = _chunk(index - 1) if index else ROOT_CHUNK
    return FrameName(key, ChunkRef(group, index, _chunk(index), parent))


def sample_identity(name: FrameName, payload_bytes: int = PAYLOAD_BYTES) -> FrameIdentity:
    """What a frame stored under ``name`` must be."""
    return FrameIdentity(FrameKind.CHUNK, name.key, NAMESPACE, RANK, payload_bytes)


def sample_payload(name: FrameName, payload_bytes: int = PAYLOAD_BYTES, version: int = 0) -> bytes:
    """Bytes that are a function of the name and of ``version``, and of nothing else."""
    seed = name.key + version.to_bytes(8, "little")
    return hashlib.shake_256(seed).digest(payload_bytes)


def sample_frame(name: FrameName, payload_bytes: int = PAYLOAD_BYTES, version: int = 0) -> memoryview:
    """A sealed frame in page-aligned memory of its own."""
    frame = blank_frame(payload_bytes)
    payload_of(frame, payload_bytes)[:] = sample_payload(name, payload_bytes, version)
    seal(frame, sample_identity(name, payload_bytes))
    return frame


def blank_frame(payload_bytes: int = PAYLOAD_BYTES) -> memoryview:
    """Page-aligned zeroes [``frame_bytes(payload_bytes)``], to read into."""
    return memoryview(mmap.mmap(-1, frame_bytes(payload_bytes)))


def opened(frame: memoryview, name: FrameName) -> bytes:
    """The payload of a sample's frame, verified.

    Raises:
        CorruptFrameError: it is not the frame of ``name``, whole and with `PAYLOAD_BYTES` of payload.
    """
    return bytes(open_frame(frame, sample_identity(name)))


def _chunk(index: int) -> ChunkId:
    return ChunkId(hashlib.sha256(b"chunk %d" % index).digest())
