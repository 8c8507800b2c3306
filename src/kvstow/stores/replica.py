"""One stored copy of what every rank holds: the first rank keeps it, the others read it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from kvstow.layout.geometry import GroupId
from kvstow.stores.base import FrameName, Store, StoredFrame


class FrameReader(Protocol):
    """The reading half of `kvstow.stores.base.Store`."""

    def get_into(self, name: FrameName, target: memoryview) -> bool: ...

    def contains(self, name: FrameName) -> bool: ...

    def scan(self) -> Iterator[StoredFrame]: ...


class ReplicaStore:
    """A rank's store whose replicated groups lie in the first rank's (a `kvstow.stores.base.Store`).

    A put or a removal of a replicated frame does nothing here: the same order went to the first
    rank, which does it, and a frame counts as stored only when every rank has said so. Threads and
    blocking are those of the two stores.

    Args:
        own: keeps the other groups; closed with this one.
        first: reads what the first rank keeps.
        replicated: the groups that lie there.
    """

    def __init__(self, own: Store, first: FrameReader, replicated: frozenset[GroupId]) -> None:
        self.name = own.name
        self._own = own
        self._first = first
        self._replicated = replicated

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Keep ``frame``, if it is this rank's to keep."""
        if name.ref.group not in self._replicated:
            self._own.put(name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` or say absent; see `kvstow.stores.base.Store.get_into`."""
        return self._reader(name).get_into(name, target)

    def contains(self, name: FrameName) -> bool:
        """Whether a frame is stored under ``name``."""
        return self._reader(name).contains(name)

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget the frames that are this rank's to keep."""
        self._own.remove([name for name in names if name.ref.group not in self._replicated])

    def scan(self) -> Iterator[StoredFrame]:
        """This rank's frames, and the first rank's of the replicated groups."""
        mine = (found for found in self._own.scan() if found.ref.group not in self._replicated)
        theirs = (found for found in self._first.scan() if found.ref.group in self._replicated)
        return chain(mine, theirs)

    def close(self) -> None:
        """Close this rank's own store."""
        self._own.close()

    def _reader(self, name: FrameName) -> FrameReader:
        return self._first if name.ref.group in self._replicated else self._own
