"""What a rank's share of a root occupies, and whose frames go first when it is full."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import msgspec

from kvstow.errors import NoSpaceError
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import StoredFrame
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.inventory import Inventory
from kvstow.stores.disk.names import Contents, contents_of, group_in, ref_of, shares_under
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.usage import Reservation, Usage

_log = logging.getLogger(__name__)

RECOUNT_PAUSE_S = 60.0
"""Least time from the end of one count of all files to the start of the next."""


class Leftover(msgspec.Struct, frozen=True, order=True):
    """A frame of another namespace: of an older model, layout or setting."""

    touched_s: float
    size_bytes: int
    path: str


class Share:
    """Bytes of one rank under a root, all namespaces together, against a hard budget.

    Any thread may call it. Locks, outermost first: the one for making room, which is held while
    leftovers are deleted and files recounted; a folder's (`naming`), held while names in it
    change; that of `Usage`, never held during I/O.
    """

    def __init__(self, root: DiskRoot, own_path: str, inventory: Inventory) -> None:
        """Take stock of the disk: count every file, remove drafts of dead writers, list leftovers.

        Args:
            root: the locked root.
            own_path: the folder of the namespace in use, whose frames are never deleted here.
            inventory: is told of every frame there.

        Raises:
            OSError: a folder cannot be read, or a draft not removed.
        """
        self._root = root
        self._usage = Usage(root.budget_bytes)
        # By the folder's two digits: the folders that share a lock are few and in different groups.
        self._naming = {f"{byte:02x}": threading.Lock() for byte in range(256)}
        self._naming_elsewhere = threading.Lock()
        self._making_room = threading.Lock()
        self._recount_failed = False
        self._leftovers: list[Leftover] = []
        self._take_stock(own_path, inventory)
        self._counted_s = root.clock.monotonic_s()
        # Oldest last, to be popped.
        self._leftovers.sort(reverse=True)
        if self._leftovers:
            _log.info(
                "disk root %s rank %d: %d of %d bytes used, %d frames of other namespaces",
                root.path,
                root.rank,
                self.used_bytes,
                root.budget_bytes,
                len(self._leftovers),
            )

    @property
    def used_bytes(self) -> int:
        """Bytes on disk and bytes reserved for writers."""
        return self._usage.used_bytes

    def naming(self, folder: str) -> threading.Lock:
        """Held by whoever gives or takes a name in ``folder``, until that is counted."""
        return self._naming.get(folder[-2:], self._naming_elsewhere)

    def reserve(self, size_bytes: int) -> Reservation:
        """Set ``size_bytes`` of the budget aside, deleting other namespaces' frames for it if need be.

        Before there is no space, files are recounted: some may have been deleted by hand.

        Raises:
            NoSpaceError: what is left belongs to the namespace in use: evict, or skip the save.
            StoreUnavailableError: another namespace's frame cannot be deleted.
        """
        reservation = self._usage.reserve(size_bytes)
        if reservation is not None:
            return reservation
        # One at a time: a second writer waits for the room that the first is making.
        with self._making_room:
            while (reservation := self._usage.reserve(size_bytes)) is None:
                if self._leftovers:
                    self._delete_oldest()
                elif self._root.clock.monotonic_s() - self._counted_s >= RECOUNT_PAUSE_S:
                    self._recount()
                else:
                    raise NoSpaceError(
                        f"disk root {self._root.path} rank {self._root.rank}: {self.used_bytes} of "
                        f"{self._root.budget_bytes} bytes used, {size_bytes} more wanted; "
                        "evict frames or raise the disk budget"
                    )
        return reservation

    def trim(self) -> None:
        """Delete other namespaces' frames until the budget holds, or none is left.

        Raises:
            StoreUnavailableError: one of them cannot be deleted.
        """
        with self._making_room:
            while self._leftovers and self.used_bytes > self._root.budget_bytes:
                self._delete_oldest()

    def free(self, folder: str, size_bytes: int) -> None:
        """A file of ``folder`` is gone; the caller holds `naming` of it."""
        self._usage.free(folder, size_bytes)

    def _delete_oldest(self) -> None:
        oldest = self._leftovers[-1]
        try:
            os.unlink(oldest.path)
        except FileNotFoundError:
            _log.info("%s was gone already", oldest.path)
        except OSError as error:
            raise store_error(error, "delete another namespace's frame", oldest.path) from error
        self._leftovers.pop()
        # The folder's lock would keep a recount away; the one for making room does already.
        folder = os.path.dirname(oldest.path)
        self._usage.free(folder, oldest.size_bytes)
        self._prune(folder)

    def _prune(self, folder: str) -> None:
        """Remove ``folder`` and what is above it, as far as it is empty."""
        while folder != self._root.path:
            try:
                os.rmdir(folder)
            except OSError:
                # Not empty, or another rank was faster: either way nothing of ours is lost.
                return
            folder = os.path.dirname(folder)

    def _take_stock(self, own_path: str, inventory: Inventory) -> None:
        self._usage.begin_recount()
        for share in self._shares():
            folders = [share]
            while folders:
                folder = folders.pop()
                contents = self._list(folder)
                folders += contents.folders
                for draft in contents.drafts:
                    # The root's lock is ours: its writer is dead.
                    os.unlink(draft)
                if share == own_path:
                    _enter(contents, group_in(folder, share), inventory)
                else:
                    self._leftovers += _leftovers(contents)
        self._usage.end_recount()

    def _recount(self) -> None:
        """Correct the count by what lies on disk, if it can be read."""
        counted_bytes = self.used_bytes
        self._usage.begin_recount()
        try:
            folders = list(self._shares())
            while folders or (folders := self._usage.end_recount()):
                folders += self._list(folders.pop()).folders
        except OSError as error:
            self._usage.abandon_recount()
            if not self._recount_failed:
                _log.warning(
                    "disk root %s rank %d is full and its files cannot be recounted (%s); files that were "
                    "deleted by hand stay counted: check the device and the rights on the folder; "
                    "said once for this root",
                    self._root.path,
                    self._root.rank,
                    error,
                )
            self._recount_failed = True
        self._counted_s = self._root.clock.monotonic_s()
        if counted_bytes != self.used_bytes:
            _log.info(
                "disk root %s rank %d: files were recounted: %d bytes used, %d before",
                self._root.path,
                self._root.rank,
                self.used_bytes,
                counted_bytes,
            )

    def _shares(self) -> Iterator[str]:
        """The folders that are this rank's, whatever their namespace."""
        for path, rank in shares_under(self._root.path):
            # Ranks that this engine does not have were left by a larger one: each goes to one of us.
            world_size = self._root.world_size
            if rank == self._root.rank or (rank >= world_size and rank % world_size == self._root.rank):
                yield path

    def _list(self, folder: str) -> Contents:
        """What lies in one folder, and count it."""
        with self.naming(folder):
            contents = contents_of(folder)
            self._usage.listed(folder, contents.size_bytes)
        return contents


def _enter(contents: Contents, group: GroupId | None, inventory: Inventory) -> None:
    """Tell the inventory of a folder's frames, which are of ``group``; None: there are none."""
    if group is None:
        return
    for entry, status in contents.files:
        ref = ref_of(entry.name, group)
        if ref is not None:
            inventory.add(StoredFrame(ref, status.st_size, status.st_mtime))


def _leftovers(contents: Contents) -> Iterator[Leftover]:
    for entry, status in contents.files:
        if ref_of(entry.name, GroupId(0)) is not None:
            yield Leftover(status.st_mtime, status.st_size, entry.path)
