"""The writes: which frames go on from the arena to disk, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from kvstow.clock import Clock
from kvstow.keys.ids import ChunkId, ChunkRef, Rank
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import PlannerLimits
from kvstow.lifecycle.messages import NO_JOB, NO_SLOT, JobId, Tier, WriteItem, WriteReport
from kvstow.lifecycle.requests import WriteRun
from kvstow.metrics import Metric, Recorder


class _Queue:
    """One group's frames that wait for a write, and how many of it are being written."""

    def __init__(self, waiting_max: int, writes_max: int) -> None:
        self.waiting: deque[tuple[ChunkRef, Sequence[ChunkId]]] = deque(maxlen=max(1, waiting_max))
        self.writes_max = writes_max
        self.writes = 0


class WritePlanner:
    """The planner's part for writes to disk.

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
        self._runs: dict[JobId, WriteRun] = {}
        self._queues: dict[GroupId, _Queue] = {}
        self._moved_s = clock.monotonic_s()

    def open(self) -> None:
        """The directory is open: size what depends on the arena."""
        for group in self._directory.group_ids:
            # A frame being written keeps its slot; at most half of the group's slots wait for the disk.
            writes_max = min(self._limits.pending_writes_max, self._directory.arena_slots(group) // 2)
            self._queues[group] = _Queue(self._limits.pending_writes_max, writes_max)

    def begin(self, ref: ChunkRef, chunks: Sequence[ChunkId]) -> JobId:
        """Reserve a place on disk for ``ref`` if one more write may be in flight.

        Args:
            ref: a frame in the arena, or on its way there.
            chunks: the prefix it belongs to.

        Returns:
            The write's job, or `NO_JOB`: then it has no place, or its turn comes with `take`.
        """
        queue = self._queues[ref.group]
        if not self._has_room(queue):
            if queue.writes_max:
                if not self._is_waiting:
                    self._moved_s = self._clock.monotonic_s()
                if len(queue.waiting) == queue.waiting.maxlen:
                    self._recorder.count(Metric.DISK_WRITE_SKIPPED)
                queue.waiting.append((ref, chunks))
            return NO_JOB
        if not self._directory.reserve_disk(ref):
            return NO_JOB
        job = JobId(next(self._jobs))
        self._runs[job] = WriteRun(ref, chunks, self._directory.world_size)
        queue.writes += 1
        return job

    def take(self) -> tuple[WriteItem, ...]:
        """Frames whose write had to wait, now that others have ended."""
        items = []
        for ref in self._directory.take_stranded():
            self._queues[ref.group].waiting.appendleft((ref, ()))
        for queue in self._queues.values():
            for _ in range(len(queue.waiting)):
                if not self._has_room(queue):
                    break
                ref, chunks = queue.waiting.popleft()
                if self._directory.tier_of(ref) is not Tier.ARENA:
                    if self._directory.slot_of(ref) != NO_SLOT:
                        # Its save has not ended yet: its turn comes again.
                        queue.waiting.append((ref, chunks))
                    continue
                job = self.begin(ref, chunks)
                if job != NO_JOB:
                    items.append(WriteItem(job, ref, self._directory.slot_of(ref)))
        return tuple(items)

    @property
    def has_waiting(self) -> bool:
        """Whether frames wait for their turn to be written, and writes do end."""
        stalled_s = self._clock.monotonic_s() - self._moved_s
        return self._is_waiting and stalled_s <= self._limits.load_timeout_s

    def forget_waiting(self) -> None:
        """Frames that wait for a write are not written any more."""
        for queue in self._queues.values():
            queue.waiting.clear()

    def reported(self, rank: Rank, writes: Iterable[WriteReport]) -> None:
        """One rank is done with some writes."""
        written: dict[int, tuple[Sequence[ChunkId], int]] = {}
        for write in writes:
            run = self._write_reported(rank, write)
            if run is not None:
                _, stop = written.get(id(run.chunks), (run.chunks, 0))
                written[id(run.chunks)] = (run.chunks, max(stop, run.ref.index + 1))
        for chunks, stop in written.values():
            # Writes end first chunk first; eviction wants the first chunk to be the most recent.
            self._directory.touch(chunks, stop)

    def _write_reported(self, rank: Rank, write: WriteReport) -> WriteRun | None:
        """Note one rank's write; the run if it is now on disk on every rank."""
        run = self._runs.get(write.job)
        if run is None or rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return None
        self._moved_s = self._clock.monotonic_s()
        run.waiting.discard(rank)
        run.stored = run.stored and write.stored
        if run.waiting:
            return None
        del self._runs[write.job]
        self._queues[run.ref.group].writes -= 1
        if not run.stored:
            self._directory.disk_failed(run.ref)
            self._recorder.count(Metric.DISK_WRITE_FAILED)
            return None
        self._directory.disk_filled(run.ref)
        self._recorder.count(Metric.DISK_WRITES)
        return run

    @property
    def _is_waiting(self) -> bool:
        return any(queue.waiting for queue in self._queues.values())

    def _has_room(self, queue: _Queue) -> bool:
        return queue.writes < queue.writes_max and len(self._runs) < self._limits.pending_writes_max
