"""Reading frames of one share, whoever writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.stores.base import FrameName, StoredFrame
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.names import entries_of, fans_under, frame_path, ref_of, share_path
from kvstow.stores.disk.root import DiskRoot


class DiskReader:
    """Frames of one rank and namespace under a root; the reading half of `DiskStore`.

    Any thread may call it; every method blocks on the device.

    Args:
        root: an open root, of this rank or of another of the same engine.
        namespace: whose frames to read.
        rank: whose frames to read.
    """

    def __init__(self, root: DiskRoot, namespace: NamespaceDigest, rank: Rank) -> None:
        self.root = root
        self._path = share_path(root.path, namespace, rank)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        """Fill ``target`` or say absent; see `kvstow.stores.base.Store.get_into`."""
        self.root.check_open()
        path = frame_path(self._path, name.ref)
        try:
            self.root.files.read_into(path, target, self.root.clock.wall_s())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error, "get", path, len(target)) from error
        return True

    def contains(self, name: FrameName) -> bool:
        """Whether a frame is stored under ``name``.

        Raises:
            StoreUnavailableError: the device failed.
        """
        self.root.check_open()
        path = frame_path(self._path, name.ref)
        try:
            os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error, "look for", path) from error
        return True

    def scan(self) -> Iterator[StoredFrame]:
        """Every complete frame of this namespace and rank; from names alone, no file is read.

        Raises:
            StoreUnavailableError: a folder cannot be read.
        """
        self.root.check_open()
        try:
            for folder, group in fans_under(self._path):
                for entry in entries_of(folder):
                    ref = ref_of(entry.name, group)
                    if ref is None:
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield StoredFrame(ref, status.st_size, status.st_mtime)
        except OSError as error:
            raise store_error(error, "scan", self._path) from error
