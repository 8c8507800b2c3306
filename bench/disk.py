"""Disk store against raw O_DIRECT: ``python bench/disk.py --root DIR [--json FILE]``.

The same sizes in the same folder, from and into the same page-aligned memory, the two sides in turn
within every repetition; medians. O_DIRECT goes past the page cache, so every read is cold for
this machine (a hypervisor below may still cache). Target: 0.90 of raw, both ways.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstow.clock import SystemClock
from kvstow.keys.ids import ChunkId, ChunkRef, Key, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import FrameName
from kvstow.stores.disk import DiskRoot, DiskStore
from report import emit

MIB = 1 << 20
SIZES_MIB = (1, 2, 4, 8, 16)
BYTES_PER_SIZE = 512 * MIB
REPETITIONS_MIN = 40
SCAN_FILES = 100_000


def main() -> None:
    """Measure, print, and remove what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    folder = arguments.root / f"kvstow-bench-{os.getpid()}"
    store = open_store(folder)
    try:
        make_folders(store)
        rows = [measure(store, folder, size_mib * MIB) for size_mib in SIZES_MIB]
        start_row = measure_start(store, folder)
    finally:
        store.close()
        shutil.rmtree(folder)
    how = f"O_DIRECT {store.root.files.direct}, unnamed files {store.root.files.unnamed}"
    emit(f"disk store against raw O_DIRECT ({how})", rows, arguments.json)
    start_json = arguments.json and arguments.json.with_name(f"{arguments.json.stem}-start.json")
    emit("start on a full folder", [start_row], start_json)


def open_store(folder: Path) -> DiskStore:
    """A store of its own in ``folder``."""
    root = DiskRoot.open(
        folder, instance="bench", rank=Rank(0), world_size=1, budget_bytes=1 << 40, clock=SystemClock()
    )
    return DiskStore(root, NamespaceDigest(bytes(32)))


def make_folders(store: DiskStore) -> None:
    """Have the store make its folders; that happens once in a root's life."""
    page = memoryview(mmap.mmap(-1, 4096))
    names = [frame_name(index) for index in range(4096)]
    for name in names:
        store.put(name, page)
    store.remove(names)


def measure(store: DiskStore, folder: Path, size_bytes: int) -> dict[str, Any]:
    """One size: write and read, store and raw."""
    frame = memoryview(mmap.mmap(-1, size_bytes))
    frame[:] = os.urandom(MIB) * (size_bytes // MIB)
    names = [frame_name(index) for index in range(max(REPETITIONS_MIN, BYTES_PER_SIZE // size_bytes))]
    raw_paths = [f"{folder}/raw-{index}" for index in range(len(names))]
    put_s, raw_write_s = in_turn(
        [lambda name=name: store.put(name, frame) for name in names],  # type: ignore[misc]
        [lambda path=path: raw_write(path, frame) for path in raw_paths],  # type: ignore[misc]
    )
    get_s, raw_read_s = in_turn(
        [lambda name=name: store.get_into(name, frame) for name in names],  # type: ignore[misc]
        [lambda path=path: raw_read(path, frame) for path in raw_paths],  # type: ignore[misc]
    )
    store.remove(names)
    for path in raw_paths:
        os.unlink(path)
    return {
        "frame_mib": size_bytes // MIB,
        "repetitions": len(names),
        "put_gb_per_s": size_bytes / put_s / 1e9,
        "raw_write_gb_per_s": size_bytes / raw_write_s / 1e9,
        "put_ratio": raw_write_s / put_s,
        "get_gb_per_s": size_bytes / get_s / 1e9,
        "raw_read_gb_per_s": size_bytes / raw_read_s / 1e9,
        "get_ratio": raw_read_s / get_s,
    }


def in_turn(first: list[Callable[[], Any]], second: list[Callable[[], Any]]) -> tuple[float, float]:
    """Median seconds of each side; who goes first changes every time."""
    sides: tuple[list[float], list[float]] = ([], [])
    for repetition, pair in enumerate(zip(first, second, strict=True)):
        for side in (0, 1) if repetition % 2 else (1, 0):
            start = time.perf_counter()
            pair[side]()
            sides[side].append(time.perf_counter() - start)
    return statistics.median(sides[0]), statistics.median(sides[1])


def raw_write(path: str, frame: memoryview) -> None:
    """The least that writes a file past the page cache."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    done = os.pwrite(descriptor, frame, 0)
    os.close(descriptor)
    if done != len(frame):
        raise SystemExit(f"raw write stopped at {done} of {len(frame)} bytes")


def raw_read(path: str, target: memoryview) -> None:
    """The least that reads it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = os.preadv(descriptor, [target], 0)
    os.close(descriptor)
    if done != len(target):
        raise SystemExit(f"raw read stopped at {done} of {len(target)} bytes")


def measure_start(store: DiskStore, folder: Path) -> dict[str, Any]:
    """A start on many frames: opening and the first scan, which share a walk; and a scan later on.

    Sizes do not matter to either.
    """
    page = memoryview(mmap.mmap(-1, 4096))
    for index in range(SCAN_FILES):
        store.put(frame_name(index), page)
    store.close()
    start = time.perf_counter()
    again = open_store(folder)
    found = sum(1 for _ in again.scan())
    start_s = time.perf_counter() - start
    start = time.perf_counter()
    found_later = sum(1 for _ in again.scan())
    scan_s = time.perf_counter() - start
    again.close()
    if not found == found_later == SCAN_FILES:
        raise SystemExit(f"{found} frames found at start and {found_later} later, want {SCAN_FILES}")
    return {"files": found, "start_s": start_s, "later_scan_s": scan_s}


def frame_name(index: int) -> FrameName:
    """A name like those of a long prompt's chunks."""
    chunks = [hashlib.sha256(b"%d" % number).digest() for number in (index, index + 1)]
    return FrameName(Key(chunks[0]), ChunkRef(GroupId(0), index, ChunkId(chunks[1]), ChunkId(chunks[0])))


if __name__ == "__main__":
    main()
