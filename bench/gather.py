"""Gather and scatter of each codec against a C loop of memcpy over the same blocks.

One thread, blocks in random order, a pool and a payload far larger than the caches, pages of the
size that an engine's allocator gets. ``apart``: each segment has a region of its own;
``interleaved``: one pool holds all segments of block 0, then of block 1, and so on.

Run it as ``python bench/gather.py --json out.json``. Rounds are interleaved over the contenders, and
a figure is the median of its rounds; ``native_per_loop`` is the median of each round's own ratio.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstow.codec._native as _native
import report
from kvstow.codec.select import make_codec
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, RegionId, Segment

BLOCK_KIB = (2, 4, 8, 16, 24, 32, 64, 128, 256)
SEGMENTS = 30
POOL_PER_PAYLOAD = 2
LOOP = "memcpy_loop"
CODECS = ("native", "torch", "reference")
MIB = 1 << 20

Bytes = npt.NDArray[np.uint8]
Contenders = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def pages(size: int) -> Bytes:
    """``size`` bytes of small pages, all touched."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = 1
    return memory


def make_group(placement: str, block_bytes: int, num_blocks: int) -> tuple[Group, list[Bytes]]:
    """A group of `SEGMENTS` segments, and its regions."""
    apart = placement == "apart"
    share = num_blocks * block_bytes
    segments = tuple(
        Segment(
            name=f"layers.{layer}",
            region=RegionId(layer if apart else 0),
            offset_bytes=0 if apart else layer * block_bytes,
            block_stride_bytes=block_bytes if apart else block_bytes * SEGMENTS,
            block_bytes=block_bytes,
        )
        for layer in range(SEGMENTS)
    )
    regions = [pages(share) for _ in range(SEGMENTS)] if apart else [pages(share * SEGMENTS)]
    return Group(GroupId(0), GroupKind.PAGED, 16, num_blocks, "uint8", segments), regions


def contenders(
    group: Group, regions: list[Bytes], blocks: list[BlockId], payload: Bytes, threads: int
) -> Contenders:
    """Name -> (gather, scatter), all over the same memory."""
    flat = memoryview(payload.data)
    fields = array("q")
    for segment in group.segments:
        fields.extend((segment.region, segment.offset_bytes, segment.block_stride_bytes, segment.block_bytes))
    bound = _native.bind(regions, fields, group.num_blocks)
    ids = array("q", blocks)
    other = pages(payload.size)
    found: Contenders = {
        LOOP: (
            lambda: _native.memcpy_gather(bound, ids, flat),
            lambda: _native.memcpy_scatter(bound, ids, flat),
        ),
        "one_memcpy": (lambda: np.copyto(payload, other), lambda: np.copyto(other, payload)),
    }
    for name in CODECS:
        codec = make_codec(group, regions, threads, name)
        found[name] = (
            lambda codec=codec: codec.gather(blocks, flat),  # type: ignore[misc]
            lambda codec=codec: codec.scatter(blocks, flat),  # type: ignore[misc]
        )
    return found


def measure(found: Contenders, way: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each contender, gather (0) or scatter (1).

    The loop and the kernel run back to back in each round, in changing order: what else the machine
    does then falls on both.
    """
    seen: dict[str, list[float]] = {name: [] for name in found}
    rest = [name for name in found if name not in (LOOP, "native")]
    for index in range(rounds):
        random.shuffle(rest)
        pair = [LOOP, "native"] if index % 2 else ["native", LOOP]
        for name in pair + rest:
            start = time.perf_counter()
            found[name][way]()
            seen[name].append(time.perf_counter() - start)
    return seen


def run(
    placement: str, block_kib: int, payload_bytes: int, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """The two rows, gather and scatter, of one size."""
    block_bytes = block_kib << 10
    count = payload_bytes // (SEGMENTS * block_bytes)
    group, regions = make_group(placement, block_bytes, count * POOL_PER_PAYLOAD)
    blocks = [BlockId(block) for block in random.sample(range(group.num_blocks), count)]
    size = count * group.block_bytes
    found = contenders(group, regions, blocks, pages(size), threads)
    rows: list[dict[str, Any]] = []
    for way, label in enumerate(("gather", "scatter")):
        seen = measure(found, way, rounds)
        row: dict[str, Any] = {"placement": placement, "block_kib": block_kib, "way": label}
        for name, seconds in seen.items():
            row[f"{name}_gb_per_s"] = size / statistics.median(seconds) / 1e9
        row["native_per_loop"] = statistics.median(
            loop / native for loop, native in zip(seen[LOOP], seen["native"], strict=True)
        )
        rows.append(row)
    return rows


def main() -> None:
    """Measure every size and placement, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=None, help="write the figures here")
    parser.add_argument("--payload-mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    random.seed(0)
    rows: list[dict[str, Any]] = []
    for placement in ("apart", "interleaved"):
        for block_kib in BLOCK_KIB:
            rows += run(placement, block_kib, options.payload_mib * MIB, options.rounds, options.threads)
    report.emit(f"gather and scatter, {options.threads} thread(s)", rows, options.json)
    worst = min(rows, key=lambda row: row["native_per_loop"])
    print(
        f"worst native / memcpy loop: {worst['native_per_loop']:.2f} "
        f"({worst['placement']}, {worst['block_kib']} KiB, {worst['way']})"
    )


if __name__ == "__main__":
    main()
