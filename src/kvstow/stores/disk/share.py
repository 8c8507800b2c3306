"""What a rank's share of a root occupies, and whose frames go first when it is full."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from os import DirEntry

import msgspec

from kvstow.errors import NoSpaceError
from kvstow.layout.geometry import GroupId
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.names import DRAFT_PREFIX, entries_of, ref_of, shares_under
from kvstow.stores.disk.root import DiskRoot

_log = logging.getLogger(__name__)


class Leftover(msgspec.Struct, frozen=True, order=True):
    """A frame of another namespace: of an older model, layout or setting."""

    touched_s: float
    size_bytes: int
    path: str


class Share:
    """Bytes of one rank under a root, all namespaces together, against a hard budget.

    Any thread may call it. The count is kept under a lock that is never held during I/O.
    """

    def __init__(self, root: DiskRoot, own_path: str) -> None:
        """Take stock of the disk: count every file, remove drafts of dead writers, list leftovers.

        Args:
            root: the locked root.
            own_path: the folder of the namespace in use, whose frames are never deleted here.

        Raises:
            OSError: the folder cannot be read, or a leftover not removed.
        """
        self._root = root
        self._counting = threading.Lock()
        self._making_room = threading.Lock()
        self._used_bytes = 0
        self._leftovers: list[Leftover] = []
        for path, rank in shares_under(root.path):
            # Ranks that this engine does not have were left by a larger one: each goes to one of us.
            if rank == root.rank or (rank >= root.world_size and rank % root.world_size == root.rank):
                self._count(path, own=path == own_path)
        # Oldest last, to be popped.
        self._leftovers.sort(reverse=True)
        if self._leftovers:
            _log.info(
                "disk root %s rank %d: %d of %d bytes used, %d frames of other namespaces",
                root.path,
                root.rank,
                self._used_bytes,
                root.budget_bytes,
                len(self._leftovers),
            )

    @property
    def used_bytes(self) -> int:
        """Bytes on disk and bytes promised to writers."""
        return self._used_bytes

    def reserve(self, size_bytes: int) -> None:
        """Set ``size_bytes`` of the budget aside, deleting other namespaces' frames for it if need be.

        Raises:
            NoSpaceError: what is left belongs to the namespace in use: evict, or skip the save.
            StoreUnavailableError: another namespace's frame cannot be deleted.
        """
        if self._take(size_bytes):
            return
        # One at a time: a second writer waits for the room that the first is making.
        with self._making_room:
            while not self._take(size_bytes):
                if not self._leftovers:
                    raise NoSpaceError(
                        f"disk root {self._root.path} rank {self._root.rank}: {self._used_bytes} of "
                        f"{self._root.budget_bytes} bytes used, {size_bytes} more wanted; "
                        "evict frames or raise the disk budget"
                    )
                self._delete_oldest()

    def trim(self) -> None:
        """Delete other namespaces' frames until the budget holds, or none is left.

        Raises:
            StoreUnavailableError: one of them cannot be deleted.
        """
        with self._making_room:
            while self._leftovers and self._used_bytes > self._root.budget_bytes:
                self._delete_oldest()

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were reserved and not used, or whose file is gone."""
        with self._counting:
            self._used_bytes -= size_bytes

    def _take(self, size_bytes: int) -> bool:
        with self._counting:
            if self._used_bytes + size_bytes > self._root.budget_bytes:
                return False
            self._used_bytes += size_bytes
            return True

    def _delete_oldest(self) -> None:
        oldest = self._leftovers[-1]
        try:
            os.unlink(oldest.path)
        except FileNotFoundError:
            _log.info("%s was gone already", oldest.path)
        except OSError as error:
            raise store_error(error, "delete another namespace's frame", oldest.path) from error
        self._leftovers.pop()
        self.give_back(oldest.size_bytes)
        self._prune(os.path.dirname(oldest.path))

    def _prune(self, folder: str) -> None:
        """Remove ``folder`` and what is above it, as far as it is empty."""
        while folder != self._root.path:
            try:
                os.rmdir(folder)
            except OSError:
                # Not empty, or another rank was faster: either way nothing of ours is lost.
                return
            folder = os.path.dirname(folder)

    def _count(self, share: str, *, own: bool) -> None:
        for entry in _files_under(share):
            if entry.name.startswith(DRAFT_PREFIX):
                os.unlink(entry.path)
                continue
            status = entry.stat(follow_symlinks=False)
            self._used_bytes += status.st_size
            if not own and ref_of(entry.name, GroupId(0)) is not None:
                self._leftovers.append(Leftover(status.st_mtime, status.st_size, entry.path))


def _files_under(folder: str) -> Iterator[DirEntry[str]]:
    for entry in entries_of(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _files_under(entry.path)
        else:
            yield entry
