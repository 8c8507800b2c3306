"""Carries out work orders on one rank: all I/O, all threads, and the deadline of every load.

::

    saver    gather blocks -> arena slot, seal           then hand the slot to the writer
             (a snapshot is gathered on the engine's thread, and only sealed here)
    loader   arena slot -> verify -> scatter to blocks
    readers  disk -> slot or staging frame -> verify -> scatter to blocks
    writer   removes, and arena slot -> disk, in the order they came

`Worker.submit`, `Worker.copy_snapshots` and `Worker.poll` are called on the engine's thread,
never block on I/O and never raise for what a store does.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from kvstow.clock import Clock
from kvstow.codec.base import Codec
from kvstow.errors import CorruptFrameError, StoreError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import Layout
from kvstow.lifecycle.delivery import Outbox
from kvstow.lifecycle.ledger import LoadLedger
from kvstow.lifecycle.messages import (
    NO_SLOT,
    Fault,
    Hold,
    JobId,
    LoadItem,
    LoadJob,
    LoadReport,
    PlaceInArena,
    Report,
    RequestId,
    Tier,
    WorkOrder,
)
from kvstow.lifecycle.names import FrameNames, shown
from kvstow.lifecycle.parts import Executors, Parts, WorkerLimits
from kvstow.lifecycle.saver import Saver, drain
from kvstow.lifecycle.transfers import LoadTransfer
from kvstow.metrics import Metric, OnceLogger, Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.base import Store
from kvstow.stores.framing import open_frame

__all__ = ["Executors", "Worker", "WorkerLimits"]

logger = logging.getLogger(__name__)


class Worker:
    """One rank's hands.

    Args:
        rank: this rank.
        namespace: digest of this rank's namespace.
        layout: what the blocks look like.
        codecs: one for each group, by group.
        arena: this rank's DRAM.
        disk: this rank's disk, or None.
        limits: bounds.
        executors: where the work runs.
        clock: monotonic time.
        recorder: counts what happens.
        first_namespace: digest of the first rank's namespace; needed where a group is replicated.
    """

    def __init__(
        self,
        rank: Rank,
        namespace: NamespaceDigest,
        layout: Layout,
        codecs: Sequence[Codec],
        arena: Arena,
        disk: Store | None,
        limits: WorkerLimits,
        executors: Executors,
        clock: Clock,
        recorder: Recorder,
        first_namespace: NamespaceDigest | None = None,
    ) -> None:
        self._parts = Parts(
            names=FrameNames(rank, namespace, layout, first_namespace),
            codecs=codecs,
            arena=arena,
            disk=disk,
            limits=limits,
            executors=executors,
            clock=clock,
            recorder=recorder,
            failures=OnceLogger(logger, clock),
            news=threading.Event(),
        )
        self._saver = Saver(self._parts)
        self._ledger = LoadLedger(clock, limits.load_timeout_s)
        self._loads: dict[JobId, LoadTransfer] = {}
        self._holds: list[Hold] = []
        self._outbox = Outbox(rank)
        # Filled by the threads, drained by `poll`: deque's append and popleft are atomic.
        self._load_reports: deque[LoadReport] = deque()
        self._freed: deque[PlaceInArena] = deque()
        self._finished_loads: list[tuple[RequestId, bool]] = []

    # ---- the engine's thread -----------------------------------------------------------

    def fence(self, jobs: Iterable[JobId]) -> None:
        """Return once no copy out of the blocks of these saves runs or will run.

        Waits for at most one chunk's copy for each job.
        """
        self._saver.fence(jobs)

    def copy_snapshots(self, order: WorkOrder) -> None:
        """Copy the snapshots of ``order`` out of their blocks; after the step's forward.

        It waits for these copies, and for nothing else. What else the order asks for may have begun:
        no load of it writes a block that these read, for both are their requests' own.
        """
        for snapshot in order.snapshots:
            self._saver.snapshot(snapshot)

    def submit(self, order: WorkOrder) -> None:
        """Begin what else ``order`` asks for. Its fences are the caller's, before the forward."""
        if order.removes:
            self._saver.remove(order.removes)
        for save in order.saves:
            self._saver.save(save)
        for write in order.writes:
            self._saver.write(write)
        for load in order.loads:
            self._submit_load(load)
        self._holds.extend(order.holds)
        self._outbox.ordered(order.acknowledged)

    def wait_for_news(self, wait_s: float) -> None:
        """Wait until something ended, at most ``wait_s``, if anything is in flight.

        For a step that has nothing to compute: it saves the threads an engine that spins.
        """
        if self._loads or self._saver.is_busy:
            self._parts.news.wait(wait_s)

    def poll(self) -> tuple[tuple[Report, ...], list[tuple[RequestId, bool]], list[RequestId]]:
        """What ended since the last call, with loads and saves past their bound ended here.

        Returns:
            Reports for the planner, in order; requests whose load ended and whether it
            succeeded; and held requests whose saves have ended.
        """
        self._parts.news.clear()
        loads = self._take_load_reports()
        # Only now: one that ended gives those behind it their time anew.
        self._expire()
        loads += self._take_load_reports()
        saves, writes = self._saver.take_reports()
        freed = drain(self._freed)
        finished, self._finished_loads = self._finished_loads, []
        sent = self._release_holds()
        return self._outbox.post(loads, saves, writes, freed), finished, sent

    def shutdown(self) -> None:
        """Give up loads and saves, let queued writes finish for a bounded time, close the stores."""
        for transfer in self._loads.values():
            transfer.give_up(Fault.CANCELLED)
        executors = self._parts.executors
        give_up_s = self._parts.clock.monotonic_s() + self._parts.limits.shutdown_s_max
        # Saves first: what they copy is still to be written, in all the time they leave.
        left = executors.saver.close(self._parts.limits.shutdown_s_max)
        left += executors.writer.close(max(0.0, give_up_s - self._parts.clock.monotonic_s()))
        executors.loader.close(0.1)
        executors.readers.close(0.1)
        if left:
            logger.warning(
                "kvstow: %d saves or writes were still queued after %.0f s; they are lost, "
                "raise shutdown_s_max to keep more",
                left,
                self._parts.limits.shutdown_s_max,
            )
        self._parts.failures.flush()
        if self._parts.disk is not None:
            self._parts.disk.close()

    def _release_holds(self) -> list[RequestId]:
        ended = [hold for hold in self._holds if not any(map(self._saver.is_saving, hold.jobs))]
        self._holds = [hold for hold in self._holds if hold not in ended]
        return [hold.request for hold in ended]

    # ---- loads -------------------------------------------------------------------------

    def _submit_load(self, job: LoadJob) -> None:
        transfer = LoadTransfer(job)
        self._loads[job.job] = transfer
        self._ledger.dispatch(job.job)
        if not job.items:
            self._load_reports.append(LoadReport(job.job, refused=True))
            return
        arena_items = [index for index, item in enumerate(job.items) if item.source is Tier.ARENA]
        queued = True
        for start in range(min(self._parts.limits.load_parts, len(arena_items))):
            part = arena_items[start :: self._parts.limits.load_parts]
            queued = queued and self._parts.executors.loader.submit(
                partial(self._run_arena_items, transfer, part)
            )
        for index, item in enumerate(job.items):
            if queued and item.source is Tier.DISK:
                queued = self._parts.executors.readers.submit(partial(self._run_disk_item, transfer, index))
        if not queued:
            self._parts.failures.warn(
                "load queue full", f"load of {len(job.items)} frames refused; the request recomputes"
            )
            # No fault of the disk, which goes on being used.
            self._give_up(transfer, Fault.CANCELLED)

    def _run_arena_items(self, transfer: LoadTransfer, indexes: Sequence[int]) -> None:
        for index in indexes:
            item = transfer.job.items[index]
            fault: Fault | None = Fault.CANCELLED
            try:
                if transfer.begin(index):
                    fault = Fault.UNAVAILABLE
                    fault = self._deliver(transfer, item, self._parts.arena.frame(item.ref.group, item.slot))
            finally:
                self._end_item(transfer, index, fault)

    def _run_disk_item(self, transfer: LoadTransfer, index: int) -> None:
        item = transfer.job.items[index]
        fault: Fault | None = Fault.CANCELLED
        try:
            if transfer.begin(index):
                fault = Fault.UNAVAILABLE
                fault = self._read_item(transfer, item)
        finally:
            self._end_item(transfer, index, fault)

    def _read_item(self, transfer: LoadTransfer, item: LoadItem) -> Fault | None:
        """Bring one frame from disk, through its slot or a staging frame, into its blocks."""
        if item.slot != NO_SLOT and self._parts.arena.fills(item.ref.group):
            return self._read(transfer, item, self._parts.arena.frame(item.ref.group, item.slot))
        # There is one for each reader: none is free only if readers were lost.
        staging = self._parts.arena.acquire_staging(item.ref.group, wait_s_max=0.0)
        if staging is None:
            return Fault.UNAVAILABLE
        with staging as frame:
            return self._read(transfer, item, frame)

    def _read(self, transfer: LoadTransfer, item: LoadItem, frame: memoryview) -> Fault | None:
        assert self._parts.disk is not None
        try:
            found = self._parts.disk.get_into(self._parts.names.name(item.ref), frame)
        except CorruptFrameError as error:
            return self._corrupt(transfer, item, error)
        except StoreError as error:
            self._parts.failures.error("disk read", f"{shown(item.ref)}: {error}; the request recomputes")
            return Fault.UNAVAILABLE
        self._parts.recorder.count(Metric.DISK_READS)
        return self._deliver(transfer, item, frame) if found else Fault.ABSENT

    def _deliver(self, transfer: LoadTransfer, item: LoadItem, frame: memoryview) -> Fault | None:
        """Verify ``frame`` and copy it into the item's blocks."""
        try:
            # From the arena too: memory can go bad as well, and it costs a thirtieth of a
            # millisecond for a MiB.
            payload = open_frame(frame, self._parts.names.identity(item.ref))
            codec = self._parts.codecs[item.ref.group]
            transfer.write_blocks(lambda: codec.scatter(item.blocks, payload, item.skip_blocks))
        except CorruptFrameError as error:
            return self._corrupt(transfer, item, error)
        except ValueError as error:
            self._parts.failures.error("load", f"{shown(item.ref)} not loaded: {error}; please report this")
            return Fault.UNAVAILABLE
        return None

    def _corrupt(self, transfer: LoadTransfer, item: LoadItem, error: CorruptFrameError) -> Fault:
        if transfer.is_over:
            return Fault.CORRUPT  # its slot may have become another frame's: that says nothing of either
        self._parts.recorder.count(Metric.CORRUPT_FRAMES)
        self._parts.failures.error("corrupt frame", f"{shown(item.ref)} in the {item.source}: {error}")
        return Fault.CORRUPT

    def _end_item(self, transfer: LoadTransfer, index: int, fault: Fault | None) -> None:
        report, was_over = transfer.end(index, fault)
        if report is not None:
            self._load_reports.append(report)
            self._parts.news.set()
        item = transfer.job.items[index]
        if was_over and fault is not Fault.CANCELLED and item.source is Tier.DISK and item.slot != NO_SLOT:
            self._freed.append((item.ref.group, item.slot))

    def _expire(self) -> None:
        for job, transfer in self._loads.items():
            if transfer.has_started:
                self._ledger.started(job)
        for job in self._ledger.expired():
            self._give_up(self._loads[job], Fault.TIMEOUT)

    def _give_up(self, transfer: LoadTransfer, fault: Fault) -> None:
        report = transfer.give_up(fault)
        if report is not None:
            self._load_reports.append(report)

    def _take_load_reports(self) -> list[LoadReport]:
        reports = drain(self._load_reports)
        for report in reports:
            self._ledger.ended(report.job)
            request = self._loads.pop(report.job).job.request
            self._finished_loads.append((request, not report.failed and not report.refused))
        return reports
