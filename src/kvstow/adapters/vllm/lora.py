"""What a LoRA adapter contains, for keys: two adapters under one name must never share bytes.

Looking at an adapter's files is I/O, so it is done on a thread, for every request that names it;
until it is done the request's lookup is pending, for a bounded time. The digest is of what was on
disk when the adapter was first seen. If other files stand later for what the engine's own caches take
for the same adapter, nobody can tell with which of them a block was computed that the engine has
cached, even where a reload was asked for: that adapter's requests neither load nor save any more.
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
        self._adapter: Adapter | None = None
        self.digest = b""

    @property
    def is_replaced(self) -> bool:
        """Whether another adapter took this one's place since: what is computed now may be the other's."""
        return self._adapter is not None and self._adapter.is_replaced

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

    def accept(self, adapter: Adapter) -> None:
        """The adapter's content is known; too late an answer changes nothing."""
        self._adapter = adapter
        self.digest = adapter.digest
        if self._state is AdapterState.READING:
            self._state = AdapterState.KNOWN


class Adapter(msgspec.Struct):
    """An adapter as first seen; ``digest`` is b"" if it could not be read."""

    path: str
    signature: _Signature
    digest: bytes
    is_replaced: bool = False


class AdapterDigests:
    """Digests of the adapters that requests name.

    Args:
        clock: monotonic time.
        bound_s: how long a request waits for its adapter to be looked at.
    """

    def __init__(self, clock: Clock, bound_s: float) -> None:
        self._clock = clock
        self._bound_s = bound_s
        self._adapters: dict[tuple[str, ...], Adapter] = {}  # the thread's alone
        self._executor: ThreadExecutor | None = None  # most engines have no adapters

    def check(self, identity: tuple[str, ...], path: str) -> AdapterCheck:
        """Ask about an adapter. Called on the scheduler's thread; does not block.

        Args:
            identity: by what the engine's own caches tell it from others.
            path: its folder.
        """
        check = AdapterCheck(self._clock, self._bound_s)
        if self._executor is None:
            self._executor = ThreadExecutor("kvstow-adapters", 1, CHECKS_MAX)
        if not self._executor.submit(partial(self._answer, check, identity, path)):
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

    def _answer(self, check: AdapterCheck, identity: tuple[str, ...], path: str) -> None:
        adapter = self._look(identity, path)
        if adapter is None or not adapter.digest or adapter.is_replaced:
            check.refuse()
        else:
            check.accept(adapter)

    def _look(self, identity: tuple[str, ...], path: str) -> Adapter | None:
        """The adapter that the engine knows by ``identity``; None where there are too many."""
        known = self._adapters.get(identity)
        signature = _signature(Path(path))
        if known is not None:
            if (path, signature) != (known.path, known.signature) and not known.is_replaced:
                known.is_replaced = True
                logger.error(
                    "kvstow: LoRA adapter %s was replaced while in use (by %s), and vLLM's caches take one "
                    "for the other; requests of that name are not cached until the engine restarts. Give "
                    "an adapter that replaces another a new name",
                    known.path,
                    path,
                )
            return known
        if len(self._adapters) >= ADAPTERS_MAX:
            logger.error("kvstow: more than %d LoRA adapters; %s is not cached", ADAPTERS_MAX, path)
            return None
        adapter = Adapter(path, signature, _read(Path(path), signature))
        self._adapters[identity] = adapter
        return adapter


def _read(path: Path, signature: _Signature) -> bytes:
    """Its digest, or b"" where it cannot be told."""
    try:
        digest = adapter_digest(path)
    except (KvstowError, OSError) as error:
        logger.error("kvstow: LoRA adapter %s cannot be read (%s); its requests are not cached", path, error)
        return b""
    if _signature(path) != signature:
        logger.error("kvstow: LoRA adapter %s changed while it was read; its requests are not cached", path)
        return b""
    return digest


def _signature(path: Path) -> _Signature:
    """Names, sizes and modification times of an adapter's files; () if they cannot be listed."""
    try:
        entries = [(entry.name, entry.stat()) for entry in path.iterdir() if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in entries))
