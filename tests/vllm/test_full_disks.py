"""File systems that are full or read-only, and budgets: the engine keeps what it can and goes on."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gates import gated, kvstow_log
from inprocess import ask_twice, prompt, running

from kvstow.errors import StoreUnavailableError
from kvstow.stores.disk.store import DiskStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FRAME_BYTES = 102_400
"""Of a chunk of 64 tokens: 3 layers x 2 heads x 32 floats, K and V, and the header."""
GIB = 1 << 30


def frames(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock")]


@pytest.fixture
def small_disk(tmp_path: Path, mount: Callable[..., None]) -> Iterator[Path]:
    """A file system of its own with room for about twenty frames."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "none", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_file_system_that_is_full_and_later_read_only(
    llama: Path, small_disk: Path, mount: Callable[..., None]
) -> None:
    with gated() as gates, running(llama, {"disk_path": str(small_disk)}) as engine, kvstow_log() as log:
        for seed in range(6):
            assert ask_twice(engine, seed) == 448
        gates.wait_idle()
        engine.expect_baseline()
        counted = engine.counters()
        stored = frames(small_disk)
        assert 15 <= len(stored) <= 20
        assert counted["disk_writes"] == len(stored)
        assert counted["disk_write_failed"] == 42 - len(stored)
        assert {path.stat().st_size for path in stored} == {FRAME_BYTES}
        said = [record for record in log if "ENOSPC" in record.getMessage()]
        assert len(said) == 1, "a full disk is said once"

    # What did fit is found by the next engine, full as the disk is.
    with running(llama, {"disk_path": str(small_disk)}) as engine:
        assert engine.ask(prompt(500, seed=0)).cached == 448
        assert engine.counters()["loaded_tokens_disk"] == 448
        engine.expect_baseline()

    # Where nothing can be locked nothing is used: said once, and the arena does it alone.
    mount("-o", "remount,ro", str(small_disk))
    with kvstow_log() as log, running(llama, {"disk_path": str(small_disk)}) as engine:
        assert ask_twice(engine, seed=51) == 448
        said = [record for record in log if "without a disk tier" in record.getMessage()]
        assert len(said) == 1
        assert "disk_path" in said[0].getMessage()
        engine.expect_baseline()


def test_a_folder_that_cannot_be_listed_at_start(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(_: DiskStore) -> None:
        raise StoreUnavailableError("scan failed: EIO")

    monkeypatch.setattr(DiskStore, "scan", scan)
    with kvstow_log() as log, running(llama, {"disk_path": str(tmp_path / "disk")}) as engine:
        assert ask_twice(engine, seed=61) == 448
        (said,) = [record.getMessage() for record in log if "without a disk tier" in record.getMessage()]
        assert "EIO" in said
        assert "repair the folder" in said
        assert frames(tmp_path / "disk") == []
        engine.expect_baseline()


def test_the_budget_holds_while_it_runs_and_across_restarts(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstow")
    folder = tmp_path / "disk"
    # 12 frames, then 8, and room for a frame that the self-test writes; the arena holds all.
    budget = {"disk_path": str(folder), "disk_gib": 13.5 * FRAME_BYTES / GIB}
    with gated() as gates, running(llama, budget) as engine:
        for seed in range(4):
            assert ask_twice(engine, seed) == 448
            gates.wait_idle()
            assert len(frames(folder)) <= 12
        engine.expect_baseline()
        gates.wait_idle()
        assert len(frames(folder)) == 12
        assert engine.counters()["evicted_disk"] > 0

    with kvstow_log(logging.INFO) as log, running(llama, budget):
        tested = "2 frames there and back through arena and disk"
        assert [record for record in log if tested in record.getMessage()]
        assert len(frames(folder)) == 12

    budget["disk_gib"] = 9.5 * FRAME_BYTES / GIB
    with gated() as gates, running(llama, budget) as engine:
        # The last prompt was used last: it is what is left.
        answer = engine.ask(prompt(500, seed=3))
        assert answer.cached == 448
        assert engine.counters()["loaded_tokens_disk"] == 448
        engine.settle()
        gates.wait_idle()
        assert len(frames(folder)) <= 8
        engine.expect_baseline()


def test_an_idle_engine_still_writes_what_had_to_wait(llama: Path, tmp_path: Path) -> None:
    """More frames than may be in flight, and no further request that would bring the next step."""
    stow = {"disk_path": str(tmp_path / "disk"), "pending_writes_max": 4}
    with gated() as gates, running(llama, stow) as engine:
        with gates.shut("write"):
            engine.ask(prompt(500, seed=3))
        engine.step_until(lambda: not engine.scheduler.has_requests())
        gates.wait_idle()
        assert len(frames(tmp_path / "disk")) == 7
