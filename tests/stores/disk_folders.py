"""Disk stores to test, and a look at their folders past the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from kvstow.clock import ManualClock
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.testing.samples import NAMESPACE, RANK, sample_frame, sample_name

FRAME_BYTES = len(sample_frame(sample_name(0)))
OLD_NAMESPACE = NamespaceDigest(bytes(32))
MINUTE_S = 60.0
"""Between two counts of all files."""
BIG = sample_name(900)
"""A frame for which there is no room until deleted files are no longer counted."""


def open_store(
    path: Path,
    *,
    namespace: NamespaceDigest = NAMESPACE,
    budget_bytes: int = 1 << 30,
    world_size: int = RANK + 1,
    rank: Rank = RANK,
    clock: ManualClock | None = None,
) -> DiskStore:
    """A store that has claimed ``path``."""
    root = DiskRoot.open(
        path,
        instance="ours",
        rank=rank,
        world_size=world_size,
        budget_bytes=budget_bytes,
        clock=clock or ManualClock(),
    )
    return DiskStore(root, namespace)


def fill(store: DiskStore, indices: range) -> None:
    """Put samples, in order."""
    for index in indices:
        store.put(sample_name(index), sample_frame(sample_name(index)))


def held(store: DiskStore) -> list[int]:
    """The samples that a scan finds."""
    return sorted(stored.ref.index for stored in store.scan())


def files_under(path: Path) -> dict[str, int]:
    """Every file but the locks, with its size."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.name: file.stat().st_size for file in files if not file.name.startswith("lock")}


def without(flag: int, code: int) -> Callable[..., int]:
    """An ``os.open`` of a file system that does not know ``flag``."""
    real = os.open

    def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **more)

    return refuse


def stored_file(path: Path, index: int) -> Path:
    """The file of the sample ``index``; of one group only."""
    (file,) = path.rglob(f"{index}-*")
    return file


def on_disk(path: Path) -> int:
    """What lies under a root, without what is being written."""
    return sum(size for name, size in files_under(path).items() if not name.startswith("."))


def put_big(store: DiskStore, frames: int) -> None:
    """Put `BIG`, as large as so many samples."""
    store.put(BIG, memoryview(bytes(frames * FRAME_BYTES)))


@contextmanager
def at_listing(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``act`` before each folder that is listed, with its path and how many were listed before.

    What ``act`` lists itself does not count.
    """
    real, acting, listed = os.scandir, Lock(), 0

    def scandir(path: Any) -> Any:
        nonlocal listed
        if acting.acquire(blocking=False):
            try:
                act(path, listed)
            finally:
                listed += 1
                acting.release()
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        yield
