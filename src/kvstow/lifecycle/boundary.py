"""The joint rule: the largest boundary at which every group has what its kind needs.

First every PAGED group is walked upwards, to the first chunk that is missing. Then the WINDOW
and STATE groups are walked downwards from there; a frame that is missing rules out every
boundary from just after it up to the one looked at (it lies in the reach of all of them), so
the walk goes on at the missing frame, and looks at no frame twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from kvstow.keys.ids import ChunkId
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.tables import Copy, GroupTable

Denied = Mapping[GroupId, AbstractSet[ChunkId]]
"""Frames that are not to be used, whatever the tables say, by group."""

_NOTHING: AbstractSet[ChunkId] = frozenset()


class BoundarySearch:
    """One lookup in the tables of all groups; changes nothing.

    Args:
        tables: all groups.
        chunks: a request's.
        start: the chunk that the engine's floor lies in; what lies before it is the engine's own.
        denied: frames that count as missing.
        disk_usable: whether a copy on disk counts.
    """

    def __init__(
        self,
        tables: Sequence[GroupTable],
        chunks: Sequence[ChunkId],
        start: int,
        denied: Denied,
        *,
        disk_usable: bool,
    ) -> None:
        self._tables = tables
        self._chunks = chunks
        self._start = start
        self._denied = denied
        self._disk_usable = disk_usable
        self._waits = False

    def run(self, stop: int) -> tuple[int, bool]:
        """The largest boundary in (start, stop] or ``start``, and whether it pays to ask again.

        It does when the boundary would be larger if the copies that are on their way from disk
        into the arena right now were there.
        """
        paged = self._paged_until(self._start, stop, promoted=False)
        boundary = self._held_at(paged, promoted=False)
        if not self._waits:
            return boundary, False
        # All before `paged` is there already.
        paged = self._paged_until(paged, stop, promoted=True)
        return boundary, self._held_at(paged, promoted=True) > boundary

    def _paged_until(self, start: int, stop: int, *, promoted: bool) -> int:
        """The end of what every PAGED group has of the chunks from ``start`` on."""
        # A long prompt walks this loop hundreds of times: a name looked up once is not looked up there.
        ready, disk_usable = Copy.READY, self._disk_usable
        for table in self._tables:
            if not table.is_paged:
                continue
            find = table.entries.get
            denied = self._denied.get(table.group, _NOTHING)
            index = start
            for chunk in self._chunks[start:stop]:
                entry = find(chunk)
                if entry is None or (denied and chunk in denied):
                    break
                if entry.arena is not ready:
                    if entry.promoting:
                        self._waits = True
                        if not promoted:
                            break
                    elif entry.disk is not ready or not disk_usable:
                        break
                index += 1
            stop = index
        return stop

    def _held_at(self, boundary: int, *, promoted: bool) -> int:
        """The largest boundary up to ``boundary`` at which every other group has what it needs."""
        walks = [_Downwards(table, boundary) for table in self._tables if not table.is_paged]
        agreed = False
        while not agreed:
            agreed = True
            for walk in walks:
                found = self._lower(walk, boundary, promoted=promoted)
                agreed = agreed and found == boundary
                boundary = found
        return boundary

    def _lower(self, walk: _Downwards, boundary: int, *, promoted: bool) -> int:
        """The largest boundary up to ``boundary`` at which the group of ``walk`` has what it needs."""
        ready, disk_usable, reach, chunks = Copy.READY, self._disk_usable, walk.reach, self._chunks
        find = walk.table.entries.get
        denied = self._denied.get(walk.table.group, _NOTHING)
        index = min(walk.seen_from, boundary)
        while index > self._start and boundary - index < reach:
            index -= 1
            chunk = chunks[index]
            entry = find(chunk)
            if entry is not None and not (denied and chunk in denied):
                if entry.arena is ready:
                    continue
                if entry.promoting:
                    self._waits = True
                    if promoted:
                        continue
                elif entry.disk is ready and disk_usable:
                    continue
            boundary = index
        walk.seen_from = index
        return boundary


class _Downwards:
    """How far down one WINDOW or STATE group was looked at.

    Attributes:
        seen_from: every frame from here to the boundary found last is there.
    """

    __slots__ = ("reach", "seen_from", "table")

    def __init__(self, table: GroupTable, boundary: int) -> None:
        reach = table.rule.reach_chunks
        assert reach is not None  # a PAGED group's: it is walked upwards
        self.table = table
        self.reach = reach
        self.seen_from = boundary
