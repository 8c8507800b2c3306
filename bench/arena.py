"""What a frame costs besides its copy: ``python bench/arena.py [--json FILE]``.

Seal and open of arena frames against a memcpy of the same bytes, in turn; medians. The frames are
taken round robin from an arena larger than the caches, so that they come from DRAM. Also: how
many GB/s one thread and two together checksum; two would not be faster if the GIL were held.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstow.keys.ids import Key, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena
from kvstow.stores.framing import HEADER_BYTES, FrameIdentity, FrameKind, open_frame, payload_of, seal
from report import emit

MIB = 1 << 20
PAYLOADS_MIB = (1, 2, 4, 8, 16)
ARENA_BYTES = 512 * MIB
REPETITIONS = 128
GROUP = GroupId(0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    emit(
        "cost of a frame, arena",
        [measure(payload_mib * MIB) for payload_mib in PAYLOADS_MIB],
        arguments.json,
    )


def measure(payload_bytes: int) -> dict[str, Any]:
    """One payload size."""
    frame_bytes = HEADER_BYTES + payload_bytes
    slots = ARENA_BYTES // frame_bytes
    arena = Arena((slots,), (frame_bytes,), staging_frames=1)
    start = time.perf_counter()
    arena.prefault(step_bytes=2 * MIB)
    arena.wait_prefaulted(600.0)
    prefault_s = time.perf_counter() - start
    frames = [arena.frame(GROUP, slot) for slot in range(slots)]
    return {
        "payload_mib": payload_bytes // MIB,
        "prefault_gb_per_s": arena.size_bytes / prefault_s / 1e9,
        **measure_frames(frames, payload_bytes),
        "xxh3_gb_per_s": slots * frame_bytes / checksum_s(frames, threads=1) / 1e9,
        "xxh3_2_threads_gb_per_s": 2 * slots * frame_bytes / checksum_s(frames, threads=2) / 1e9,
    }


def measure_frames(frames: list[memoryview], payload_bytes: int) -> dict[str, float]:
    """Seal, open and memcpy over ``frames``."""
    identity = FrameIdentity(
        FrameKind.CHUNK, Key(bytes(32)), NamespaceDigest(bytes(32)), Rank(0), payload_bytes
    )
    source = np.frombuffer(os.urandom(payload_bytes), np.uint8)
    for frame in frames:
        np.copyto(np.frombuffer(payload_of(frame, payload_bytes), np.uint8), source)
        seal(frame, identity)
    turn = cycle(frames)
    seal_s, open_s, copy_s = in_turn(
        lambda: seal(next(turn), identity),
        lambda: open_frame(next(turn), identity),
        lambda: np.copyto(np.frombuffer(next(turn), np.uint8)[HEADER_BYTES:], source),
    )
    return {
        "memcpy_gb_per_s": payload_bytes / copy_s / 1e9,
        "seal_us": seal_s * 1e6,
        "open_us": open_s * 1e6,
        "seal_gb_per_s": payload_bytes / seal_s / 1e9,
        "open_gb_per_s": payload_bytes / open_s / 1e9,
        "open_to_memcpy": open_s / copy_s,
    }


def in_turn(*actions: Callable[[], object]) -> list[float]:
    """Median seconds of each action, one after the other in every repetition."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(REPETITIONS):
        for action, seconds in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def checksum_s(frames: list[memoryview], threads: int) -> float:
    """Seconds in which each of ``threads`` checksums all frames."""

    def work() -> None:
        for frame in frames:
            xxhash.xxh3_64_intdigest(frame)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
