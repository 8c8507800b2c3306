"""A folder for frames, private to one engine: who may use it, and how its file system is used.

Locks, all `flock`, so that the kernel drops them however a process ends::

    <root>/lock      held exclusively for the moment of a claim: one claimant looks at a time
    <root>/lock.r0   held exclusively by rank 0 as long as it lives; says who that is
    <root>/lock.r1   ...

To claim rank r, an engine takes `lock`, then tries every `lock.r*`: one that it can take belongs
to nobody; one that it cannot has a living holder, which must be of the same instance and of
another rank. Nothing needs cleaning up, and no pid is trusted. A record is written and read under
`lock` only, so that of a living holder is whole.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvstow.clock import Clock
from kvstow.errors import InvariantError, StoreUnavailableError
from kvstow.keys.ids import Rank
from kvstow.stores.disk.faults import store_error
from kvstow.stores.disk.files import Files

_RANK_LOCK = re.compile(r"lock\.r([0-9]+)")
_CLAIM_TRIES_MAX = 200
_CLAIM_PAUSE_S = 0.01
_RECORD_BYTES_MAX = 4096


class Holder(msgspec.Struct, frozen=True):
    """Who holds a rank's share of a root."""

    instance: str
    rank: int
    host: str
    pid: int


class DiskRoot:
    """One rank's share of a locked folder. Made by `open`; any thread may use it.

    Attributes:
        path: the folder.
        rank: whose share it is.
        world_size: ranks of the engine; shares of ranks beyond it were left by a larger one.
        budget_bytes: what this share may occupy, over all namespaces.
        clock: says when a frame is touched.
        files: how files are read and written here.
    """

    def __init__(
        self, path: str, rank: Rank, world_size: int, budget_bytes: int, clock: Clock, lock: int
    ) -> None:
        """Take over ``lock``, the descriptor that holds this rank's lock."""
        self.path = path
        self.rank = rank
        self.world_size = world_size
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.files = Files(path)
        self._lock: int | None = lock

    @classmethod
    def open(
        cls, path: Path, *, instance: str, rank: Rank, world_size: int, budget_bytes: int, clock: Clock
    ) -> DiskRoot:
        """Claim one rank's share of ``path``, making the folder if need be.

        Blocks for about two seconds at most, while other claimants look at the same root.

        Args:
            path: the root; its parent may be missing too.
            instance: the engine's id; ranks that give the same one share the root.
            rank: whose share to claim.
            world_size: how many ranks the engine has.
            budget_bytes: what this rank may occupy here.
            clock: says when a frame is touched.

        Raises:
            StoreUnavailableError: another living engine, or another process of the same rank,
                holds it, or the folder cannot be used. The engine goes on without a disk.
            NoSpaceError: the file system has no room for a lock file.
            InvariantError: ``rank`` is not one of ``world_size``.
        """
        if not 0 <= rank < world_size:
            raise InvariantError(f"rank={rank} is not one of world_size={world_size}")
        folder = str(path.absolute())
        me = Holder(instance=instance, rank=rank, host=socket.gethostname(), pid=os.getpid())
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with _claiming(folder):
                _refuse_others(folder, me)
                lock = _hold(folder, me)
                try:
                    return cls(folder, rank, world_size, budget_bytes, clock, lock)
                except BaseException:
                    _unlock(lock)
                    raise
        except OSError as error:
            raise store_error(error, "open disk root", folder) from error

    def check_open(self) -> None:
        """Raise StoreUnavailableError if it was closed."""
        if self._lock is None:
            raise StoreUnavailableError(f"disk root {self.path} rank {self.rank} is closed; open it again")

    def close(self) -> None:
        """Let others claim it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(lock)


@contextmanager
def _claiming(folder: str) -> Iterator[None]:
    """Hold ``folder``'s claim lock; wait for it up to a bound."""
    claim = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        pause = threading.Event()
        tries = 0
        while not _try_lock(claim):
            tries += 1
            if tries == _CLAIM_TRIES_MAX:
                raise StoreUnavailableError(
                    f"disk root {folder}: another claim has lasted over "
                    f"{_CLAIM_TRIES_MAX * _CLAIM_PAUSE_S:.0f} s; look for a stopped process that has "
                    f"{folder}/lock open"
                )
            pause.wait(_CLAIM_PAUSE_S)
        yield
    finally:
        _unlock(claim)


def _hold(folder: str, me: Holder) -> int:
    """The descriptor of ``me``'s lock, held until it is closed."""
    lock = os.open(f"{folder}/lock.r{me.rank}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _try_lock(lock):
            raise InvariantError(f"{folder}/lock.r{me.rank} was taken without {folder}/lock")
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(me), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _refuse_others(folder: str, me: Holder) -> None:
    """Raise if a living process holds any rank for another engine, or ``me``'s rank for whomever."""
    for name in sorted(os.listdir(folder)):
        match = _RANK_LOCK.fullmatch(name)
        if match is None:
            continue
        lock = os.open(f"{folder}/{name}", os.O_RDWR)
        if _try_lock(lock):
            _unlock(lock)
            continue
        try:
            record = os.pread(lock, _RECORD_BYTES_MAX, 0)
        finally:
            os.close(lock)
        holder = _holder(record, int(match[1]))
        if holder.instance != me.instance or holder.rank == me.rank:
            raise StoreUnavailableError(
                f"disk root {folder} is held by engine instance {holder.instance!r}, rank {holder.rank}, "
                f"pid {holder.pid} on host {holder.host!r}; we are instance {me.instance!r}, rank {me.rank}, "
                f"pid {me.pid}: stop that process, or give this engine a root of its own"
            )


def _holder(record: bytes, rank: int) -> Holder:
    try:
        return msgspec.json.decode(record, type=Holder)
    except msgspec.DecodeError:
        # Somebody edited the file; the lock counts, not the record.
        return Holder(instance="unknown", rank=rank, host="unknown", pid=-1)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    # Not only closed: a child forked meanwhile has the same open file, and would keep the lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
