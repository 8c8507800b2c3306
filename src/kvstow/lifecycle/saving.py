"""The saves: which chunks are copied out of blocks, and which frames go on to disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from kvstow.clock import Clock
from kvstow.keys.ids import ChunkId, ChunkRef, Rank
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.messages import (
    NO_JOB,
    NO_SLOT,
    JobId,
    SaveItem,
    SaveJob,
    SaveReport,
    Tier,
    WriteItem,
    WriteReport,
)
from kvstow.lifecycle.requests import SaveRun, TrackedRequest, WriteRun
from kvstow.metrics import Metric, Recorder


class SavePlanner:
    """The planner's part for saves and for writes to disk.

    Args:
        limits: what it may do.
        directory: what is where.
        clock: monotonic time.
        recorder: counts what happens.
        jobs: gives job ids.
    """

    def __init__(
        self,
        limits: PlannerLimits,
        directory: Directory,
        clock: Clock,
        recorder: Recorder,
        jobs: Iterator[int],
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._directory = directory
        self._recorder = recorder
        self._jobs = jobs
        self._runs: dict[JobId, SaveRun] = {}
        self._write_runs: dict[JobId, WriteRun] = {}
        self._unwritten: deque[tuple[ChunkRef, Sequence[ChunkId]]] = deque(
            maxlen=max(1, limits.pending_writes_max)
        )
        self._saving_chunks = 0
        self._writes_max = 0
        self._write_moved_s = clock.monotonic_s()
        self._orders: list[SaveJob] = []

    def open(self) -> None:
        """The directory is open: size what depends on the arena."""
        # A frame being written keeps its slot; at most half of the arena waits for the disk.
        slots = min(self._directory.arena_slots(group) for group in self._directory.group_ids)
        self._writes_max = min(self._limits.pending_writes_max, slots // 2)

    @property
    def in_flight(self) -> bool:
        """Whether any copy out of blocks is in flight."""
        return bool(self._runs)

    def find_unsaved(self, request: TrackedRequest, computed: int) -> bool:
        """Whether some chunk of the first ``computed`` tokens is to be saved: then call `save`."""
        chunks = request.chunks
        stop = min(len(chunks), computed // self._limits.chunk_tokens)
        while request.next_save < stop and self._directory.is_kept(chunks[request.next_save]):
            request.next_save += 1
        return request.next_save < stop

    def save(self, request: TrackedRequest, computed: int, blocks: BlockTables) -> None:
        """Order the saves of all chunks of the first ``computed`` tokens that are not kept."""
        stop = min(len(request.chunks), computed // self._limits.chunk_tokens)
        items: list[SaveItem] = []
        groups = self._directory.group_ids
        index = request.next_save
        while index < stop and self._saving_chunks < self._limits.pending_saves_max:
            if not self._directory.is_kept(request.chunks[index]):
                if not self._limits.blocks_reach(blocks, index + 1):
                    break
                refs = [request.ref(group, index) for group in groups]
                slots = [self._directory.reserve_arena(ref) for ref in refs]
                if NO_SLOT in slots:
                    for ref, slot in zip(refs, slots, strict=True):
                        if slot != NO_SLOT:
                            self._directory.arena_failed(ref)
                    self._recorder.count(Metric.SAVE_SKIPPED_NO_SPACE)
                    break
                for ref, slot in zip(refs, slots, strict=True):
                    # Pinned while it fills: eviction must not take its parents before it.
                    write = self._begin_write(ref, request.chunks)
                    items.append(SaveItem(ref, slot, self._limits.chunk_blocks(blocks, ref), write))
                self._saving_chunks += 1
            index += 1
        request.next_save = index
        if not items:
            return
        job = JobId(next(self._jobs))
        pinned = self._directory.pin_prefix(request.chunks, index)
        run = SaveRun(request, tuple(items), pinned, index, self._directory.world_size)
        self._runs[job] = run
        request.save_jobs.add(job)
        self._orders.append(SaveJob(job, request.request_id, run.items))

    def take_orders(self) -> tuple[SaveJob, ...]:
        """New saves, each once."""
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def take_writes(self) -> tuple[WriteItem, ...]:
        """Frames whose write had to wait, now that others have ended."""
        items = []
        for _ in range(len(self._unwritten)):
            if len(self._write_runs) >= self._writes_max:
                break
            ref, chunks = self._unwritten.popleft()
            if self._directory.tier_of(ref) is not Tier.ARENA:
                if self._directory.slot_of(ref) != NO_SLOT:
                    # Its save has not ended yet: its turn comes again.
                    self._unwritten.append((ref, chunks))
                continue
            job = self._begin_write(ref, chunks)
            if job != NO_JOB:
                items.append(WriteItem(job, ref, self._directory.slot_of(ref)))
        return tuple(items)

    @property
    def has_unwritten(self) -> bool:
        """Whether frames wait for their turn to be written, and writes do end."""
        stalled_s = self._clock.monotonic_s() - self._write_moved_s
        return bool(self._unwritten) and stalled_s <= self._limits.load_timeout_s

    def forget_unwritten(self) -> None:
        """Frames that wait for a write are not written any more."""
        self._unwritten.clear()

    def save_reported(self, rank: Rank, save: SaveReport) -> JobId | None:
        """One rank is done with a save; the job if all are."""
        run = self._runs.get(save.job)
        if run is None or rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return None
        run.waiting.discard(rank)
        run.failed.update(failed.item for failed in save.failed)
        if run.waiting:
            return None
        self._end(save.job, run)
        return save.job

    def writes_reported(self, rank: Rank, writes: Iterable[WriteReport]) -> None:
        """One rank is done with some writes."""
        written: dict[int, tuple[Sequence[ChunkId], int]] = {}
        for write in writes:
            run = self._write_reported(rank, write)
            if run is not None:
                _, stop = written.get(id(run.chunks), (run.chunks, 0))
                written[id(run.chunks)] = (run.chunks, max(stop, run.ref.index + 1))
        for chunks, stop in written.values():
            # Writes end first chunk first; eviction wants the first chunk to be the most recent.
            self._directory.touch_prefix(chunks, stop)

    def _write_reported(self, rank: Rank, write: WriteReport) -> WriteRun | None:
        """Note one rank's write; the run if it is now on disk on every rank."""
        run = self._write_runs.get(write.job)
        if run is None or rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return None
        self._write_moved_s = self._clock.monotonic_s()
        run.waiting.discard(rank)
        run.stored = run.stored and write.stored
        if run.waiting:
            return None
        del self._write_runs[write.job]
        if not run.stored:
            self._directory.disk_failed(run.ref)
            self._recorder.count(Metric.DISK_WRITE_FAILED)
            return None
        self._directory.disk_filled(run.ref)
        self._recorder.count(Metric.DISK_WRITES)
        return run

    def _end(self, job: JobId, run: SaveRun) -> None:
        del self._runs[job]
        request = run.request
        request.save_jobs.discard(job)
        self._saving_chunks -= len({item.ref.chunk for item in run.items})
        self._directory.unpin(run.pinned)
        for index, item in enumerate(run.items):
            if index in run.failed:
                self._directory.arena_failed(item.ref)
                request.next_save = min(request.next_save, item.ref.index)
                self._recorder.count(Metric.SAVE_CANCELLED)
            else:
                self._directory.arena_filled(item.ref)
                self._recorder.count(Metric.SAVES)
        self._directory.touch_prefix(request.chunks, run.stop)

    def _begin_write(self, ref: ChunkRef, chunks: Sequence[ChunkId]) -> JobId:
        """Reserve a place on disk for ``ref`` if one more write may be in flight, else `NO_JOB`."""
        if len(self._write_runs) >= self._writes_max:
            if self._writes_max:
                if not self._unwritten:
                    self._write_moved_s = self._clock.monotonic_s()
                if len(self._unwritten) == self._unwritten.maxlen:
                    self._recorder.count(Metric.DISK_WRITE_SKIPPED)
                self._unwritten.append((ref, chunks))
            return NO_JOB
        if not self._directory.reserve_disk(ref):
            return NO_JOB
        job = JobId(next(self._jobs))
        self._write_runs[job] = WriteRun(ref, chunks, self._directory.world_size)
        return job
