"""A recount while frames come and go: each is counted once, whatever the walk sees of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from random import Random
from threading import Event, Lock, get_ident
from typing import Any

import pytest
from disk_folders import (
    FRAME_BYTES,
    MINUTE_S,
    at_listing,
    files_under,
    fill,
    held,
    on_disk,
    open_store,
    put_big,
    stored_file,
    without,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.clock import ManualClock
from kvstow.errors import NoSpaceError, StoreUnavailableError
from kvstow.stores.disk import DiskStore
from kvstow.testing.samples import sample_frame, sample_name


class Events:
    """What may happen to a store that has samples 0 to 7, while a walk goes on.

    Together they need room for three frames more; to make it would be to wait for the walk.
    """

    names = ("put", "put in a new folder", "replace", "remove", "remove and put", "put and remove", "fail")

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = store
        self._monkeypatch = monkeypatch
        fans = {sample_name(index).ref.chunk[0] for index in range(8)}
        others = range(100, 800)
        # Beside sample 3, and where no frame has been.
        self.beside = next(i for i in others if self.fan(i) == self.fan(3))
        self.apart = next(i for i in others if self.fan(i) not in fans)

    @staticmethod
    def fan(index: int) -> str:
        return f"{sample_name(index).ref.chunk[0]:02x}"

    def fan_of(self, event: str) -> str:
        """The folder that an event changes; that of no frame if it changes none."""
        if event == "fail":
            return ""
        return self.fan(self.apart if event == "put in a new folder" else 3)

    def happen(self, event: str) -> None:
        store, three = self._store, sample_name(3)
        if event == "put":
            fill(store, range(self.beside, self.beside + 1))
        elif event == "put in a new folder":
            fill(store, range(self.apart, self.apart + 1))
        elif event == "replace":
            store.put(three, sample_frame(three, payload_bytes=1))
        elif event == "remove":
            store.remove([three])
        elif event == "remove and put":
            store.remove([three])
            fill(store, range(3, 4))
        elif event == "put and remove":
            fill(store, range(self.beside, self.beside + 1))
            store.remove([sample_name(self.beside)])
        else:
            self._fail()

    def _fail(self) -> None:
        real, failing = os.pwrite, get_ident()

        def fail(*what: Any) -> int:
            if get_ident() == failing:
                raise OSError(errno.EIO, "bad sector")
            return real(*what)

        with self._monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(StoreUnavailableError):
                fill(self._store, range(self.beside, self.beside + 1))


def eight_of_twelve(path: Path, clock: ManualClock) -> DiskStore:
    """A store with room for twelve frames that counts eight, of which five were deleted by hand.

    ``path`` is emptied first: its folders are new as well.
    """
    shutil.rmtree(path)
    store = open_store(path, budget_bytes=12 * FRAME_BYTES, clock=clock)
    fill(store, range(8))
    clock.advance(MINUTE_S)
    for index in (0, 1, 2, 4, 5):
        stored_file(path, index).unlink()
    return store


def walk_with(
    path: Path, monkeypatch: pytest.MonkeyPatch, happenings: list[tuple[int, str]]
) -> tuple[int, list[str]]:
    """Recount, and let events happen before the listings of these numbers.

    An event in the folder that is being listed waits for the listing, in a thread.

    Returns:
        How many listings there were, and which events happened.
    """
    store = eight_of_twelve(path, ManualClock())
    events, happened, listings = Events(store, monkeypatch), [], []
    waiting: list[Future[None]] = []

    def act(folder: str, listed: int) -> None:
        listings.append(folder)
        for moment, event in happenings:
            if moment == listed:
                happened.append(event)
                if folder.endswith(f"/{events.fan_of(event)}"):
                    waiting.append(threads.submit(events.happen, event))
                else:
                    events.happen(event)
        assert waiting or store.used_bytes >= on_disk(path)

    with ThreadPoolExecutor(1) as threads, at_listing(monkeypatch, act):
        put_big(store, 5)
        for event in waiting:
            event.result()
    assert store.used_bytes == on_disk(path)
    store.close()
    return len(listings), happened


@pytest.mark.parametrize("event", Events.names)
def test_a_change_at_any_moment_of_the_walk_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    moment = 0
    while True:
        listings, happened = walk_with(tmp_path, monkeypatch, [(moment, event)])
        if moment >= listings:
            break
        assert happened == [event]
        moment += 1
    assert moment > 10


@pytest.mark.slow
@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 14), st.sampled_from(Events.names)), max_size=6))
def test_many_changes_during_the_walk_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happenings: list[tuple[int, str]]
) -> None:
    walk_with(tmp_path, monkeypatch, happenings)


@pytest.mark.parametrize(("deed", "call"), [("put", "link"), ("remove", "unlink")])
def test_a_folder_is_not_listed_between_a_change_and_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str, call: str
) -> None:
    store, real = eight_of_twelve(tmp_path, ManualClock()), getattr(os, call)
    recounts: list[Future[None]] = []

    def change(*what: Any, **more: Any) -> None:
        real(*what, **more)
        if not recounts:
            recounts.append(threads.submit(put_big, store, 5))
            assert not wait(recounts, timeout=0.05).done

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(os, call, change)
        Events(store, monkeypatch).happen(deed)
        recounts[0].result()
    assert store.used_bytes == on_disk(tmp_path)
    store.close()


@pytest.mark.parametrize("deed", ["put", "remove"])
def test_a_folder_does_not_change_between_a_listing_and_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    store = eight_of_twelve(tmp_path, ManualClock())
    events, real = Events(store, monkeypatch), os.scandir
    changes: list[Future[None]] = []

    class Listing:
        """What ``scandir`` gave, and a change in that folder at its end."""

        def __init__(self, path: str) -> None:
            self._path, self._entries = path, real(path)

        def __enter__(self) -> Any:
            return self._entries.__enter__()

        def __exit__(self, *_: object) -> None:
            self._entries.close()
            if not changes and self._path.endswith(f"/{events.fan_of(deed)}"):
                changes.append(threads.submit(events.happen, deed))
                assert not wait(changes, timeout=0.05).done

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(os, "scandir", Listing)
        put_big(store, 5)
        changes[0].result()
    assert store.used_bytes == on_disk(tmp_path)
    store.close()


@pytest.mark.parametrize("ends_well", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_put_under_way_keeps_its_bytes_and_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, ends_well: bool
) -> None:
    if named:
        monkeypatch.setattr(os, "open", without(os.O_TMPFILE, errno.EOPNOTSUPP))
    clock, real_write = ManualClock(), os.pwrite
    store = open_store(tmp_path, budget_bytes=5 * FRAME_BYTES, clock=clock)
    fill(store, range(4))
    assert held(store) == [0, 1, 2, 3]
    clock.advance(MINUTE_S)
    stored_file(tmp_path, 0).unlink()
    writes, go_on = Event(), Event()

    def write(descriptor: int, content: memoryview, offset: int) -> int:
        if len(content) != FRAME_BYTES:
            return real_write(descriptor, content, offset)
        moved = real_write(descriptor, content[:4096], offset)
        writes.set()
        assert go_on.wait(60)
        if not ends_well:
            raise OSError(errno.EIO, "bad sector")
        return moved

    monkeypatch.setattr(os, "pwrite", write)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(fill, store, range(4, 5))
        assert writes.wait(60)
        # Three files and a put under way: room for one more, and not for two.
        with pytest.raises(NoSpaceError):
            put_big(store, 2)
        assert store.used_bytes == on_disk(tmp_path) + FRAME_BYTES == 4 * FRAME_BYTES
        assert sum(name.startswith(".") for name in files_under(tmp_path)) == named
        go_on.set()
        if ends_well:
            slow.result()
        else:
            with pytest.raises(StoreUnavailableError):
                slow.result()
    assert store.used_bytes == on_disk(tmp_path) == (4 if ends_well else 3) * FRAME_BYTES
    assert held(store) == [1, 2, 3, 4][: 4 if ends_well else 3]
    store.close()


@pytest.mark.parametrize("named", [True, False])
def test_threads_and_somebody_who_deletes_never_make_the_count_too_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.setattr(os, "open", without(os.O_TMPFILE, errno.EOPNOTSUPP))
    budget_frames, clock = 12, ManualClock()
    store = open_store(tmp_path, budget_bytes=budget_frames * FRAME_BYTES, clock=clock)
    ticking, refused = Lock(), Counter[str]()

    def churn(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            # Names are shared: puts replace each other's frames and meet removals.
            name = sample_name(random.randrange(20))
            if random.random() < 0.3:
                store.remove([name])
            else:
                try:
                    store.put(name, sample_frame(name))
                except NoSpaceError:
                    refused["put"] += 1
                    with ticking:
                        clock.advance(MINUTE_S)

    def delete(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            files = sorted(file for file in tmp_path.rglob("*-*") if not file.name.startswith("."))
            if files:
                random.choice(files).unlink(missing_ok=True)

    for round_ in range(3):
        with ThreadPoolExecutor(5) as threads:
            running = [threads.submit(churn, 10 * round_ + number) for number in range(4)]
            running.append(threads.submit(delete, round_))
            for thread in running:
                thread.result()
        assert on_disk(tmp_path) <= store.used_bytes <= budget_frames * FRAME_BYTES
        clock.advance(MINUTE_S)
        with pytest.raises(NoSpaceError):
            put_big(store, budget_frames + 1)
        assert store.used_bytes == sum(files_under(tmp_path).values())
    assert refused["put"]
    store.close()
