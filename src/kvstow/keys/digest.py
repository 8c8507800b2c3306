"""One way to hash: a domain, then parts, each with its length in front.

``digest(domain, a, b)`` is sha256 over ``frame(domain) frame(a) frame(b)``. Because every part
carries its length and the domain comes first, bytes cannot move from one part to its
neighbour, and no two uses of the hash can meet. Why sha256: docs/design/001-identity.md.
"""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 32

_LENGTH_BYTES = 8


def frame(part: bytes) -> bytes:
    """``part`` behind its length (8 bytes, little endian)."""
    return len(part).to_bytes(_LENGTH_BYTES, "little") + part


def digest(domain: bytes, *parts: bytes) -> bytes:
    """32 bytes that name these parts in this domain."""
    return hashlib.sha256(b"".join(map(frame, (domain, *parts)))).digest()
