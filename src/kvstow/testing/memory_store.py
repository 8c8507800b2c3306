"""The plainest store that keeps the contract: a dictionary. What others are compared with."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstow.clock import Clock
from kvstow.errors import CorruptFrameError, NoSpaceError
from kvstow.keys.ids import ChunkRef
from kvstow.stores.base import FrameName, StoredFrame


@dataclass
class _Kept:
    content: bytes
    touched_s: float


class MemoryStore:
    """Frames in a dictionary (a `kvstow.stores.base.Store`). Any thread may call it; nothing blocks for long.

    Args:
        budget_bytes: what all frames together may occupy. Replacing needs room for one of the two.
        clock: says when a frame is touched.

    Attributes:
        name: ``"memory"``.
        used_bytes: what all frames together occupy.
    """

    name = "memory"

    def __init__(self, budget_bytes: int, clock: Clock) -> None:
        self.used_bytes = 0
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._kept: dict[ChunkRef, _Kept] = {}
        self._lock = threading.Lock()

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Keep a copy of ``frame``; see `kvstow.stores.base.Store.put`."""
        content = bytes(frame)
        with self._lock:
            older = self._kept.get(name.ref)
            used_bytes = self.used_bytes + len(content) - (len(older.content) if older else 0)
            if used_bytes > self._budget_bytes:
                raise NoSpaceError(
                    f"memory store: {self.used_bytes} of {self._budget_bytes} bytes used, "
                    f"{len(content)} more wanted; remove frames or raise the budget"
                )
            self.used_bytes = used_bytes
            self._kept[name.ref] = _Kept(content, self._clock.wall_s())

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` or say absent; see `kvstow.stores.base.Store.get_into`."""
        with self._lock:
            kept = self._kept.get(name.ref)
            if kept is None:
                return False
            kept.touched_s = self._clock.wall_s()
        if len(kept.content) != len(target):
            raise CorruptFrameError(
                f"memory store: {len(kept.content)} bytes kept, {len(target)} wanted; "
                "remove the frame and recompute"
            )
        target[:] = kept.content
        return True

    def contains(self, name: FrameName) -> bool:
        """Whether a frame is kept under ``name``."""
        return name.ref in self._kept

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget frames; an absent one is not an error."""
        for name in names:
            with self._lock:
                kept = self._kept.pop(name.ref, None)
                self.used_bytes -= len(kept.content) if kept else 0

    def scan(self) -> Iterator[StoredFrame]:
        """Every frame, as of the first one asked for."""
        with self._lock:
            found = [StoredFrame(ref, len(kept.content), kept.touched_s) for ref, kept in self._kept.items()]
        yield from found

    def close(self) -> None:
        """Nothing to release. The frames stay, so that a test can restart what uses the store."""
