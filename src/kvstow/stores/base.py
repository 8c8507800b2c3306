"""The store contract: a mechanism that keeps frames. What to keep is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from kvstow.keys.ids import ChunkRef, Key


class FrameName(msgspec.Struct, frozen=True):
    """A frame's name in a store: its key, and the reference that a scan must give back."""

    key: Key
    ref: ChunkRef


class StoredFrame(msgspec.Struct, frozen=True):
    """One frame that a scan found.

    Attributes:
        ref: which chunk it holds.
        size_bytes: what it occupies.
        touched_s: when it was last written or read (wall clock), for eviction order.
    """

    ref: ChunkRef
    size_bytes: int
    touched_s: float


class Store(Protocol):
    """Keeps whole frames under names. Every method may block; any thread may call it.

    A store never verifies payloads: `kvstow.stores.framing.open_frame` does, once, for all.
    """

    name: str

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Store ``frame``; it becomes visible whole or not at all. Replaces an older one.

        Args:
            name: the frame's name.
            frame: a sealed frame (see `kvstow.stores.framing`); read only during the call.

        Raises:
            NoSpaceError: the budget or the device is full; nothing was kept.
            StoreUnavailableError: the device failed; nothing was kept.
        """
        ...

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` (exactly one frame long) and say True, or say False if absent.

        Raises:
            CorruptFrameError: what is stored has another length than ``target``.
            StoreUnavailableError: the device failed.
        """
        ...

    def contains(self, name: FrameName) -> bool:
        """Whether a frame is stored under ``name``."""
        ...

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget frames; an absent one is not an error.

        Raises:
            StoreUnavailableError: the device failed; some may remain.
        """
        ...

    def scan(self) -> Iterator[StoredFrame]:
        """Every frame of this store's namespace and rank that was complete when it was reached."""
        ...

    def close(self) -> None:
        """Release files and locks. Idempotent."""
        ...
