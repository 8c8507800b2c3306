"""Every store and every codec by its contract's benchmark: ``python bench/contracts.py --root DIR``.

One table for stores (a dictionary, the arena, the disk) and codecs (numpy, torch, the C kernel), each
figure beside a memcpy of the same bytes in the same run. It is there to compare mechanisms, and to be
pointed at one of your own (`kvstow.testing.contract_bench`); ``gather``, ``arena`` and ``disk`` are
the benches that have targets. A scan moves no bytes: its figure is frames listed in a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstow.clock import SystemClock
from kvstow.codec.base import Codec, Region
from kvstow.codec.select import make_codec
from kvstow.errors import ConfigError
from kvstow.keys.ids import Rank
from kvstow.layout.geometry import Group
from kvstow.stores.arena import Arena
from kvstow.stores.base import Store
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.stores.framing import frame_bytes
from kvstow.testing.arena_store import ArenaStore
from kvstow.testing.contract_bench import Figure, MakeCodec, bench_codec, bench_store
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.samples import NAMESPACE
from report import emit
from rounds import NO_TARGET

MIB = 1 << 20
CODECS = ("reference", "torch", "native")


def main() -> None:
    """Measure, print, and remove what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--frames", type=int, default=64, help="frames in a store at once")
    parser.add_argument("--payload-mib", type=int, default=4, help="payload of a frame")
    parser.add_argument("--transfer-mib", type=int, default=96, help="payload that a codec moves at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rows = measure_stores(options.root, options.frames, options.payload_mib * MIB, options.rounds)
    rows += measure_codecs(options.transfer_mib * MIB, options.rounds)
    emit("stores and codecs against a memcpy", rows, options.json)


def measure_stores(root: Path, frames: int, payload_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each operation of each store."""
    return [
        row("store", figure)
        for store in stores(root, frames, payload_bytes)
        for figure in bench_store(store, frames, payload_bytes, rounds)
    ]


def measure_codecs(payload_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way of each codec."""
    return [
        row("codec", figure)
        for name in CODECS
        for figure in bench_codec(codec_named(name), payload_bytes, rounds=rounds)
    ]


def stores(root: Path, frames: int, payload_bytes: int) -> Iterator[Store]:
    """Empty stores with room for ``frames`` frames; each is closed when the next is asked for."""
    clock, size_bytes = SystemClock(), frame_bytes(payload_bytes)
    yield MemoryStore(frames * size_bytes, clock)
    arena = Arena((frames,), (size_bytes,), staging_frames=0)
    arena.prefault(step_bytes=2 * MIB)
    arena.wait_prefaulted(600.0)
    in_arena = ArenaStore(arena, (frames,), clock)
    yield in_arena
    in_arena.close()
    folder = root / f"kvstow-contracts-{os.getpid()}"
    claimed = DiskRoot.open(
        folder,
        instance="bench",
        rank=Rank(0),
        world_size=1,
        budget_bytes=frames * size_bytes,
        clock=clock,
    )
    try:
        on_disk = DiskStore(claimed, NAMESPACE)
        yield on_disk
        on_disk.close()
    finally:
        shutil.rmtree(folder)


def codec_named(name: str) -> MakeCodec:
    """Makes the codec of that name, with one thread; ends the bench where it cannot be had."""

    def make(group: Group, regions: Sequence[Region]) -> Codec:
        try:
            return make_codec(group, regions, threads=1, prefer=name)
        except ConfigError as error:
            raise SystemExit(str(error)) from error

    return make


def row(kind: str, figure: Figure) -> dict[str, Any]:
    """A figure as a line of the table."""
    return {
        "kind": kind,
        "subject": figure.subject,
        "operation": figure.operation,
        "size_kib": figure.size_bytes >> 10,
        "median_us": figure.median_s * 1e6,
        "per_s": figure.per_s,
        "mb_per_s": figure.mb_per_s,
        "memcpy_mb_per_s": figure.memcpy_mb_per_s,
        "to_memcpy": figure.to_memcpy,
        **NO_TARGET,
    }


if __name__ == "__main__":
    main()
