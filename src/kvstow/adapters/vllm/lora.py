"""What a LoRA adapter contains, for keys: two adapters under one name must never share bytes.

Reading an adapter is I/O, so it runs on a thread; until it is done the request's lookup is
pending. The digest is of what was on disk when the adapter was first seen. If the files change
later without a reload being asked for, nobody can tell which version the engine computes with,
so that adapter's requests neither load nor save any more.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum
from pathlib import Path

import msgspec

from kvstow.errors import KvstowError
from kvstow.keys.weights import adapter_digest

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 4096


class AdapterState(Enum):
    """What is known of an adapter."""

    READING = "reading"
    KNOWN = "known"
    UNUSABLE = "unusable"


class Adapter(msgspec.Struct):
    """One adapter, as first seen.

    Attributes:
        state: whether ``digest`` may be used.
        signature: names, sizes and modification times of its files when it was read.
        digest: 32 bytes over its content.
    """

    state: AdapterState
    signature: tuple[tuple[str, int, int], ...]
    digest: bytes = b""


class AdapterDigests:
    """Digests of the adapters that requests name. `lookup` is for the scheduler's thread."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[int, str], Adapter] = {}

    def lookup(self, adapter_id: int, path: str, reload: bool) -> Adapter:
        """What is known of an adapter now; starts reading it when it is new. Does not block.

        Args:
            adapter_id: the engine's number for it.
            path: its folder.
            reload: the request asks the engine to read it again.
        """
        key = (adapter_id, path)
        known = self._adapters.get(key)
        signature = _signature(Path(path))
        if known is not None and not reload:
            if known.state is AdapterState.KNOWN and signature != known.signature:
                logger.error(
                    "kvstow: LoRA adapter %s changed on disk while in use; its requests are not cached "
                    "until the engine restarts or reloads it",
                    path,
                )
                known.state = AdapterState.UNUSABLE
            return known
        if known is not None and signature == known.signature:
            return known
        if not signature or len(self._adapters) >= ADAPTERS_MAX:
            return Adapter(AdapterState.UNUSABLE, signature)
        adapter = Adapter(AdapterState.READING, signature)
        self._adapters[key] = adapter
        threading.Thread(
            target=_read, args=(adapter, Path(path)), name="kvstow-adapter-digest", daemon=True
        ).start()
        return adapter


def _read(adapter: Adapter, path: Path) -> None:
    try:
        adapter.digest = adapter_digest(path)
    except (KvstowError, OSError) as error:
        logger.error("kvstow: LoRA adapter %s cannot be read (%s); its requests are not cached", path, error)
        adapter.state = AdapterState.UNUSABLE
        return
    if _signature(path) != adapter.signature:
        logger.error("kvstow: LoRA adapter %s changed while it was read; its requests are not cached", path)
        adapter.state = AdapterState.UNUSABLE
        return
    adapter.state = AdapterState.KNOWN


def _signature(path: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        entries = [(entry.name, entry.stat()) for entry in path.iterdir() if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in entries))
