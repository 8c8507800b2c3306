"""The snapshots: frames of WINDOW and STATE groups, copied in the step that makes them.

A window's blocks are dropped as it moves on and a state is overwritten in place, so a copy must
be done before the engine's next step. It then reads no block any more: nobody waits for it,
holds blocks for it or fences it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstow.keys.ids import Rank
from kvstow.layout.geometry import NO_BLOCK, BlockId, GroupId, GroupKind
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.messages import NO_SLOT, ImageOffer, JobId, SaveItem, SaveJob, SaveReport
from kvstow.lifecycle.requests import TrackedRequest
from kvstow.lifecycle.savejobs import SaveJobs
from kvstow.lifecycle.writing import WritePlanner
from kvstow.metrics import Metric, Recorder


class SnapshotPlanner:
    """The planner's part for saves of WINDOW and STATE groups.

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
        self._windows = [
            GroupId(index) for index, rule in enumerate(limits.rules) if rule.kind is GroupKind.WINDOW
        ]

    def __contains__(self, job: JobId) -> bool:
        return job in self._saves

    def snapshot(
        self,
        request: TrackedRequest,
        computed: int,
        blocks: Callable[[], BlockTables],
        images: Sequence[ImageOffer],
    ) -> None:
        """Order copies of the windows that end in the first ``computed`` tokens, and of ``images``."""
        stop = min(len(request.chunks), computed // self._limits.chunk_tokens)
        items: list[SaveItem] = []
        tables: BlockTables | None = None
        for group in self._windows:
            if self._find_window(request, group, stop):
                if tables is None:
                    tables = blocks()
                    if len(tables) != len(self._limits.rules):
                        break
                self._take_windows(request, group, stop, tables, items)
        for image in images:
            self._take_image(request, image, stop, items)
        if items:
            # Nothing is pinned: what they build on may not be kept yet, and none of it is read.
            self._saves.order(request, items, [], stop)

    def take_orders(self) -> tuple[SaveJob, ...]:
        """New snapshots, each once."""
        return self._saves.take_orders()

    def drop_orders(self, request: TrackedRequest) -> None:
        """The request's blocks are taken away: what no worker has heard of is not copied."""
        self._saves.drop_orders(request)

    def reported(self, rank: Rank, save: SaveReport) -> None:
        """One rank is done with a snapshot."""
        run = self._saves.reported(rank, save)
        if run is None:
            return
        for item in run.failed:
            ref = run.items[item].ref
            cursors = run.request.next_window
            if ref.group in cursors:
                # Its blocks may still be there.
                cursors[ref.group] = min(cursors[ref.group], ref.index)

    def _find_window(self, request: TrackedRequest, group: GroupId, stop: int) -> bool:
        """Whether some window frame up to ``stop`` is not kept and was not looked at."""
        index = request.next_window.get(group, 0)
        while index < stop and self._directory.is_kept(group, request.chunks[index]):
            index += 1
        request.next_window[group] = index
        return index < stop

    def _take_windows(
        self,
        request: TrackedRequest,
        group: GroupId,
        stop: int,
        tables: BlockTables,
        items: list[SaveItem],
    ) -> None:
        rule = self._limits.rules[group]
        index = request.next_window[group]
        while index < stop and self._has_room(items):
            frame = rule.frame_table(tables[group], index)
            if len(frame) < rule.frame_blocks:
                break
            # What the window has left behind does not come back; it is not looked at again.
            is_whole = NO_BLOCK not in frame and not self._directory.is_kept(group, request.chunks[index])
            if is_whole and not self._reserve(request, group, index, frame, items):
                break
            index += 1
        request.next_window[group] = index

    def _take_image(
        self, request: TrackedRequest, image: ImageOffer, stop: int, items: list[SaveItem]
    ) -> None:
        limits = self._limits
        index = image.boundary // limits.chunk_tokens - 1
        of_use = (
            image.boundary % limits.chunk_tokens == 0
            and 0 <= index < stop
            and image.block != NO_BLOCK
            and 0 <= image.group < len(limits.rules)
            and limits.rules[image.group].kind is GroupKind.STATE
        )
        if not of_use or not self._has_room(items):
            self._recorder.count(Metric.IMAGES_SKIPPED)
        elif not self._directory.is_kept(image.group, request.chunks[index]):
            self._reserve(request, image.group, index, (image.block,), items)

    def _reserve(
        self,
        request: TrackedRequest,
        group: GroupId,
        index: int,
        frame: tuple[BlockId, ...],
        items: list[SaveItem],
    ) -> bool:
        ref = request.ref(group, index)
        slot = self._directory.reserve_arena(ref)
        if slot == NO_SLOT:
            self._recorder.count(Metric.SAVE_SKIPPED_NO_SPACE)
            return False
        items.append(SaveItem(ref, slot, frame))
        return True

    def _has_room(self, items: list[SaveItem]) -> bool:
        return self._saves.chunks_in_flight + len(items) < self._limits.pending_saves_max
