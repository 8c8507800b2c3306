"""Files that are deleted behind a running engine: their bytes count until a put finds the budget full."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path

import pytest
from disk_folders import (
    FRAME_BYTES,
    MINUTE_S,
    OLD_NAMESPACE,
    at_listing,
    fill,
    held,
    on_disk,
    open_store,
    put_big,
    stored_file,
)

from kvstow.clock import ManualClock
from kvstow.errors import NoSpaceError
from kvstow.keys.ids import Rank
from kvstow.stores.disk import DiskStore


def full_store(path: Path, clock: ManualClock, frames: int) -> DiskStore:
    """A store without room for one more frame, which counted its files a minute ago."""
    store = open_store(path, budget_bytes=frames * FRAME_BYTES, clock=clock)
    fill(store, range(frames))
    # The first scan goes by what was there at start.
    assert held(store) == list(range(frames))
    clock.advance(MINUTE_S)
    return store


def test_the_bytes_of_deleted_files_are_free_again(tmp_path: Path) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)
    for index in range(2):
        stored_file(tmp_path, index).unlink()
    assert store.used_bytes == 4 * FRAME_BYTES
    fill(store, range(4, 6))
    assert store.used_bytes == on_disk(tmp_path) == 4 * FRAME_BYTES
    with pytest.raises(NoSpaceError, match=f"{4 * FRAME_BYTES} of {4 * FRAME_BYTES} bytes used"):
        fill(store, range(6, 7))
    assert held(store) == [2, 3, 4, 5]
    store.close()


def test_all_may_be_deleted(tmp_path: Path) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)
    for entry in tmp_path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    fill(store, range(10, 14))
    assert store.used_bytes == on_disk(tmp_path) == 4 * FRAME_BYTES
    store.close()


def test_files_are_counted_once_a_minute_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    store = open_store(tmp_path, budget_bytes=4 * FRAME_BYTES, clock=clock)
    fill(store, range(4))
    stored_file(tmp_path, 0).unlink()
    walks = []

    def note(folder: str, _: int) -> None:
        if folder == str(tmp_path):
            walks.append(clock.monotonic_s())

    with at_listing(monkeypatch, note):
        clock.advance(MINUTE_S - 1)
        for _ in range(3):
            with pytest.raises(NoSpaceError):
                put_big(store, 2)
        assert walks == []
        for _ in range(5):
            clock.advance(MINUTE_S / 3)
            with pytest.raises(NoSpaceError):
                put_big(store, 2)
    # Opening was a count as well.
    assert walks == [MINUTE_S - 1 + MINUTE_S / 3, MINUTE_S - 1 + MINUTE_S / 3 * 4]
    assert store.used_bytes == 3 * FRAME_BYTES
    store.close()


def test_a_count_that_takes_long_is_not_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)

    def dawdle(_: str, listed: int) -> None:
        assert listed < 100, "counted again and again"
        clock.advance(MINUTE_S)

    with at_listing(monkeypatch, dawdle), pytest.raises(NoSpaceError):
        fill(store, range(4, 5))
    store.close()


def test_nothing_is_counted_while_there_is_room_or_other_namespaces_can_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    old = open_store(tmp_path, namespace=OLD_NAMESPACE, clock=clock)
    fill(old, range(2))
    old.close()
    store = open_store(tmp_path, budget_bytes=4 * FRAME_BYTES, clock=clock)
    clock.advance(MINUTE_S)

    def refuse(folder: str, _: int) -> None:
        raise AssertionError(f"{folder} is listed")

    with at_listing(monkeypatch, refuse):
        fill(store, range(10, 14))
    assert held(store) == [10, 11, 12, 13]
    store.close()


def test_files_that_came_without_us_are_counted(tmp_path: Path) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)
    stored_file(tmp_path, 0).unlink()
    (stored_file(tmp_path, 1).parent / "notes.txt").write_bytes(bytes(FRAME_BYTES + 1))
    with pytest.raises(NoSpaceError):
        fill(store, range(4, 5))
    assert store.used_bytes == on_disk(tmp_path) == 4 * FRAME_BYTES + 1
    store.close()


def test_files_of_ranks_that_are_no_more_are_counted_and_those_of_others_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    gone = open_store(tmp_path, rank=Rank(2), world_size=4, clock=clock)
    fill(gone, range(2))
    foreign = stored_file(tmp_path, 0).parent / "notes.txt"
    foreign.write_bytes(bytes(FRAME_BYTES))
    gone.close()
    stores = [
        open_store(tmp_path, rank=Rank(rank), world_size=2, budget_bytes=4 * FRAME_BYTES, clock=clock)
        for rank in range(2)
    ]
    fill(stores[1], range(20, 22))
    clock.advance(MINUTE_S)
    # Rank 0 has three frames' worth of what rank 2 left; nothing of it may be forgotten.
    fill(stores[0], range(10, 13))
    assert stores[0].used_bytes == 4 * FRAME_BYTES
    with pytest.raises(NoSpaceError):
        fill(stores[0], range(13, 14))
    assert stores[0].used_bytes == 4 * FRAME_BYTES
    foreign.unlink()
    clock.advance(MINUTE_S)
    fill(stores[0], range(13, 14))
    assert [store.used_bytes for store in stores] == [4 * FRAME_BYTES, 2 * FRAME_BYTES]
    for store in stores:
        store.close()


def test_a_count_that_fails_is_no_error_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)
    failing = stored_file(tmp_path, 1).parent
    stored_file(tmp_path, 0).unlink()

    def fail(folder: str, _: int) -> None:
        if folder == str(failing):
            raise OSError(errno.EIO, "bad sector")

    with at_listing(monkeypatch, fail), caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(NoSpaceError):
                fill(store, range(4, 5))
            assert store.used_bytes == 4 * FRAME_BYTES
            clock.advance(MINUTE_S)
    (said,) = caplog.messages
    assert "bad sector" in said
    assert "check the device and the rights on the folder" in said
    fill(store, range(4, 5))
    assert store.used_bytes == on_disk(tmp_path) == 4 * FRAME_BYTES
    store.close()


def test_folders_that_go_during_the_walk_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    store = full_store(tmp_path, clock, 4)
    share = stored_file(tmp_path, 0).parent.parent

    def delete(folder: str, _: int) -> None:
        if folder.startswith(f"{share}/"):
            shutil.rmtree(share)

    with at_listing(monkeypatch, delete):
        fill(store, range(10, 14))
    assert store.used_bytes == on_disk(tmp_path) == 4 * FRAME_BYTES
    store.close()
