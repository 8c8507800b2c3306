"""The first scan after opening: from what the stock-taking found, as if it had looked itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from disk_folders import FRAME_BYTES, OLD_NAMESPACE, fill, held, open_store, stored_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.clock import ManualClock
from kvstow.errors import NoSpaceError, StoreUnavailableError
from kvstow.keys.ids import Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import StoredFrame
from kvstow.stores.disk import DiskStore
from kvstow.stores.disk.reader import DiskReader
from kvstow.testing.samples import NAMESPACE, blank_frame, sample_frame, sample_name

INDICES = st.integers(0, 5)
VERBS = st.sampled_from(["put", "replace", "remove", "get"])


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each folder was listed."""
    real, listings = os.scandir, Counter[str]()

    def scandir(path: str) -> Any:
        listings[path] += 1
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return listings


def filled_store(path: Path, frames: int) -> DiskStore:
    """A store that found frames of two groups when it was opened."""
    store = open_store(path)
    fill(store, range(frames))
    for index in range(frames):
        name = sample_name(index, GroupId(2))
        store.put(name, sample_frame(name))
    store.close()
    return open_store(path)


def found(store: DiskReader) -> dict[Any, StoredFrame]:
    frames = list(store.scan())
    by_ref = {frame.ref: frame for frame in frames}
    assert len(by_ref) == len(frames)
    return by_ref


def test_opening_and_the_first_scan_list_every_folder_once(tmp_path: Path, listings: Counter[str]) -> None:
    filled_store(tmp_path, 20).close()
    listings.clear()
    store = open_store(tmp_path)
    first = found(store)
    assert len(first) == 40
    # The root is listed once more, to see what its file system can do.
    assert listings.pop(str(tmp_path)) == 2
    assert set(listings.values()) == {1}
    assert len(listings) > 20
    assert found(store) == first
    assert max(listings.values()) == 2
    store.close()


def test_what_the_self_test_does_before_costs_no_second_walk(tmp_path: Path, listings: Counter[str]) -> None:
    store, name = filled_store(tmp_path, 3), sample_name(50)
    listings.clear()
    store.put(name, sample_frame(name))
    assert store.get_into(name, blank_frame())
    store.remove([name])
    assert held(store) == [0, 0, 1, 1, 2, 2]
    assert not listings
    store.close()


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(VERBS, INDICES), max_size=8))
def test_whatever_was_done_before_it_is_seen(tmp_path: Path, history: list[tuple[str, int]]) -> None:
    shutil.rmtree(tmp_path)
    clock = ManualClock(1000.0)
    store = open_store(tmp_path, clock=clock)
    fill(store, range(4))
    store.close()
    store = open_store(tmp_path, clock=clock)
    for verb, index in history:
        name = sample_name(index)
        clock.advance(1.0)
        if verb == "put":
            store.put(name, sample_frame(name))
        elif verb == "replace":
            store.put(name, sample_frame(name, payload_bytes=1))
        elif verb == "remove":
            store.remove([name])
        elif stored := next((path for path in tmp_path.rglob(f"{index}-*")), None):
            assert store.get_into(name, memoryview(bytearray(stored.stat().st_size)))
    first = found(store)
    assert first == found(store)
    store.close()


def test_a_frame_that_somebody_deleted_and_that_was_removed_is_not_listed(tmp_path: Path) -> None:
    store = filled_store(tmp_path, 0)
    fill(store, range(2))
    store.close()
    store = open_store(tmp_path)
    stored_file(tmp_path, 0).unlink()
    store.remove([sample_name(0)])
    assert held(store) == [1]
    store.close()


def test_a_put_that_fails_lists_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=FRAME_BYTES)
    fill(store, range(1))
    store.close()
    store = open_store(tmp_path, budget_bytes=FRAME_BYTES)
    with pytest.raises(NoSpaceError, match="bytes used"):
        fill(store, range(1, 2))
    assert held(store) == [0]
    store.close()


def test_only_the_first_scan_goes_by_what_was_found_at_the_start(tmp_path: Path) -> None:
    store = filled_store(tmp_path, 2)
    by_hand = stored_file(tmp_path / NAMESPACE.hex()[:32] / "r3" / "g0", 0)
    assert held(store) == [0, 0, 1, 1]
    by_hand.unlink()
    assert held(store) == [0, 1, 1]
    store.close()
    # Also if it was not read to its end.
    store = open_store(tmp_path)
    next(store.scan())
    stored_file(tmp_path / NAMESPACE.hex()[:32] / "r3" / "g0", 1).unlink()
    assert held(store) == [0, 1]
    store.close()


def test_what_was_found_is_let_go_with_the_first_scan(tmp_path: Path) -> None:
    store = filled_store(tmp_path, 4)
    first = list(store.scan())
    walked = list(store.scan())
    assert [sys.getrefcount(frame) for frame in first] == [sys.getrefcount(frame) for frame in walked]
    store.close()


def test_the_first_scan_lists_frames_of_this_share_and_no_others(tmp_path: Path) -> None:
    old = open_store(tmp_path, namespace=OLD_NAMESPACE)
    fill(old, range(5, 8))
    old.close()
    other = open_store(tmp_path, rank=Rank(0))
    fill(other, range(8, 10))
    other.close()
    store = filled_store(tmp_path, 0)
    fill(store, range(2))
    store.close()
    file = stored_file(tmp_path / NAMESPACE.hex()[:32] / "r3", 0)
    share = file.parent.parent.parent
    (file.parent / "notes.txt").write_text("mine")
    # Names like those of frames, in places where none are.
    for place in (share, share / "g0", share / "g01" / "aa", share / "g0" / "xyz", file.parent / "bb"):
        place.mkdir(parents=True, exist_ok=True)
        (place / file.name).write_text("mine")
    (file.parent / f"7{file.name}").symlink_to(file)
    store = open_store(tmp_path)
    first = found(store)
    assert {frame.ref.index for frame in first.values()} == {0, 1, 70}
    assert first == found(store)
    store.close()


def test_a_reader_looks_itself_every_time(tmp_path: Path) -> None:
    first = open_store(tmp_path, rank=Rank(0), world_size=2)
    second = open_store(tmp_path, rank=Rank(1), world_size=2)
    reader = DiskReader(second.root, NAMESPACE, Rank(0))
    assert found(reader) == {}
    fill(first, range(3))
    assert found(reader) == found(first)
    assert len(found(reader)) == 3
    first.close()
    second.close()


def test_a_closed_store_lists_nothing(tmp_path: Path) -> None:
    store = filled_store(tmp_path, 2)
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        next(store.scan())
