"""Frames as files in a folder that one engine has locked. Design: docs/design/002-stored-form.md."""

from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore

__all__ = ["DiskRoot", "DiskStore"]
