"""Before the first request: a frame of every group there and back, and every byte compared.

The way is the real one: a worker's orders, its codecs, its arena, its disk. What lies in blocks is
written and read through the engine's own tensors, never through the layout, so a layout that does
not say what the engine does is seen as well as a codec that moves other bytes than it should::

    fill blocks and their neighbours -> save -> the frame holds what the layout says
    overwrite -> load behind a skip  -> the skipped are untouched, the rest is back
    overwrite -> load                -> all is back, and nothing else has changed
    overwrite -> write, load from disk into the blocks in another order -> all is back

Afterwards blocks hold what they held before, and no slot, file or number tells of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvstow.clock import Clock
from kvstow.errors import ConfigError
from kvstow.layout.geometry import BlockId, GroupId, GroupKind, Layout
from kvstow.lifecycle.executors import Executor
from kvstow.lifecycle.messages import (
    NO_SLOT,
    Fault,
    JobId,
    LoadItem,
    LoadJob,
    LoadReport,
    RequestId,
    SaveItem,
    SaveJob,
    SaveReport,
    Slot,
    Tier,
    WorkOrder,
    WriteItem,
    WriteReport,
)
from kvstow.lifecycle.trial import EngineBlocks, Trial
from kvstow.lifecycle.worker import Worker
from kvstow.stores.arena import Arena
from kvstow.stores.framing import HEADER_BYTES, payload_of

logger = logging.getLogger(__name__)

SELF_TEST_S_MAX = 10.0
"""A worker that has not answered after so long does not get a request."""

_POLL_S = 0.05
_REQUEST = RequestId("self-test")
_SLOT = Slot(0)
_Report = TypeVar("_Report")


class Tested(msgspec.Struct, frozen=True):
    """What a self-test did.

    Attributes:
        frames: how many came back as they were, over all groups and tiers.
        payload_bytes: what one frame of every group holds.
        disk: whether every group's frame went through the disk.
        took_s: how long it took.
    """

    frames: int
    payload_bytes: int
    disk: bool
    took_s: float


class SelfTest:
    """One rank's. Made before the first request, run once, on the engine's thread.

    Args:
        worker: made for this only, over the rank's own parts: it reports to nobody else.
        layout: what the blocks look like to the worker.
        blocks: what they look like to the engine.
        arena: the worker's; nobody uses its slots yet.
        writer: the worker's.
        codecs: names, for messages, by group.
        clock: monotonic time.
    """

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        blocks: EngineBlocks,
        arena: Arena,
        writer: Executor,
        codecs: Sequence[str],
        clock: Clock,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._blocks = blocks
        self._arena = arena
        self._writer = writer
        self._codecs = codecs
        self._clock = clock
        self._give_up_s = self._give_up_disk_s = 0.0
        self._jobs = 0
        self._saves: dict[JobId, SaveReport] = {}
        self._loads: dict[JobId, LoadReport] = {}
        self._writes: dict[JobId, WriteReport] = {}

    def run(self, *, with_disk: bool, s_max: float = SELF_TEST_S_MAX) -> Tested:
        """Test every group, and put back what their blocks held.

        Blocks for ``s_max`` at most, and for one frame's copies. A disk that is full, fails or does
        not answer is left out with one line in the log: the engine can run with it as with any
        such disk.

        Args:
            with_disk: whether the worker has a disk and may write to it.
            s_max: how long the worker may take for everything.

        Raises:
            ConfigError: bytes came back that were not saved, something else was changed, or the
                worker did not answer; names group, tensor, block and byte.
        """
        began_s = self._clock.monotonic_s()
        self._give_up_s = began_s + s_max
        # Whatever the disk does, there is time left for the groups behind.
        self._give_up_disk_s = began_s + s_max / 2
        frames = payload_bytes = 0
        uses_disk = with_disk
        for group in self._layout.groups:
            trial = Trial(group, self._layout, self._blocks, self._codecs[group.group])
            if not trial.targets:
                logger.info(
                    "kvstow: self-test: group %d has %d blocks, fewer than one frame; left out",
                    group.group,
                    group.num_blocks,
                )
                continue
            with trial.restored(), self._slot_wiped(group.group):
                frames += self._through_arena(trial)
                if uses_disk:
                    uses_disk = self._through_disk(trial)
                    frames += uses_disk
            payload_bytes += self._layout.payload_bytes(group.group)
        if with_disk:
            self._wait_removed()
        return Tested(frames, payload_bytes, uses_disk, self._clock.monotonic_s() - began_s)

    # ---- one group ---------------------------------------------------------------------

    def _through_arena(self, trial: Trial) -> int:
        trial.fill()
        trial.check("writing a pattern into every block", trial.filled(), Tier.ARENA)
        around = trial.around()
        self._save(trial)
        trial.check_payload(self._payload(trial))
        skip = len(trial.targets) // 2
        if skip:
            trial.overwrite()
            self._load(trial, Tier.ARENA, trial.targets, skip)
            trial.check(f"a load that skips {skip} blocks", trial.loaded(skip=skip), Tier.ARENA)
        trial.overwrite()
        self._load(trial, Tier.ARENA, trial.targets)
        trial.check("save and load", trial.filled(), Tier.ARENA)
        trial.check_around(around)
        return 1

    def _through_disk(self, trial: Trial) -> bool:
        """Whether the frame came back from disk; False if the disk did not take or give it."""
        try:
            write = WriteItem(self._job(), trial.ref, _SLOT)
            self._worker.submit(WorkOrder(writes=(write,)))
            wrote = self._wait(self._writes, write.job, self._give_up_disk_s)
            if wrote is None or not wrote.stored:
                _log_disk(trial, "does not answer" if wrote is None else "took no frame; full, or it fails")
                return False
            trial.overwrite()
            targets = trial.targets[::-1]
            fault = self._try_load(trial, Tier.DISK, targets)
            if fault not in (None, Fault.CORRUPT):
                _log_disk(trial, f"gave no frame back: {fault}")
                return False
            if fault is not None:
                raise trial.failed("the frame that was just written is another one now", Tier.DISK)
            trial.check("write and load", trial.loaded(targets=targets), Tier.DISK)
            return True
        finally:
            self._worker.submit(WorkOrder(removes=(trial.ref,)))

    def _save(self, trial: Trial) -> None:
        job = SaveJob(self._job(), _REQUEST, (SaveItem(trial.ref, _SLOT, trial.targets),))
        if trial.group.kind is GroupKind.PAGED:
            self._worker.submit(WorkOrder(saves=(job,)))
        else:
            self._worker.copy_snapshots(WorkOrder(snapshots=(job,)))
        report = self._wait(self._saves, job.job, self._give_up_s)
        if report is None:
            raise self._silent(trial, "save")
        if report.failed:
            raise trial.failed(f"the save failed ({report.failed[0].fault}); see the line above", Tier.ARENA)

    def _load(self, trial: Trial, source: Tier, targets: tuple[BlockId, ...], skip: int = 0) -> None:
        fault = self._try_load(trial, source, targets, skip)
        if fault is Fault.TIMEOUT:
            raise self._silent(trial, "load")
        if fault is not None:
            raise trial.failed(f"the load failed ({fault}); see the line above", source)

    def _try_load(
        self, trial: Trial, source: Tier, targets: tuple[BlockId, ...], skip: int = 0
    ) -> Fault | None:
        # From disk through a staging frame: a reader that does not come back keeps no slot.
        slot = _SLOT if source is Tier.ARENA else NO_SLOT
        job = LoadJob(self._job(), _REQUEST, (LoadItem(trial.ref, source, slot, targets, skip),))
        self._worker.submit(WorkOrder(loads=(job,)))
        until_s = self._give_up_s if source is Tier.ARENA else self._give_up_disk_s
        report = self._wait(self._loads, job.job, until_s)
        if report is None:
            return Fault.TIMEOUT
        return report.failed[0].fault if report.failed else None

    def _silent(self, trial: Trial, doing: str) -> ConfigError:
        return ConfigError(
            f"self-test: {trial.told}, tier arena: the worker did not answer a {doing} in time; look for "
            f"what keeps the threads of this process from running, or start without it: self_test = false"
        )

    # ---- the worker --------------------------------------------------------------------

    def _job(self) -> JobId:
        self._jobs += 1
        return JobId(self._jobs)

    def _wait(self, reports: Mapping[JobId, _Report], job: JobId, until_s: float) -> _Report | None:
        """The report of a job, or None when the time is up."""
        while True:
            posted, _, _ = self._worker.poll()
            for report in posted:
                self._saves |= {save.job: save for save in report.saves}
                self._loads |= {load.job: load for load in report.loads}
                self._writes |= {write.job: write for write in report.writes}
            if job in reports:
                return reports[job]
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0:
                return None
            self._worker.wait_for_news(min(_POLL_S, left_s))

    def _wait_removed(self) -> None:
        """Return when the writer has come to the removals, or when the time is up."""
        removed = threading.Event()
        if self._writer.submit(removed.set):
            removed.wait(max(0.0, self._give_up_s - self._clock.monotonic_s()))

    def _payload(self, trial: Trial) -> memoryview:
        group = trial.group.group
        return payload_of(self._arena.frame(group, _SLOT), self._layout.payload_bytes(group))

    @contextmanager
    def _slot_wiped(self, group: GroupId) -> Iterator[None]:
        """Afterwards the slot holds nothing that opens."""
        try:
            yield
        finally:
            self._arena.frame(group, _SLOT)[:HEADER_BYTES] = bytes(HEADER_BYTES)


def _log_disk(trial: Trial, why: str) -> None:
    logger.warning(
        "kvstow: self-test: group %d: the disk %s. Its part of the self-test is left out; the engine goes on "
        "with it as with any such disk",
        trial.group.group,
        why,
    )
