"""What a LoRA adapter contains, for keys: two adapters under one name must never share bytes.

Looking at an adapter's files is I/O, so it is done on a thread, for every request that names it;
until it is done the request's lookup is pending, for a bounded time. The digest is of what was on
disk when the adapter was first seen. If the files change later without a reload being asked for,
nobody can tell which version the engine computes with, so that adapter's requests neither load
nor save any more.
"""

from __future__ import annotations

import logging
from enum import Enum
from functools import partial
from pathlib import Path

import msgspec

from kvstow.clock import Clock
from kvstow.errors import KvstowError
from kvstow.keys.weights import adapter_digest
from kvstow.lifecycle.executors import ThreadExecutor

logger = logging.getLogger(__name__)

CHECKS_MAX = 1024
ADAPTERS_MAX = 4096
CLOSE_S_MAX = 1.0

_Signature = tuple[tuple[str, int, int], ...]


class AdapterState(Enum):
    """What is known of an adapter."""

    READING = "reading"
    KNOWN = "known"
    UNUSABLE = "unusable"


class AdapterCheck:
    """One request's question about its adapter, answered by a thread.

    Args:
        clock: monotonic time.
        bound_s: how long the answer may take; without one the request is not cached.
    """

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._late_s = clock.monotonic_s() + bound_s
        self._state = AdapterState.READING
        self.digest = b""

    @property
    def state(self) -> AdapterState:
        """What is known now. Once it is not READING it does not change."""
        if self._state is AdapterState.READING and self._clock.monotonic_s() > self._late_s:
            self.refuse()
        return self._state

    def refuse(self) -> None:
        """The adapter's content cannot be told."""
        if self._state is AdapterState.READING:
            self._state = AdapterState.UNUSABLE

    def accept(self, digest: bytes) -> None:
        """The adapter's content is known; too late an answer changes nothing."""
        self.digest = digest
        if self._state is AdapterState.READING:
            self._state = AdapterState.KNOWN


class _Adapter(msgspec.Struct):
    """An adapter as first seen; ``digest`` is None once its files changed under it."""

    signature: _Signature
    digest: bytes | None


class AdapterDigests:
    """Digests of the adapters that requests name.

    Args:
        clock: monotonic time.
        bound_s: how long a request waits for its adapter to be looked at.
    """

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._bound_s = bound_s
        self._adapters: dict[tuple[int, str], _Adapter] = {}  # the thread's alone
        self._executor: ThreadExecutor | None = None  # most engines have no adapters

    def check(self, adapter_id: int, path: str, reload: bool) -> AdapterCheck:
        """Ask about an adapter. Called on the scheduler's thread; does not block.

        Args:
            adapter_id: the engine's number for it.
            path: its folder.
            reload: the request asks the engine to read it again.
        """
        check = AdapterCheck(self._clock, self._bound_s)
        if self._executor is None:
            self._executor = ThreadExecutor("kvstow-adapters", 1, CHECKS_MAX)
        if not self._executor.submit(partial(self._answer, check, adapter_id, path, reload)):
            logger.error(
                "kvstow: %d requests wait for LoRA adapters to be read; this one (adapter %s) is not cached",
                CHECKS_MAX,
                path,
            )
            check.refuse()
        return check

    def close(self) -> None:
        """End the thread; waits a moment for an adapter that is being read."""
        if self._executor is not None:
            self._executor.close(CLOSE_S_MAX)

    def _answer(self, check: AdapterCheck, adapter_id: int, path: str, reload: bool) -> None:
        digest = self._look(adapter_id, path, reload)
        if digest is None:
            check.refuse()
        else:
            check.accept(digest)

    def _look(self, adapter_id: int, path: str, reload: bool) -> bytes | None:
        """The digest of an adapter, or None where it cannot be told."""
        key = (adapter_id, path)
        known = self._adapters.get(key)
        signature = _signature(Path(path))
        if known is not None and signature == known.signature:
            return known.digest
        if known is not None and not reload:
            if known.digest is not None:
                logger.error(
                    "kvstow: LoRA adapter %s changed on disk while in use; its requests are not cached "
                    "until the engine restarts or reloads it",
                    path,
                )
            known.digest = None
            return None
        if len(self._adapters) >= ADAPTERS_MAX:
            logger.error("kvstow: more than %d LoRA adapters; %s is not cached", ADAPTERS_MAX, path)
            return None
        digest = _read(Path(path), signature)
        self._adapters[key] = _Adapter(signature, digest)
        return digest


def _read(path: Path, signature: _Signature) -> bytes | None:
    try:
        digest = adapter_digest(path)
    except (KvstowError, OSError) as error:
        logger.error("kvstow: LoRA adapter %s cannot be read (%s); its requests are not cached", path, error)
        return None
    if _signature(path) != signature:
        logger.error("kvstow: LoRA adapter %s changed while it was read; its requests are not cached", path)
        return None
    return digest


def _signature(path: Path) -> _Signature:
    """Names, sizes and modification times of an adapter's files; () if they cannot be listed."""
    try:
        entries = [(entry.name, entry.stat()) for entry in path.iterdir() if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in entries))
