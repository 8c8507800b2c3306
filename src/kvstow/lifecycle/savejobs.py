"""A save from its order to its end, whatever chose its frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstow.keys.ids import ChunkRef, Rank
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.messages import JobId, SaveItem, SaveJob, SaveReport
from kvstow.lifecycle.requests import SaveRun, TrackedRequest
from kvstow.lifecycle.writing import WritePlanner
from kvstow.metrics import Metric, Recorder


class SaveJobs:
    """Saves of one sort in flight.

    Args:
        directory: what is where.
        writes: takes what is saved on to disk.
        recorder: counts what happens.
        jobs: gives job ids.
    """

    def __init__(
        self, directory: Directory, writes: WritePlanner, recorder: Recorder, jobs: Iterator[int]
    ) -> None:
        self._directory = directory
        self._writes = writes
        self._recorder = recorder
        self._jobs = jobs
        self._runs: dict[JobId, SaveRun] = {}
        self._orders: list[JobId] = []
        self._chunks = 0

    def __contains__(self, job: JobId) -> bool:
        return job in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def chunks_in_flight(self) -> int:
        """Chunks that the saves in flight copy, each save's own."""
        return self._chunks

    def order(
        self, request: TrackedRequest, items: Sequence[SaveItem], pinned: list[ChunkRef], stop: int
    ) -> JobId:
        """Order a save whose slots are reserved. Its writes are added when the order is taken.

        Args:
            request: whose blocks are copied.
            items: what to copy.
            pinned: unpinned when the save has ended.
            stop: the boundary up to which the request's chunks are kept then.
        """
        job = JobId(next(self._jobs))
        run = SaveRun(request, tuple(items), pinned, stop, self._directory.world_size)
        self._runs[job] = run
        self._orders.append(job)
        self._chunks += run.chunks
        return job

    def take_orders(self) -> tuple[SaveJob, ...]:
        """New saves, each once."""
        orders = []
        for job in self._orders:
            run = self._runs[job]
            items = tuple(
                SaveItem(item.ref, item.slot, item.blocks, self._writes.begin(item.ref, run.request.chunks))
                for item in run.items
            )
            orders.append(SaveJob(job, run.request.request_id, items))
        self._orders.clear()
        return tuple(orders)

    def drop_orders(self, request: TrackedRequest) -> list[tuple[JobId, SaveRun]]:
        """End those of the request's saves that no worker has heard of: its blocks are taken away."""
        dropped = [(job, self._runs[job]) for job in self._orders if self._runs[job].request is request]
        for job, run in dropped:
            self._orders.remove(job)
            run.failed.update(range(len(run.items)))
            self._end(job, run)
        return dropped

    def reported(self, rank: Rank, save: SaveReport) -> SaveRun | None:
        """One rank is done with a save; the run if all are."""
        run = self._runs.get(save.job)
        if run is None or rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return None
        run.waiting.discard(rank)
        run.failed.update(failed.item for failed in save.failed)
        if run.waiting:
            return None
        self._end(save.job, run)
        return run

    def _end(self, job: JobId, run: SaveRun) -> None:
        del self._runs[job]
        self._chunks -= run.chunks
        self._directory.unpin(run.pinned)
        for index, item in enumerate(run.items):
            if index in run.failed:
                self._directory.arena_failed(item.ref)
                self._recorder.count(Metric.SAVE_CANCELLED)
            else:
                self._directory.arena_filled(item.ref)
                self._recorder.count(Metric.SAVES)
