"""The save side of a rank: blocks to arena slots, and arena slots to disk.

Saves are copied on the saver's thread, snapshots on the caller's; from there on they go the
same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from kvstow.errors import InvariantError, StoreError
from kvstow.keys.ids import ChunkRef
from kvstow.lifecycle.messages import (
    NO_JOB,
    Fault,
    JobId,
    SaveItem,
    SaveJob,
    SaveReport,
    WriteItem,
    WriteReport,
)
from kvstow.lifecycle.names import shown
from kvstow.lifecycle.parts import Parts
from kvstow.lifecycle.transfers import SaveTransfer
from kvstow.metrics import Metric
from kvstow.stores.framing import payload_of, seal

_T = TypeVar("_T")


class Saver:
    """Carries out saves, snapshots, writes and removals. Its methods are for the engine's thread.

    Args:
        parts: the rank's.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._saves: dict[JobId, SaveTransfer] = {}
        # Filled by the threads, drained by `take_reports`: deque's append and popleft are atomic.
        self._save_reports: deque[SaveReport] = deque()
        self._write_reports: deque[WriteReport] = deque()
        self._writing: set[JobId] = set()  # adding and discarding are atomic too

    @property
    def is_busy(self) -> bool:
        """Whether a save or a write is in flight."""
        return bool(self._saves or self._writing)

    def is_saving(self, job: JobId) -> bool:
        """Whether a save has not ended yet, as far as `take_reports` has told."""
        return job in self._saves

    def fence(self, jobs: Iterable[JobId]) -> None:
        """Return once no copy out of the blocks of these saves runs or will run.

        Waits for at most one chunk's copy for each job.
        """
        for job in jobs:
            transfer = self._saves.get(job)
            if transfer is not None:
                transfer.cancel()

    def take_reports(self) -> tuple[list[SaveReport], list[WriteReport]]:
        """What ended since the last call, with saves that waited too long ended here."""
        self._expire()
        saves = drain(self._save_reports)
        for save in saves:
            self._saves.pop(save.job, None)
        return saves, drain(self._write_reports)

    # ---- saves -------------------------------------------------------------------------

    def save(self, job: SaveJob) -> None:
        """Queue copies out of blocks that stay as they are until the save is reported."""
        transfer = self._enter(job)
        self._queue(transfer, partial(self._run_save, transfer))

    def snapshot(self, job: SaveJob) -> None:
        """Copy out of blocks now, and queue the rest: when this returns they may change."""
        transfer = self._enter(job)
        transfer.begin()  # it holds no blocks: nobody is in a hurry
        copied = [index for index, item in enumerate(job.items) if self._copy(transfer, index, item)]
        self._queue(transfer, partial(self._run_snapshot, transfer, copied))

    def _enter(self, job: SaveJob) -> SaveTransfer:
        transfer = SaveTransfer(job, self._parts.clock.monotonic_s())
        self._saves[job.job] = transfer
        return transfer

    def _queue(self, transfer: SaveTransfer, task: partial[None]) -> None:
        if self._parts.executors.saver.submit(task):
            return
        items = transfer.job.items
        self._parts.failures.warn(
            "save queue full", f"save of {len(items)} frames dropped; raise pending_saves_max"
        )
        for item in range(len(items)):
            transfer.fail(item, Fault.CANCELLED)
        self._end(transfer)

    def _run_save(self, transfer: SaveTransfer) -> None:
        if not transfer.begin():
            return
        try:
            for index, item in enumerate(transfer.job.items):
                if self._copy(transfer, index, item):
                    self._finish(transfer, index, item)
        finally:
            # Blocks and pins are held until these reports: they must come, also after a bug.
            self._end(transfer)
            self._parts.news.set()

    def _run_snapshot(self, transfer: SaveTransfer, copied: list[int]) -> None:
        # However long it waited: it holds no blocks, and what is copied is as good as ever.
        try:
            for index in copied:
                self._finish(transfer, index, transfer.job.items[index])
        finally:
            self._end(transfer)
            self._parts.news.set()

    def _expire(self) -> None:
        """Give up saves that wait for too long: blocks are held for them."""
        parts = self._parts
        for transfer in self._saves.values():
            waited_s = parts.clock.monotonic_s() - transfer.submitted_s
            if waited_s > parts.limits.save_timeout_s and transfer.give_up_waiting():
                parts.failures.warn("late save", f"a save waited {waited_s:.1f} s in the queue; dropped")
                self._end(transfer)

    def _copy(self, transfer: SaveTransfer, index: int, item: SaveItem) -> bool:
        """Gather an item into its slot; False if it was cancelled or cannot be."""
        parts = self._parts
        if not parts.arena.fills(item.ref.group):
            return True  # another rank has the same bytes, and its frame is READY when all have reported

        def copy() -> None:
            frame = parts.arena.frame(item.ref.group, item.slot)
            payload = payload_of(frame, parts.names.payload_bytes(item.ref))
            parts.codecs[item.ref.group].gather(item.blocks, payload)

        try:
            return transfer.read_blocks(index, copy)
        except (ValueError, RuntimeError, MemoryError, InvariantError) as error:
            # RuntimeError: torch's, of a device. A snapshot is copied on the engine's step.
            parts.failures.error("save", f"{shown(item.ref)} not saved: {error}; please report this")
            parts.recorder.count(Metric.SAVE_FAILED)
            return False

    def _finish(self, transfer: SaveTransfer, index: int, item: SaveItem) -> None:
        """Seal what was copied, and hand it on to the writer."""
        parts = self._parts
        if parts.arena.fills(item.ref.group):
            seal(parts.arena.frame(item.ref.group, item.slot), parts.names.identity(item.ref))
            parts.recorder.count(Metric.SAVED_BYTES, parts.names.payload_bytes(item.ref))
        transfer.finish(index)
        if item.write != NO_JOB:
            self.write(WriteItem(item.write, item.ref, item.slot))

    def _end(self, transfer: SaveTransfer) -> None:
        """Report the save, and the writes that its items will never ask for."""
        report = transfer.report()
        for failed in report.failed:
            write = transfer.job.items[failed.item].write
            if write != NO_JOB:
                self._write_reports.append(WriteReport(write, stored=False))
        self._save_reports.append(report)

    # ---- writes ------------------------------------------------------------------------

    def write(self, write: WriteItem) -> None:
        """Queue a copy to disk. Any thread."""
        parts = self._parts
        self._writing.add(write.job)
        if parts.disk is None or not parts.executors.writer.submit(partial(self._run_write, write)):
            self._writing.discard(write.job)
            parts.recorder.count(Metric.DISK_WRITE_SKIPPED)
            self._write_reports.append(WriteReport(write.job, stored=False))

    def remove(self, refs: tuple[ChunkRef, ...]) -> None:
        """Queue a removal from disk, if there is one."""
        parts = self._parts
        if parts.disk is not None and not parts.executors.writer.submit(partial(self._run_remove, refs)):
            # The names stay on disk until a scan; the store's own budget still holds.
            parts.failures.warn("disk remove", f"{len(refs)} frames could not be queued for removal")

    def _run_write(self, write: WriteItem) -> None:
        parts = self._parts
        assert parts.disk is not None
        stored = False
        try:
            parts.disk.put(parts.names.name(write.ref), parts.arena.frame(write.ref.group, write.slot))
            stored = True
        except StoreError as error:
            parts.failures.warn("disk write", f"{shown(write.ref)} is kept in the arena only: {error}")
        finally:
            self._write_reports.append(WriteReport(write.job, stored))
            self._writing.discard(write.job)
            parts.news.set()

    def _run_remove(self, refs: tuple[ChunkRef, ...]) -> None:
        parts = self._parts
        assert parts.disk is not None
        try:
            parts.disk.remove([parts.names.name(ref) for ref in refs])
        except StoreError as error:
            parts.failures.warn("disk remove", f"{len(refs)} frames: {error}")


def drain(reports: deque[_T]) -> list[_T]:
    """Everything in ``reports`` now; the threads may append meanwhile."""
    return [reports.popleft() for _ in range(len(reports))]
