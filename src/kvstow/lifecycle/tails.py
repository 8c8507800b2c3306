"""Chunks that lead to no image: with recurrent state, nobody can resume at them or past them.

They come from requests that ended past their last image, and from images that were evicted. All
that they are good for is to spare a later request their copies, so they are the first to go,
deepest first. Once a request saves something at them or past them, they are like any other again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import GroupKind
from kvstow.lifecycle.tables import Entry, GroupTable


class Tails:
    """Marks such chunks in the first PAGED group, and puts them first in the orders of all groups.

    Marks nothing where there is no PAGED group or no STATE group.

    Args:
        tables: all groups.
    """

    def __init__(self, tables: Sequence[GroupTable]) -> None:
        self._tables = tables
        self._states = [table for table in tables if table.rule.kind is GroupKind.STATE]
        paged = [table for table in tables if table.is_paged]
        self._lead = paged[0] if paged and self._states else None

    def find(self) -> None:
        """Mark what leads to no image among all that is there, as after a restart."""
        if self._lead is not None:
            # Entries came least recent first: the tail that is found last is the first to go.
            for chunk in reversed(list(self._lead.entries)):
                if chunk not in self._lead.followers:
                    self.end(chunk)

    def retire(self, chunks: Sequence[ChunkId]) -> None:
        """The request with these chunks has ended: mark those past its last image."""
        if self._lead is None:
            return
        last = next((chunk for chunk in reversed(chunks) if chunk in self._lead.entries), None)
        if last is not None:
            self.end(last)

    def end(self, chunk: ChunkId) -> None:
        """Nobody goes on from ``chunk``: mark it and those before it, back to one that leads on."""
        if self._lead is None:
            return
        tail = []
        entry = self._lead.entries.get(chunk)
        while entry is not None and not self._leads_on(entry):
            if not entry.spent:
                self._lead.mark_spent(entry, spent=True)
                tail.append(entry.ref.chunk)
            entry = self._lead.entries.get(entry.ref.parent)
        # The deepest last, to be the first to go.
        for spent in reversed(tail):
            for table in self._tables:
                table.arena_order.demote(spent)
                table.disk_order.demote(spent)

    def go_on(self, ref: ChunkRef) -> None:
        """A request has come to ``ref`` and saves it: what leads there may be of use again."""
        if self._lead is None:
            return
        deepest_first = []
        entry = self._lead.entries.get(ref.chunk) or self._lead.entries.get(ref.parent)
        while entry is not None and entry.spent:
            self._lead.mark_spent(entry, spent=False)
            deepest_first.append(entry.ref.chunk)
            entry = self._lead.entries.get(entry.ref.parent)
        if deepest_first:
            for table in self._tables:
                table.arena_order.touch_prefix(deepest_first)
                table.disk_order.touch_prefix(deepest_first)

    def is_spent(self, chunk: ChunkId) -> bool:
        """Whether ``chunk`` is marked."""
        if self._lead is None:
            return False
        entry = self._lead.entries.get(chunk)
        return entry is not None and entry.spent

    def of_use(self, chunks: Sequence[ChunkId]) -> Sequence[ChunkId]:
        """Those of ``chunks`` that are not marked."""
        if self._lead is None or not self._lead.spent_followers:
            return chunks
        return [chunk for chunk in chunks if not self.is_spent(chunk)]

    def _leads_on(self, entry: Entry) -> bool:
        assert self._lead is not None
        return self._lead.is_followed(entry.ref.chunk) or any(
            (image := table.entries.get(entry.ref.chunk)) is not None and not image.is_gone
            for table in self._states
        )
