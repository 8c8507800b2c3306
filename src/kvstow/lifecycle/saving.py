"""The saves of PAGED groups: which chunks are copied out of blocks that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.keys.ids import Rank
from kvstow.layout.geometry import NO_BLOCK, GroupId, GroupKind
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.messages import NO_SLOT, JobId, SaveItem, SaveJob, SaveReport
from kvstow.lifecycle.requests import SaveRun, TrackedRequest
from kvstow.lifecycle.savejobs import SaveJobs
from kvstow.lifecycle.writing import WritePlanner
from kvstow.metrics import Metric, Recorder


class SavePlanner:
    """The planner's part for saves of PAGED groups.

    Args:
        limits: what it may do.
        directory: what is where.
        writes: takes what is saved on to disk.
        recorder: counts what happens.
        jobs: gives job ids.
    """

    def __init__(
        self,
        limits: PlannerLimits,
        directory: Directory,
        writes: WritePlanner,
        recorder: Recorder,
        jobs: Iterator[int],
    ) -> None:
        self._limits = limits
        self._directory = directory
        self._recorder = recorder
        self._saves = SaveJobs(directory, writes, recorder, jobs)
        self._groups = [
            GroupId(index) for index, rule in enumerate(limits.rules) if rule.kind is GroupKind.PAGED
        ]

    @property
    def in_flight(self) -> bool:
        """Whether any copy out of blocks is in flight."""
        return bool(self._saves)

    def find_unsaved(self, request: TrackedRequest, computed: int) -> bool:
        """Whether some chunk of the first ``computed`` tokens is to be saved: then call `save`."""
        stop = min(len(request.chunks), computed // self._limits.chunk_tokens)
        while request.next_save < stop and not self._missing(request, request.next_save):
            request.next_save += 1
        # A chunk whose parent was evicted meanwhile would be of no use to anybody. Saving the parent
        # again would let requests that do not fit together evict each other's chunks for ever.
        return request.next_save < stop and (
            request.next_save == 0 or not self._missing(request, request.next_save - 1)
        )

    def save(self, request: TrackedRequest, computed: int, blocks: BlockTables) -> None:
        """Order the saves of all chunks of the first ``computed`` tokens that are not kept."""
        limits = self._limits
        if len(blocks) != len(limits.rules):
            return
        stop = min(len(request.chunks), computed // limits.chunk_tokens)
        items: list[SaveItem] = []
        chunks_max = limits.pending_saves_max - self._saves.chunks_in_flight
        index, chunks = request.next_save, 0
        # Before any slot is taken: what these chunks build on may have no follower yet, and would be
        # the victim. It stays pinned while they fill.
        pinned = self._directory.pin(request.chunks, stop)
        while index < stop and chunks < chunks_max:
            missing = self._missing(request, index)
            if missing:
                found = self._reserve(request, index, missing, blocks)
                if not found:
                    break
                items += found
                chunks += 1
            index += 1
        request.next_save = index
        if not items:
            self._directory.unpin(pinned)
            return
        request.save_jobs.add(self._saves.order(request, items, pinned, index))

    def take_orders(self) -> tuple[SaveJob, ...]:
        """New saves, each once."""
        return self._saves.take_orders()

    def drop_orders(self, request: TrackedRequest) -> None:
        """The request's blocks are taken away: what no worker has heard of is not copied."""
        for job, run in self._saves.drop_orders(request):
            self._ended(job, run)

    def reported(self, rank: Rank, save: SaveReport) -> bool:
        """One rank is done with a save; whether all are."""
        run = self._saves.reported(rank, save)
        if run is None:
            return False
        self._ended(save.job, run)
        self._directory.touch(run.request.chunks, run.stop)
        return True

    def _missing(self, request: TrackedRequest, index: int) -> list[GroupId]:
        """The groups that do not keep a chunk; one may have lost what another still has."""
        chunk = request.chunks[index]
        return [group for group in self._groups if not self._directory.is_kept(group, chunk)]

    def _reserve(
        self, request: TrackedRequest, index: int, groups: list[GroupId], blocks: BlockTables
    ) -> list[SaveItem]:
        """Slots for one chunk in all of ``groups``, or in none: its blocks or slots are not there."""
        items: list[SaveItem] = []
        for group in groups:
            rule = self._limits.rules[group]
            frame = rule.frame_table(blocks[group], index)
            ref = request.ref(group, index)
            slot = NO_SLOT
            if len(frame) == rule.frame_blocks and NO_BLOCK not in frame:
                slot = self._directory.reserve_arena(ref)
                if slot == NO_SLOT:
                    self._recorder.count(Metric.SAVE_SKIPPED_NO_SPACE)
            if slot == NO_SLOT:
                for item in items:
                    self._directory.arena_failed(item.ref)
                return []
            items.append(SaveItem(ref, slot, frame))
        return items

    @staticmethod
    def _ended(job: JobId, run: SaveRun) -> None:
        request = run.request
        request.save_jobs.discard(job)
        for item in run.failed:
            request.next_save = min(request.next_save, run.items[item].ref.index)
