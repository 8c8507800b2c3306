"""What a rank's worker is made of, shared by its save side and its load side."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from kvstow.clock import Clock
from kvstow.codec.base import Codec
from kvstow.lifecycle.executors import Executor
from kvstow.lifecycle.names import FrameNames
from kvstow.metrics import OnceLogger, Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.base import Store


class WorkerLimits(msgspec.Struct, frozen=True):
    """Bounds on one rank's work.

    Attributes:
        load_timeout_s: how long a load may take from when its copy begins, see `LoadLedger`.
        save_timeout_s: how long a save may wait in the queue.
        shutdown_s_max: how long the queued writes may take at the end.
        load_parts: how many tasks a load's arena frames are split into, to run on as many threads.
    """

    load_timeout_s: float
    save_timeout_s: float
    shutdown_s_max: float
    load_parts: int


class Executors(msgspec.Struct, frozen=True):
    """Where each kind of work runs."""

    saver: Executor
    loader: Executor
    readers: Executor
    writer: Executor


class Parts(msgspec.Struct, frozen=True):
    """One rank's parts.

    Attributes:
        names: what it calls its frames.
        codecs: one for each group, by group.
        arena: its DRAM.
        disk: its disk, or None.
        limits: bounds.
        executors: where the work runs.
        clock: monotonic time.
        recorder: counts what happens.
        failures: says what went wrong.
        news: set whenever something ended.
    """

    names: FrameNames
    codecs: Sequence[Codec]
    arena: Arena
    disk: Store | None
    limits: WorkerLimits
    executors: Executors
    clock: Clock
    recorder: Recorder
    failures: OnceLogger
    news: threading.Event
