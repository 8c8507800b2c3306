"""The digest that says whether two layouts' payloads mean the same."""

from __future__ import annotations

import hashlib
import json

from kvstow.layout.geometry import Layout

FORMAT = "kvstow layout 1"
"""Goes into every digest; a change of what is digested is a new number."""


def layout_digest(layout: Layout) -> bytes:
    """32 bytes: sha256 over canonical JSON of all that decides what a payload's bytes mean.

    In it: chunk tokens; every group in order, with its index, kind, block tokens, window and dtype;
    every segment in order, with its block bytes and how the elements lie inside the block
    (`Segment.inner`: dtype, shape and strides there, so that K before V and V before K, or tokens
    before heads and heads before tokens, do not meet).

    Not in it: what changes with the size or place of the pool and not with the payload (number of
    blocks, block stride, offsets, regions), and names, which are for people: a layer is known by its
    place in the order, and the model by the namespace that this digest goes into.
    """
    form = {
        "format": FORMAT,
        "chunk_tokens": layout.chunk_tokens,
        "groups": [
            {
                "group": group.group,
                "kind": group.kind.value,
                "block_tokens": group.block_tokens,
                "window_tokens": group.window_tokens,
                "dtype": group.dtype,
                "segments": [[segment.block_bytes, segment.inner] for segment in group.segments],
            }
            for group in layout.groups
        ],
    }
    canonical = json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).digest()
