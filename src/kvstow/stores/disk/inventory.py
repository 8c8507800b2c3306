"""What was found at start, until the first scan asks for it: one walk serves both."""

from __future__ import annotations

import threading

import msgspec

from kvstow.keys.ids import ChunkRef
from kvstow.stores.base import StoredFrame


class Inventory:
    """Frames of the namespace in use: as found at start, with what was done to them since.

    At most one entry a file, and none once it was handed over. Any thread; nothing here blocks on
    the device. Whoever puts or removes a frame says so while the frame's folder is still theirs
    (`kvstow.stores.disk.share.Share.naming`): what is said last is what lies on disk.
    """

    def __init__(self) -> None:
        """Nothing was found yet."""
        self._lock = threading.Lock()
        self._frames: dict[ChunkRef, StoredFrame] | None = {}

    def add(self, frame: StoredFrame) -> None:
        """``frame`` is there, and no other under its reference."""
        with self._lock:
            if self._frames is not None:
                self._frames[frame.ref] = frame

    def touch(self, ref: ChunkRef, touched_s: float) -> None:
        """The frame was read at ``touched_s``."""
        with self._lock:
            if self._frames is not None and (frame := self._frames.get(ref)):
                self._frames[ref] = msgspec.structs.replace(frame, touched_s=touched_s)

    def drop(self, ref: ChunkRef) -> None:
        """The frame is not there."""
        with self._lock:
            if self._frames is not None:
                self._frames.pop(ref, None)

    def hand_over(self) -> list[StoredFrame] | None:
        """Every frame, to the first who asks; to all others None."""
        with self._lock:
            frames, self._frames = self._frames, None
        return None if frames is None else list(frames.values())
