"""What an OSError means for a store: one place that maps errno to the error tree."""

from __future__ import annotations

import errno

from kvstow.errors import NoSpaceError, StoreError, StoreUnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def store_error(error: OSError, doing: str, path: str, size_bytes: int | None = None) -> StoreError:
    """The store error to raise for ``error``.

    Args:
        error: what the system said.
        doing: the verb, such as ``"put"``.
        path: what it was done to.
        size_bytes: how much was to be moved, where that is known.
    """
    size = "" if size_bytes is None else f" of {size_bytes} bytes"
    told = (
        f"{doing}{size} at {path}: {errno.errorcode.get(error.errno or 0, '?')} ({error.strerror or error})"
    )
    if error.errno in _FULL:
        return NoSpaceError(f"{told}; the file system is full below the budget: lower the disk budget")
    return StoreUnavailableError(f"{told}; check the device and the rights on the folder")
