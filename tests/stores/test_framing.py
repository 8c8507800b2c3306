"""Frames: what was sealed opens, and nothing else does."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import CorruptFrameError, InvariantError
from kvstow.keys.ids import Key, NamespaceDigest, Rank
from kvstow.stores.framing import (
    HEADER_BYTES,
    FrameIdentity,
    FrameKind,
    frame_bytes,
    open_frame,
    payload_of,
    seal,
)

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_V1 = FrameIdentity(
    kind=FrameKind.CHUNK,
    key=Key(bytes(range(32))),
    namespace=NamespaceDigest(bytes(range(100, 132))),
    rank=Rank(7),
    payload_bytes=5000,
)
GOLDEN_V1_PAYLOAD = bytes(i * i % 251 for i in range(5000))


def sealed(payload: bytes, identity: FrameIdentity = GOLDEN_V1) -> memoryview:
    identity = msgspec.structs.replace(identity, payload_bytes=len(payload))
    # Not zero before: padding must be cleared.
    frame = memoryview(bytearray(b"\xee" * frame_bytes(len(payload))))
    payload_of(frame, len(payload))[:] = payload
    seal(frame, identity)
    return frame


@given(st.integers(0, 1 << 40))
def test_a_frame_is_the_header_and_whole_pages(payload_bytes: int) -> None:
    size = frame_bytes(payload_bytes)
    assert size % HEADER_BYTES == 0
    assert 0 <= size - HEADER_BYTES - payload_bytes < HEADER_BYTES


@given(st.binary(max_size=9000))
def test_what_was_sealed_opens(payload: bytes) -> None:
    identity = msgspec.structs.replace(GOLDEN_V1, payload_bytes=len(payload))
    assert open_frame(sealed(payload), identity) == payload


def test_open_gives_a_view_and_not_a_copy() -> None:
    frame = sealed(GOLDEN_V1_PAYLOAD)
    payload = open_frame(frame, GOLDEN_V1)
    frame[HEADER_BYTES] ^= 1
    assert payload[0] == GOLDEN_V1_PAYLOAD[0] ^ 1


def test_every_byte_of_header_and_padding_counts() -> None:
    frame = sealed(GOLDEN_V1_PAYLOAD)
    for position in [*range(HEADER_BYTES), *range(HEADER_BYTES + 5000, len(frame))]:
        frame[position] ^= 0x10
        with pytest.raises(CorruptFrameError, match="remove the frame and recompute"):
            open_frame(frame, GOLDEN_V1)
        frame[position] ^= 0x10
    open_frame(frame, GOLDEN_V1)


@given(st.integers(0, 4999), st.integers(0, 7))
def test_every_bit_of_the_payload_counts(position: int, bit: int) -> None:
    frame = sealed(GOLDEN_V1_PAYLOAD)
    frame[HEADER_BYTES + position] ^= 1 << bit
    with pytest.raises(CorruptFrameError, match="payload checksum"):
        open_frame(frame, GOLDEN_V1)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("rank", {"rank": Rank(8)}),
        ("payload bytes", {"payload_bytes": 5001}),
        ("key", {"key": Key(bytes(32))}),
        ("namespace", {"namespace": NamespaceDigest(bytes(32))}),
        ("kind", {"kind": 2}),
        ("frame bytes", {"payload_bytes": 50_000}),
    ],
)
def test_a_frame_of_something_else_is_refused_by_name(field: str, change: dict[str, object]) -> None:
    other = msgspec.structs.replace(GOLDEN_V1, **change)
    with pytest.raises(CorruptFrameError, match=f"^{field}: .* found, .* wanted"):
        open_frame(sealed(GOLDEN_V1_PAYLOAD), other)


@pytest.mark.parametrize(("field", "position"), [("magic", 0), ("version", 8), ("header checksum", 96)])
def test_a_frame_of_another_format_is_refused_by_name(field: str, position: int) -> None:
    frame = sealed(GOLDEN_V1_PAYLOAD)
    frame[position] += 1
    with pytest.raises(CorruptFrameError, match=f"^{field}: .* found, .* wanted"):
        open_frame(frame, GOLDEN_V1)


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, 2 * HEADER_BYTES, 4 * HEADER_BYTES])
def test_a_truncated_or_longer_frame_is_refused(size: int) -> None:
    frame = memoryview(bytes(sealed(GOLDEN_V1_PAYLOAD)).ljust(size, b"\0")[:size])
    with pytest.raises(CorruptFrameError, match=f"frame bytes: {size} found, 12288 wanted"):
        open_frame(frame, GOLDEN_V1)


@pytest.mark.parametrize(
    "change",
    [
        {"payload_bytes": 20_000},
        {"payload_bytes": -1},
        {"key": Key(b"short")},
        {"namespace": NamespaceDigest(bytes(33))},
        {"rank": Rank(-1)},
    ],
)
def test_seal_refuses_what_does_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(InvariantError):
        seal(sealed(GOLDEN_V1_PAYLOAD), msgspec.structs.replace(GOLDEN_V1, **change))


def test_golden_v1_stays_readable() -> None:
    stored = (GOLDEN / "v1" / "chunk.frame").read_bytes()
    assert open_frame(memoryview(stored), GOLDEN_V1) == GOLDEN_V1_PAYLOAD
    assert bytes(sealed(GOLDEN_V1_PAYLOAD)) == stored


def test_golden_v1_is_laid_out_as_documented() -> None:
    # By hand, from the table in framing's docstring; checksums from `xxhsum -H3` 0.8.1.
    stored = (GOLDEN / "v1" / "chunk.frame").read_bytes()
    expected = b"KVSTOW\r\n" + struct.pack("<HHIQ", 1, 1, 7, 5000)
    expected += bytes.fromhex("924c0d5e41418245")[::-1]
    expected += bytes(range(32)) + bytes(range(100, 132))
    expected += bytes.fromhex("2c44ea99834fd619")[::-1]
    assert stored[:104] == expected
    assert stored[104:4096] == bytes(3992)
    assert stored[4096:] == GOLDEN_V1_PAYLOAD + bytes(2 * 4096 - 5000)
