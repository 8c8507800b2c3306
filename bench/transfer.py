"""Arena save and load against a C loop of memcpy: ``python bench/transfer.py [--json FILE]``.

As a worker does them, a chunk at a time on one thread: a save gathers blocks straight into an arena
slot and seals the frame; a load verifies the frame and scatters straight into blocks. The loop
copies the same blocks to and from the same slots and does nothing else. The rows without a
checksum say what it costs; kvstow never leaves it out. Blocks are in random order; pool and arena
are far larger than the caches. Contenders take turns; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import kvstow.codec._native as _native
from gather import pages
from kvstow.codec.select import make_codec
from kvstow.keys.chain import frame_key
from kvstow.keys.ids import ChunkId, NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, RegionId, Segment
from kvstow.stores.arena import Arena
from kvstow.stores.framing import FrameIdentity, FrameKind, frame_bytes, open_frame, payload_of, seal
from report import emit
from rounds import NO_TARGET, at_least, interleave, spread

MIB = 1 << 20
CHUNK_TOKENS = 256
TARGET = 0.85
GROUP = GroupId(0)
NAMESPACE = NamespaceDigest(bytes(32))


@dataclass(frozen=True)
class Model:
    """What decides the sizes of a dense model's blocks; two bytes an element, K and V."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int

    @property
    def share_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return 2 * self.block_tokens * self.kv_heads * self.head_size * 2


MODELS = (Model("SmolLM2-135M", 30, 3, 64, 32), Model("Llama-8B-like", 32, 8, 128, 16))


class Subject:
    """The engine's blocks and an arena of ``chunks`` slots, and every way to copy all of it."""

    def __init__(self, model: Model, chunks: int, codec: str) -> None:
        per_chunk = CHUNK_TOKENS // model.block_tokens
        num_blocks = 2 * chunks * per_chunk
        share = model.share_bytes
        segments = tuple(
            Segment(f"layers.{layer}", RegionId(0), layer * num_blocks * share, share, share)
            for layer in range(model.layers)
        )
        group = Group(GROUP, GroupKind.PAGED, model.block_tokens, num_blocks, "bfloat16", segments)
        region: npt.NDArray[np.uint8] = pages(model.layers * num_blocks * share)
        blocks = random.sample(range(num_blocks), chunks * per_chunk)
        self._blocks = [
            [BlockId(block) for block in blocks[first : first + per_chunk]]
            for first in range(0, len(blocks), per_chunk)
        ]
        self._ids = [array("q", chunk) for chunk in self._blocks]
        self._refs = [ChunkId(hashlib.sha256(b"%d" % index).digest()) for index in range(chunks)]
        self._codec = make_codec(group, [region], 1, codec)
        fields = array("q")
        for segment in segments:
            fields.extend((0, segment.offset_bytes, segment.block_stride_bytes, segment.block_bytes))
        self._bound = _native.bind([region], fields, num_blocks)
        self.payload_bytes = per_chunk * group.block_bytes
        self.size_bytes = chunks * self.payload_bytes
        self._arena = Arena((chunks,), (frame_bytes(self.payload_bytes),), staging_frames=0)
        self._arena.prefault(8 * MIB)
        self._arena.wait_prefaulted(600.0)

    def save(self) -> None:
        """Gather and seal every chunk."""
        for slot, blocks in enumerate(self._blocks):
            frame = self._arena.frame(GROUP, slot)
            self._codec.gather(blocks, payload_of(frame, self.payload_bytes))
            seal(frame, self._identity(slot))

    def load(self) -> None:
        """Verify and scatter every chunk."""
        for slot, blocks in enumerate(self._blocks):
            self._codec.scatter(blocks, open_frame(self._arena.frame(GROUP, slot), self._identity(slot)))

    def gather(self) -> None:
        """Gather alone."""
        for slot, blocks in enumerate(self._blocks):
            self._codec.gather(blocks, self._payload(slot))

    def scatter(self) -> None:
        """Scatter alone."""
        for slot, blocks in enumerate(self._blocks):
            self._codec.scatter(blocks, self._payload(slot))

    def checksum(self) -> None:
        """The checksum alone."""
        for slot in range(len(self._blocks)):
            xxhash.xxh3_64_intdigest(self._payload(slot))

    def loop_gather(self) -> None:
        """The loop of memcpy, out of blocks."""
        for slot, ids in enumerate(self._ids):
            _native.memcpy_gather(self._bound, ids, self._payload(slot))

    def loop_scatter(self) -> None:
        """The loop of memcpy, into blocks."""
        for slot, ids in enumerate(self._ids):
            _native.memcpy_scatter(self._bound, ids, self._payload(slot))

    def _payload(self, slot: int) -> memoryview:
        return payload_of(self._arena.frame(GROUP, slot), self.payload_bytes)

    def _identity(self, slot: int) -> FrameIdentity:
        key = frame_key(NAMESPACE, GROUP, self._refs[slot])
        return FrameIdentity(FrameKind.CHUNK, key, NAMESPACE, Rank(0), self.payload_bytes)


PATHS = (
    ("save", "save", "loop_gather", TARGET),
    ("save, no checksum", "gather", "loop_gather", None),
    ("load", "load", "loop_scatter", TARGET),
    ("load, no checksum", "scatter", "loop_scatter", None),
)
"""Name of a row, what is timed, what it is compared with, and the target."""


def measure(model: Model, payload_bytes: int, rounds: int, codec: str = "auto") -> list[dict[str, Any]]:
    """The rows of one layout, over at least ``payload_bytes`` of chunks."""
    chunk_bytes = CHUNK_TOKENS // model.block_tokens * model.share_bytes * model.layers
    subject = Subject(model, max(2, -(-payload_bytes // chunk_bytes)), codec)
    subject.save()
    names = {name for _, timed, loop, _ in PATHS for name in (timed, loop)} | {"checksum"}
    seen = interleave({name: getattr(subject, name) for name in sorted(names)}, rounds, random.Random(0))
    gb = subject.size_bytes / 1e9
    checksum_s = statistics.median(seen["checksum"])
    rows = []
    for path, timed, loop, target in PATHS:
        seconds, loop_s = statistics.median(seen[timed]), statistics.median(seen[loop])
        pairs = zip(seen[loop], seen[timed], strict=True)
        paired = statistics.median(its_loop_s / its_s for its_loop_s, its_s in pairs)
        rows.append(
            {
                "layout": model.name,
                "block_kib": model.share_bytes / 1024,
                "chunk_mib": subject.payload_bytes / MIB,
                "path": path,
                "gb_per_s": gb / seconds,
                "spread": spread(seen[timed]),
                "loop_gb_per_s": gb / loop_s,
                "loop_spread": spread(seen[loop]),
                "checksum_gb_per_s": gb / checksum_s,
                "ratio": paired,
                **(NO_TARGET if target is None else at_least(paired, target)),
            }
        )
    return rows


def main() -> None:
    """Measure both layouts and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--payload-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    random.seed(0)
    rows = [row for model in MODELS for row in measure(model, options.payload_mib * MIB, options.rounds)]
    emit("arena save and load, one thread", rows, options.json)


if __name__ == "__main__":
    main()
