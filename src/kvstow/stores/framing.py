"""The stored form of a chunk or an image: a fixed header, then the payload.

::

    offset size  field            (little endian)
    0      8     magic            b"KVSTOW\\r\\n"
    8      2     version          1
    10     2     kind             1 = blocks of a chunk, 2 = image of a state
    12     4     rank
    16     8     payload bytes
    24     8     xxh3-64 of the payload
    32     32    key
    64     32    namespace digest
    96     8     xxh3-64 of bytes 0..96
    104    ..    zero, up to HEADER_BYTES

The header is `HEADER_BYTES` long and the whole frame is padded to a multiple of it, so that a
frame in page-aligned memory can be written with O_DIRECT as it is. Design:
docs/design/002-stored-form.md.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec
import xxhash

from kvstow.errors import CorruptFrameError, InvariantError
from kvstow.keys.ids import Key, NamespaceDigest, Rank

HEADER_BYTES = 4096
"""Length of the header, and what the length of a frame is a multiple of."""

MAGIC = b"KVSTOW\r\n"
VERSION = 1

_FIELDS = struct.Struct("<8sHHIQQ32s32s")
_CHECKSUM = struct.Struct("<Q")
_USED_BYTES = _FIELDS.size + _CHECKSUM.size
_ZEROS = bytes(HEADER_BYTES)


class FrameKind(IntEnum):
    """What a frame's payload is."""

    CHUNK = 1  # tokens' keys and values, of a paged or a window group
    IMAGE = 2  # a state group's state at the end of the chunk that names it


class FrameIdentity(msgspec.Struct, frozen=True):
    """All that a frame must agree with before its payload may be used.

    Attributes:
        kind: what the payload is.
        key: names the content.
        namespace: digest of all that must agree before bytes are shared.
        rank: the worker whose share of the blocks it holds.
        payload_bytes: length of the payload, without header and padding.
    """

    kind: FrameKind
    key: Key
    namespace: NamespaceDigest
    rank: Rank
    payload_bytes: int


def frame_bytes(payload_bytes: int) -> int:
    """Length of the frame of a payload: the header, and the payload rounded up to `HEADER_BYTES`."""
    if payload_bytes < 0:
        raise InvariantError(f"payload_bytes={payload_bytes} is negative; a payload has 0 bytes or more")
    return HEADER_BYTES + -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES


def payload_of(frame: memoryview, payload_bytes: int) -> memoryview:
    """The payload's place in ``frame``, a view without a copy; valid as long as the frame's memory."""
    return frame[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(frame: memoryview, identity: FrameIdentity) -> None:
    """Make a frame of a payload that is already in place (see `payload_of`).

    Writes the header and zeroes the padding. Any thread may call it, one per frame; it does not
    block, and the checksum runs without the GIL.

    Args:
        frame: writable bytes [``frame_bytes(identity.payload_bytes)``]; the caller keeps it.
        identity: what a reader will ask for.

    Raises:
        InvariantError: ``frame`` has another length, or the identity does not fit the header.
    """
    whole_bytes = frame_bytes(identity.payload_bytes)
    if len(frame) != whole_bytes:
        raise InvariantError(
            f"frame: {len(frame)} bytes given, {whole_bytes} needed for "
            f"payload_bytes={identity.payload_bytes}; size it with frame_bytes()"
        )
    if len(identity.key) != 32 or len(identity.namespace) != 32 or not 0 <= identity.rank < 1 << 32:
        raise InvariantError(
            f"key of {len(identity.key)} bytes, digest of {len(identity.namespace)}, rank {identity.rank}; "
            "the header needs 32, 32, and a rank below 2**32"
        )
    payload_end = HEADER_BYTES + identity.payload_bytes
    checksum = xxhash.xxh3_64_intdigest(frame[HEADER_BYTES:payload_end])
    header = _FIELDS.pack(
        MAGIC,
        VERSION,
        identity.kind,
        identity.rank,
        identity.payload_bytes,
        checksum,
        identity.key,
        identity.namespace,
    )
    frame[: _FIELDS.size] = header
    frame[_FIELDS.size : _USED_BYTES] = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
    frame[_USED_BYTES:HEADER_BYTES] = _ZEROS[_USED_BYTES:]
    frame[payload_end:] = _ZEROS[: whole_bytes - payload_end]


def open_frame(frame: memoryview, identity: FrameIdentity) -> memoryview:
    """Verify a frame and give its payload: every field of the header, every byte of the rest.

    Any thread may call it; it does not block, and the checksum runs without the GIL.

    Args:
        frame: bytes as read from a store; the caller keeps it.
        identity: what the frame must be.

    Returns:
        The payload, a view into ``frame``.

    Raises:
        CorruptFrameError: the first thing that is not as ``seal`` left it, with both values.
    """
    _agree("frame bytes", len(frame), frame_bytes(identity.payload_bytes))
    header = bytes(frame[: _FIELDS.size])
    magic, version, kind, rank, payload_bytes, checksum, key, namespace = _FIELDS.unpack(header)
    _agree("magic", magic, MAGIC)
    _agree("version", version, VERSION)
    (header_checksum,) = _CHECKSUM.unpack(frame[_FIELDS.size : _USED_BYTES])
    _agree("header checksum", header_checksum, xxhash.xxh3_64_intdigest(header))
    _agree("kind", kind, int(identity.kind))
    _agree("rank", rank, identity.rank)
    _agree("payload bytes", payload_bytes, identity.payload_bytes)
    _agree("key", key, identity.key)
    _agree("namespace", namespace, identity.namespace)
    _agree_zero("header rest", frame[_USED_BYTES:HEADER_BYTES])
    payload = payload_of(frame, identity.payload_bytes)
    _agree_zero("padding", frame[HEADER_BYTES + identity.payload_bytes :])
    actual = xxhash.xxh3_64_intdigest(payload)
    if actual != checksum:
        raise CorruptFrameError(
            f"payload checksum: {checksum:#018x} in the header, {actual:#018x} over {len(payload)} bytes of "
            "payload; remove the frame and recompute"
        )
    return payload


def _agree(field: str, found: int | bytes, wanted: int | bytes) -> None:
    if found != wanted:
        raise CorruptFrameError(
            f"{field}: {_shown(found)} found, {_shown(wanted)} wanted; remove the frame and recompute"
        )


def _agree_zero(field: str, rest: memoryview) -> None:
    if rest != _ZEROS[: len(rest)]:
        first = next(i for i, byte in enumerate(rest) if byte)
        raise CorruptFrameError(
            f"{field}: byte {first} of {len(rest)} is {rest[first]}, 0 wanted; remove the frame and recompute"
        )


def _shown(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
