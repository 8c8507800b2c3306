"""The contracts' benchmarks, at a tiny size and with a clock whose time is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import contracts
from kvstow.clock import ManualClock
from kvstow.codec.reference import ReferenceCodec
from kvstow.stores.base import FrameName
from kvstow.testing.contract_bench import bench_codec, bench_store
from kvstow.testing.memory_store import MemoryStore

needs_kernel = pytest.mark.skipif(
    importlib.util.find_spec("kvstow.codec._native") is None, reason="needs the C kernel"
)


class TimedStore(MemoryStore):
    """Takes two seconds for a put and half a second for a get."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(1 << 20, clock)
        self.clock = clock

    def put(self, name: FrameName, frame: memoryview) -> None:
        self.clock.advance(2.0)
        super().put(name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        self.clock.advance(0.5)
        return super().get_into(name, target)


def test_a_store_is_measured_by_the_clock_and_left_empty() -> None:
    clock = ManualClock()
    store = TimedStore(clock)
    put, get, scan = bench_store(store, 4, 5000, rounds=2, clock=clock)
    assert [(figure.subject, figure.operation) for figure in (put, get, scan)] == [
        ("memory", "put"),
        ("memory", "get"),
        ("memory", "scan"),
    ]
    assert (put.size_bytes, put.median_s, put.per_s, put.mb_per_s) == (12288, 2.0, 0.5, 12288 / 2e6)
    assert (get.median_s, get.memcpy_s, get.memcpy_mb_per_s) == (0.5, 0.0, 0.0)
    assert list(store.scan()) == []


def test_a_codec_moves_whole_blocks_of_about_the_size_asked_for() -> None:
    gather, scatter = bench_codec(ReferenceCodec, 10_000, block_bytes=100, segments=3, rounds=2)
    assert (gather.subject, gather.operation, scatter.operation) == ("reference", "gather", "scatter")
    assert gather.size_bytes == scatter.size_bytes == 9900
    assert min(gather.median_s, gather.memcpy_s, scatter.median_s, scatter.memcpy_s) > 0


@needs_kernel
def test_the_bench_has_a_row_for_everything_and_leaves_nothing(tmp_path: Path) -> None:
    rows = contracts.measure_stores(tmp_path, 4, 5000, rounds=2)
    rows += contracts.measure_codecs(1 << 16, rounds=2)
    assert [(row["subject"], row["operation"]) for row in rows] == [
        *((store, verb) for store in ("memory", "arena", "disk") for verb in ("put", "get", "scan")),
        *((codec, way) for codec in ("reference", "torch", "native") for way in ("gather", "scatter")),
    ]
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert all(row["median_us"] > 0 and row["to_memcpy"] >= 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
