"""The disk store: one file per frame, its reference in its name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from kvstow.errors import StoreError
from kvstow.keys.ids import ChunkRef, NamespaceDigest
from kvstow.stores.base import FrameName, StoredFrame
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.files import Draft, make_folders
from kvstow.stores.disk.inventory import Inventory
from kvstow.stores.disk.names import frame_path
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.share import Share
from kvstow.stores.disk.usage import Reservation


class DiskStore(DiskReader):
    """Frames of one rank and namespace, under a root it has locked (a `kvstow.stores.base.Store`).

    Any thread may call it; every method blocks on the device. Buffers are used during the call
    only; page-aligned ones go past the page cache where the file system has O_DIRECT. A frame is
    not synced: what a power cut leaves half written fails its checksum and is a miss.

    Attributes:
        name: ``"disk"``.
        root: the share it writes to; closed with the store.
    """

    name = "disk"

    def __init__(self, root: DiskRoot, namespace: NamespaceDigest) -> None:
        """Take stock of the root; deletes older namespaces' frames if the budget has shrunk.

        Blocks: about a second per 200,000 files.

        Args:
            root: an open root; the store closes it, also when this fails.
            namespace: whose frames to keep; frames of others make room for them.

        Raises:
            StoreUnavailableError: the folder cannot be read, or an old frame not deleted.
        """
        super().__init__(root, namespace, root.rank)
        self._inventory = Inventory()
        try:
            self._share = Share(root, self._path, self._inventory)
            self._share.trim()
        except OSError as error:
            root.close()
            raise store_error(error, "take stock of", root.path) from error
        except BaseException:
            root.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of this rank under the root: all namespaces, and writes under way."""
        return self._share.used_bytes

    def put(self, name: FrameName, frame: memoryview) -> None:
        """Store ``frame``; see `kvstow.stores.base.Store.put`.

        Replacing needs room for both. Other namespaces' frames make room, this one's never.
        """
        self.root.check_open()
        path = frame_path(self._path, name.ref)
        with self._share.reserve(len(frame)) as reservation:
            try:
                self._write(path, name.ref, frame, reservation)
            except OSError as error:
                raise store_error(error, "put", path, len(frame)) from error

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` or say absent; see `kvstow.stores.base.Store.get_into`."""
        is_there = super().get_into(name, target)
        if is_there:
            self._inventory.touch(name.ref, self.root.clock.wall_s())
        return is_there

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget frames, all that can be; see `kvstow.stores.base.Store.remove`."""
        self.root.check_open()
        first: StoreError | None = None
        for name in names:
            path = frame_path(self._path, name.ref)
            try:
                self._unlink(path, name.ref)
            except OSError as error:
                first = first or store_error(error, "remove", path)
        if first is not None:
            raise first

    def scan(self) -> Iterator[StoredFrame]:
        """Every frame of this namespace and rank; see `kvstow.stores.base.Store.scan`.

        The first scan reads no folder: it gives what was found at start, with what this store did
        since. A file that somebody else brought or took since then is seen by later scans.

        Raises:
            StoreUnavailableError: a folder cannot be read.
        """
        self.root.check_open()
        found = self._inventory.hand_over()
        if found is None:
            yield from super().scan()
            return
        found.reverse()
        while found:
            yield found.pop()

    def close(self) -> None:
        """Give up the lock; later calls raise StoreUnavailableError. Idempotent.

        The caller first waits for its own puts: one that is under way still ends, unlocked.
        """
        self.root.close()

    def _write(self, path: str, ref: ChunkRef, frame: memoryview, reservation: Reservation) -> None:
        """Write and publish, and count the file in the place of one that it replaced."""
        folder, touched_s = os.path.dirname(path), self.root.clock.wall_s()
        with self._draft(folder, frame, touched_s) as draft, self._share.naming(folder):
            replaced_bytes = _size_of(path)
            draft.publish(path)
            reservation.fill(folder, replaced_bytes)
            self._inventory.add(StoredFrame(ref, len(frame), touched_s))

    def _unlink(self, path: str, ref: ChunkRef) -> None:
        """Remove a file, and count it no more."""
        folder = os.path.dirname(path)
        with self._share.naming(folder):
            try:
                size_bytes = os.stat(path, follow_symlinks=False).st_size
                os.unlink(path)
            except FileNotFoundError:
                # Never stored; or deleted by hand, and then its bytes are the recount's.
                size_bytes = 0
            self._share.free(folder, size_bytes)
            self._inventory.drop(ref)

    def _draft(self, folder: str, frame: memoryview, touched_s: float) -> Draft:
        try:
            return self.root.files.draft(folder, frame, touched_s)
        except FileNotFoundError:
            make_folders(self.root.path, folder)
        return self.root.files.draft(folder, frame, touched_s)


def _size_of(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
