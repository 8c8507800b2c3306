"""What is used of a budget: bytes stored in files, and bytes reserved for puts under way. No I/O here.

Drafts are not stored but reserved: a put's bytes pass from one sum to the other when its file gets its name.

A recount finds the stored sum anew while frames come and go. Whoever gives or takes a name in a folder,
and whoever lists the folder for the recount, holds its lock (`kvstow.stores.disk.share.Share.naming`)
until that is entered here. So every change is entered either

- before its folder is listed, and the listing has seen it;
- after, and is added to what was found;
- or in a folder that the walk misses, being newer than its parent's listing: `end_recount` names those.

What somebody else deletes behind a listing stays counted until the next recount: the sum is never too low.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType


class Reservation:
    """Bytes set aside for one file. `fill` it, or leave the context to give them back."""

    def __init__(self, usage: Usage, size_bytes: int) -> None:
        """Made by `Usage.reserve`."""
        self._usage = usage
        self._size_bytes = size_bytes

    def fill(self, folder: str, replaced_bytes: int) -> None:
        """The bytes are a file in ``folder`` now, in place of ``replaced_bytes``; its lock is held."""
        self._usage.store(folder, self._size_bytes, replaced_bytes)
        self._size_bytes = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._usage.give_back(self._size_bytes)


class Usage:
    """Bytes of one rank under a root, all namespaces together, against a hard budget.

    Any thread may call it; nothing here blocks on the device.

    Args:
        budget_bytes: what stored and reserved bytes together do not pass by a reservation.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._stored_bytes = 0
        self._reserved_bytes = 0
        self._recount: _Recount | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes in files, and bytes reserved for writers."""
        with self._lock:
            return self._stored_bytes + self._reserved_bytes

    def reserve(self, size_bytes: int) -> Reservation | None:
        """Set ``size_bytes`` aside, or None if the budget has no room."""
        with self._lock:
            if self._stored_bytes + self._reserved_bytes + size_bytes > self._budget_bytes:
                return None
            self._reserved_bytes += size_bytes
        return Reservation(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Bytes that were reserved are not wanted."""
        with self._lock:
            self._reserved_bytes -= size_bytes

    def store(self, folder: str, size_bytes: int, replaced_bytes: int) -> None:
        """Bytes that were reserved are a file in ``folder``; the caller holds its lock."""
        with self._lock:
            self._reserved_bytes -= size_bytes
            self._change(folder, size_bytes - replaced_bytes)

    def free(self, folder: str, size_bytes: int) -> None:
        """A file of ``folder`` is gone; the caller holds its lock."""
        with self._lock:
            self._change(folder, -size_bytes)

    def begin_recount(self) -> None:
        """Start over with listing folders; one recount at a time, an unfinished one is dropped."""
        with self._lock:
            self._recount = _Recount()

    def listed(self, folder: str, size_bytes: int) -> None:
        """So much is in the files right in ``folder``, drafts left out; the caller holds its lock."""
        with self._lock:
            if self._recount is not None:
                self._recount.found_bytes += size_bytes
                self._recount.listed.add(folder)

    def end_recount(self) -> list[str]:
        """Go by what was found from now on.

        Returns:
            Folders that changed and were not listed. While there are any the recount goes on: list
            them, and end it again.
        """
        with self._lock:
            if self._recount is None:
                return []
            missed = self._recount.changed - self._recount.listed
            if not missed:
                self._stored_bytes = self._recount.found_bytes
                self._recount = None
            return list(missed)

    def abandon_recount(self) -> None:
        """Go on with the old sum."""
        with self._lock:
            self._recount = None

    def _change(self, folder: str, by_bytes: int) -> None:
        self._stored_bytes += by_bytes
        if self._recount is None:
            return
        if folder in self._recount.listed:
            self._recount.found_bytes += by_bytes
        else:
            self._recount.changed.add(folder)


@dataclass
class _Recount:
    """How far a walk has come: folders by path, as many as there are."""

    found_bytes: int = 0
    listed: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    """Before they were listed."""
