"""The disk store: one file per frame, its reference in its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from kvstow.errors import StoreError
from kvstow.keys.ids import ChunkRef, NamespaceDigest
from kvstow.stores.base import FrameName
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.files import Draft, make_folders
from kvstow.stores.disk.names import frame_path
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.share import Share


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
        # By the chunk's first byte, as the folders: whoever changes a name also counts its bytes.
        self._naming = [threading.Lock() for _ in range(256)]
        try:
            self._share = Share(root, self._path)
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
        self._share.reserve(len(frame))
        unused_bytes = len(frame)
        try:
            unused_bytes = self._write(path, name.ref, frame)
        except OSError as error:
            raise store_error(error, "put", path, len(frame)) from error
        finally:
            self._share.give_back(unused_bytes)

    def remove(self, names: Iterable[FrameName]) -> None:
        """Forget frames, all that can be; see `kvstow.stores.base.Store.remove`."""
        self.root.check_open()
        first: StoreError | None = None
        for name in names:
            path = frame_path(self._path, name.ref)
            try:
                with self._naming[name.ref.chunk[0]]:
                    size_bytes = _size_of(path)
                    os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                first = first or store_error(error, "remove", path)
            else:
                self._share.give_back(size_bytes)
        if first is not None:
            raise first

    def close(self) -> None:
        """Give up the lock; later calls raise StoreUnavailableError. Idempotent.

        The caller first waits for its own puts: one that is under way still ends, unlocked.
        """
        self.root.close()

    def _write(self, path: str, ref: ChunkRef, frame: memoryview) -> int:
        """Write and publish; the bytes of the file that it replaced, 0 for none."""
        with self._draft(os.path.dirname(path), frame) as draft, self._naming[ref.chunk[0]]:
            replaced_bytes = _size_of(path)
            draft.publish(path)
        return replaced_bytes

    def _draft(self, folder: str, frame: memoryview) -> Draft:
        touched_s = self.root.clock.wall_s()
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
