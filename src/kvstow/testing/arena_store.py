"""An arena seen as a store, for what is written against stores: benches, and faults in front of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvstow.clock import Clock
from kvstow.errors import CorruptFrameError, NoSpaceError
from kvstow.keys.ids import ChunkRef
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.messages import Slot
from kvstow.stores.arena import Arena
from kvstow.stores.base import FrameName, StoredFrame


@dataclass
class _Kept:
    slot: Slot
    size_bytes: int
    touched_s: float


class ArenaStore:
    """Frames in the slots of an arena (a `kvstow.stores.base.Store`). Any thread may call it, in turn.

    In an engine the directory says what a slot holds; here a dictionary does. What the store contract
    finds out about this class is therefore mostly about the dictionary: the arena's own promises are
    in `kvstow.testing.arena_contract`. Frames have their true place and length in the arena's memory,
    so how fast they go in and out is the arena's doing.

    Args:
        arena: holds the frames; closed with this store. Nobody else may use its slots.
        slots: how many it has, by group.
        clock: says when a frame is touched.

    Attributes:
        name: ``"arena"``.
        arena: where the frames are.
    """

    name = "arena"

    def __init__(self, arena: Arena, slots: Iterable[int], clock: Clock) -> None:
        self.arena = arena
        self._clock = clock
        self._free = [[Slot(slot) for slot in range(count)] for count in slots]
        self._kept: dict[ChunkRef, _Kept] = {}
        # Held during copies: a slot that is read must not be given to another frame meanwhile.
        self._lock = threading.Lock()

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Copy ``frame`` into a slot; see `kvstow.stores.base.Store.put`.

        Raises:
            NoSpaceError: the group's slots are taken, or shorter than ``frame``.
        """
        with self._lock:
            kept = self._kept.get(name.ref)
            free = self._free[name.ref.group]
            if kept is None and not free:
                raise NoSpaceError(f"arena: every slot of group {name.ref.group} is taken; remove frames")
            slot = kept.slot if kept is not None else free[-1]
            place = self.arena.frame(name.ref.group, slot)
            if len(frame) > len(place):
                raise NoSpaceError(
                    f"arena: a slot of group {name.ref.group} holds {len(place)} bytes, not {len(frame)}"
                )
            if kept is None:
                free.pop()
            _copy(place[: len(frame)], frame)
            self._kept[name.ref] = _Kept(slot, len(frame), self._clock.wall_s())

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` or say absent; see `kvstow.stores.base.Store.get_into`."""
        with self._lock:
            kept = self._kept.get(name.ref)
            if kept is None:
                return False
            if kept.size_bytes != len(target):
                raise CorruptFrameError(
                    f"arena: {kept.size_bytes} bytes kept, {len(target)} wanted; "
                    "remove the frame and recompute"
                )
            _copy(target, self.arena.frame(name.ref.group, kept.slot)[: len(target)])
            kept.touched_s = self._clock.wall_s()
            return True

    def contains(self, name: FrameName) -> bool:
        """Whether a slot holds the frame of ``name``."""
        return name.ref in self._kept

    def remove(self, names: Iterable[FrameName]) -> None:
        """Free the slots of these frames; an absent one is not an error."""
        for name in names:
            with self._lock:
                kept = self._kept.pop(name.ref, None)
                if kept is not None:
                    self._free[name.ref.group].append(kept.slot)

    def scan(self) -> Iterator[StoredFrame]:
        """Every frame, as of the first one asked for."""
        with self._lock:
            found = [StoredFrame(ref, kept.size_bytes, kept.touched_s) for ref, kept in self._kept.items()]
        yield from found

    def slot_of(self, name: FrameName) -> tuple[GroupId, Slot] | None:
        """Where the frame of ``name`` lies, for a test that damages it there."""
        kept = self._kept.get(name.ref)
        return None if kept is None else (name.ref.group, kept.slot)

    def close(self) -> None:
        """Close the arena. Idempotent."""
        self.arena.close()


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy copies without the GIL.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
