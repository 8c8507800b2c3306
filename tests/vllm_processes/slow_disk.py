"""A disk that takes its time, in an engine's process."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstow.stores.base import FrameName
from kvstow.stores.disk.store import DiskStore

HERE = Path(__file__).parent


def make_slow(write_s: float) -> None:
    """Have every frame take ``write_s`` more to be written, in this process."""
    put = DiskStore.put

    def slow_put(store: DiskStore, name: FrameName, frame: memoryview) -> None:
        threading.Event().wait(write_s)
        put(store, name, frame)

    DiskStore.put = slow_put  # type: ignore[method-assign]


def everywhere(write_s: float) -> dict[str, str]:
    """The environment that does the same in all processes that inherit it (see ``at_start``)."""
    return {"PYTHONPATH": f"{HERE}:{HERE / 'at_start'}", "SLOW_DISK_WRITE_S": str(write_s)}
