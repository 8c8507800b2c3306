"""The loads: what is promised, how it is ordered, and how every promise ends, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kvstow.clock import Clock
from kvstow.keys.ids import ChunkRef, Rank
from kvstow.layout.geometry import NO_BLOCK, GroupId, GroupKind
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.messages import (
    NO_SLOT,
    Fault,
    JobId,
    LoadItem,
    LoadJob,
    LoadReport,
    PlaceInArena,
    Slot,
    Tier,
)
from kvstow.lifecycle.requests import MISS, PENDING, LoadRun, Lookup, Match, Phase, TrackedRequest
from kvstow.lifecycle.silence import RankWatch
from kvstow.metrics import Metric, OnceLogger, Recorder

logger = logging.getLogger(__name__)


class LoadPlanner:
    """The planner's part for loads. What may veto a promise is asked in `match`.

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
        self._limits = limits
        self._directory = directory
        self._clock = clock
        self._recorder = recorder
        self._jobs = jobs
        self._runs: dict[JobId, LoadRun] = {}
        self._watch = RankWatch(clock, 2 * limits.load_timeout_s)
        self._dead: set[Rank] = set()
        self._given_up: dict[JobId, LoadRun] = {}
        self._failures = OnceLogger(logger, clock)
        self._disk_degraded_until_s = float("-inf")
        self._orders: list[LoadJob] = []
        # A chunk's frames in further groups bring the same tokens, and are not counted again.
        self._counted = next(
            (GroupId(i) for i, rule in enumerate(limits.rules) if rule.kind is GroupKind.PAGED), None
        )

    def match(self, request: TrackedRequest, num_tokens: int, computed: int) -> Match:
        """How many tokens beyond ``computed`` would be loaded; promised if it is a hit."""
        if request.phase is Phase.LOADING:
            return PENDING
        request.phase = Phase.MISSED
        match = self._find(request, num_tokens, computed)
        if match.lookup is Lookup.HIT:
            request.phase = Phase.PROMISED
            request.floor = computed
            request.boundary = computed + match.tokens
        return match

    def _find(self, request: TrackedRequest, num_tokens: int, computed: int) -> Match:
        limits = self._limits
        if not limits.loads or not self._directory.is_open:
            return MISS
        # A dead rank would not load it; and what it was told to load before is not bounded otherwise.
        if len(self._runs) >= limits.pending_loads_max or self._dead:
            return MISS
        self.refresh_disk()
        start = computed // limits.chunk_tokens
        # One token at least is left to compute.
        stop = min(len(request.chunks), (num_tokens - 1) // limits.chunk_tokens)
        if start >= stop:
            return MISS
        end, pending = self._directory.held_until(request.chunks, start, stop, request.denied)
        if pending and end < stop:
            return PENDING
        tokens = end * limits.chunk_tokens - computed
        if end <= start or tokens < max(1, limits.min_load_tokens):
            return MISS
        return Match(Lookup.HIT, tokens)

    def allocate(self, request: TrackedRequest, blocks: BlockTables, promised: int) -> None:
        """Order the load of ``promised`` tokens from the floor on.

        What cannot be loaded after all is ordered as a load that fails at once, so that the
        promise still ends.
        """
        job = JobId(next(self._jobs))
        items: tuple[LoadItem, ...] = ()
        pinned: list[ChunkRef] = []
        boundary = request.floor + promised
        aligned = boundary % self._limits.chunk_tokens == 0
        if request.phase is Phase.PROMISED and boundary <= request.boundary and aligned:
            stop = boundary // self._limits.chunk_tokens
            pinned = self._directory.pin(request.chunks, stop)
            items = self._load_items(request, blocks, stop)
        if not items:
            self._recorder.count(Metric.REFUSED_PROMISES)
            self._failures.error(
                "promise refused",
                f"{promised} tokens promised to request {request.request_id} at floor {request.floor} "
                "cannot be loaded any more; the request recomputes them",
            )
        request.boundary = boundary
        request.phase = Phase.LOADING
        self._runs[job] = LoadRun(request, items, pinned, max(1, self._directory.world_size))
        self._runs[job].ordered = self._watch.now()
        self._orders.append(LoadJob(job, request.request_id, items))
        self._recorder.count(Metric.PROMISED_TOKENS, promised)

    def promised_by_tier(self, request: TrackedRequest) -> dict[Tier, int]:
        """Tokens that the request's load in flight brings, by the tier they come from."""
        tokens = dict.fromkeys(Tier, 0)
        for run in self._runs.values():
            if run.request is request:
                for tier, count in self._by_tier(run).items():
                    tokens[tier] += count
        return tokens

    def take_orders(self) -> tuple[LoadJob, ...]:
        """New loads, each once."""
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def end_silent(self) -> None:
        """End the loads of ranks from which nothing comes any more; once a step."""
        self._watch.step()
        for job, run in list(self._runs.items()):
            silent = {rank for rank in run.waiting if self._watch.is_silent(rank, run.ordered)}
            if silent:
                self._dead |= silent
                self._give_up(job, run)

    def heard(self, rank: Rank) -> None:
        """A report came from ``rank``: it lives."""
        self._watch.heard(rank)
        self._dead.discard(rank)

    def reported(self, rank: Rank, load: LoadReport) -> None:
        """One rank is done with a load."""
        run = self._runs.get(load.job)
        if run is None or rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            self._came_back(rank, load)
            return
        run.waiting.discard(rank)
        run.refused = run.refused or load.refused
        for failed in load.failed:
            run.note_fault(failed.item, failed.fault)
        for place in load.busy:
            run.busy[place] = run.busy.get(place, 0) + 1
        if not run.waiting:
            self._end(load.job, run)

    def slot_freed(self, group: GroupId, slot: Slot) -> None:
        """A reader that was given up on one rank came back."""
        for run in self._runs.values():
            left = run.busy.get((group, slot))
            if left:
                run.busy[group, slot] = left - 1
                return
        self._directory.slot_freed(group, slot)

    def refresh_disk(self) -> None:
        """Promise from the disk again once it has cooled down."""
        usable = self._clock.monotonic_s() >= self._disk_degraded_until_s
        if usable is not self._directory.disk_usable:
            self._directory.disk_usable = usable
            self._recorder.gauge(Metric.DISK_DEGRADED, float(not usable))

    def _degrade_disk(self) -> None:
        self._disk_degraded_until_s = self._clock.monotonic_s() + self._limits.disk_cooldown_s
        self.refresh_disk()

    def _load_items(self, request: TrackedRequest, blocks: BlockTables, stop: int) -> tuple[LoadItem, ...]:
        """Orders for what a resume at boundary ``stop`` needs beyond the floor, or () if one is gone."""
        rules, floor = self._limits.rules, request.floor
        if len(blocks) != len(rules):
            return ()
        start = floor // self._limits.chunk_tokens
        places = sorted(
            (index, group)
            for group in self._directory.group_ids
            for index in rules[group].needed(stop)
            if index >= start
        )
        items: list[LoadItem] = []
        for index, group in places:
            rule = rules[group]
            frame = rule.frame_table(blocks[group], index)
            skip = rule.blocks_below(index, floor)
            if rule.kind is GroupKind.WINDOW:
                while skip < len(frame) and frame[skip] == NO_BLOCK:
                    skip += 1
            if len(frame) < rule.frame_blocks or NO_BLOCK in frame[skip:]:
                return ()
            if skip < len(frame):
                ref = request.ref(group, index)
                tier = self._directory.tier_of(ref)
                if tier is None:
                    return ()
                items.append(LoadItem(ref, tier, self._directory.slot_of(ref), frame, skip))
        # Slots for what comes from disk only now: nothing that is ordered to fail may keep one.
        return tuple(self._promoted(item) if item.source is Tier.DISK else item for item in items)

    def _promoted(self, item: LoadItem) -> LoadItem:
        slot = self._directory.reserve_arena(item.ref, promoting=True)
        return LoadItem(item.ref, item.source, slot, item.blocks, item.skip_blocks)

    def _end(self, job: JobId, run: LoadRun) -> None:
        del self._runs[job]
        request, directory = run.request, self._directory
        failed = bool(run.faults) or run.refused or not run.items
        if not run.waiting:
            directory.unpin(run.pinned)  # a rank that was given up may still read
        for index, item in enumerate(run.items):
            fault = run.faults.get(index)
            if item.source is Tier.DISK and item.slot != NO_SLOT:
                # A promoted frame is in the arena on every rank only if the whole load went
                # well: an item that was cut short by another's failure may not be.
                if failed:
                    directory.arena_failed(item.ref, run.busy.get((item.ref.group, item.slot), 0))
                else:
                    directory.arena_filled(item.ref)
            if fault in (Fault.ABSENT, Fault.CORRUPT):
                directory.drop(item.ref, item.source)
            if fault in (Fault.TIMEOUT, Fault.UNAVAILABLE) and item.source is Tier.DISK:
                self._degrade_disk()
            if fault is not None and fault is not Fault.CANCELLED:
                request.deny(item.ref.group, item.ref.chunk)
        if failed:
            if not set(run.faults.values()) - {Fault.CANCELLED}:
                self._deny_all(run)
            self._failed(job, run)
        else:
            directory.touch(request.chunks, run.boundary // self._limits.chunk_tokens)
            loaded = self._by_tier(run)
            self._recorder.count(Metric.LOADED_TOKENS_ARENA, loaded[Tier.ARENA])
            self._recorder.count(Metric.LOADED_TOKENS_DISK, loaded[Tier.DISK])
        if request.phase is Phase.LOADING:
            request.phase = Phase.FAILED if failed else Phase.LOADED

    def _deny_all(self, run: LoadRun) -> None:
        """With no item to blame, none of the load's frames is promised to its request again."""
        chunk_tokens, chunks = self._limits.chunk_tokens, run.request.chunks
        start, stop = run.floor // chunk_tokens, -(-run.boundary // chunk_tokens)
        for group, rule in enumerate(self._limits.rules):
            needed = rule.needed(stop)
            for chunk in chunks[max(start, needed.start) : stop]:
                run.request.deny(GroupId(group), chunk)

    def _failed(self, job: JobId, run: LoadRun) -> None:
        request = run.request
        self._recorder.count(Metric.LOAD_FAILED)
        self._recorder.count(Metric.LOAD_FAILED_TOKENS, run.tokens)
        faults = sorted({fault.value for fault in run.faults.values()}) or ["refused"]
        if Fault.TIMEOUT.value in faults:
            self._recorder.count(Metric.LOAD_TIMEOUTS)
        self._failures.error(
            f"load failed: {', '.join(faults)}",
            f"load {job} of request {request.request_id}: {len(run.faults)} of {len(run.items)} frames, "
            f"{run.tokens} tokens from token {run.floor}; the request recomputes them",
        )

    def _give_up(self, job: JobId, run: LoadRun) -> None:
        """End a load that some ranks say nothing of: they may still read its frames, and fill its slots."""
        for place in _promoted_places(run):
            run.busy[place] = run.busy.get(place, 0) + len(run.waiting)
        for item in range(len(run.items)):
            run.note_fault(item, Fault.TIMEOUT)
        run.refused = True
        self._given_up[job] = run
        self._end(job, run)

    def _came_back(self, rank: Rank, load: LoadReport) -> None:
        """A rank that was taken for dead is done with a load: it no longer reads or fills its slots."""
        run = self._given_up.get(load.job)
        if run is None or rank not in run.waiting:
            return
        run.waiting.discard(rank)
        for place in _promoted_places(run):
            if place not in load.busy:
                self._directory.slot_freed(*place)
        if not run.waiting:
            del self._given_up[load.job]
            self._directory.unpin(run.pinned)

    def _by_tier(self, run: LoadRun) -> dict[Tier, int]:
        """The tokens of a load by the tier they come from; together all of them, if it is issued."""
        tokens = dict.fromkeys(Tier, 0)
        if self._counted is None:
            # No frame stands for tokens of its own: they are there when the slowest has come.
            sources = {item.source for item in run.items}
            if sources:
                tokens[Tier.DISK if Tier.DISK in sources else Tier.ARENA] = run.tokens
            return tokens
        chunk_tokens = self._limits.chunk_tokens
        for item in run.items:
            if item.ref.group == self._counted:
                first = item.ref.index * chunk_tokens
                tokens[item.source] += first + chunk_tokens - max(first, run.floor)
        return tokens


def _promoted_places(run: LoadRun) -> list[PlaceInArena]:
    """The slots that a load fills on its way from disk."""
    return [
        (item.ref.group, item.slot) for item in run.items if item.source is Tier.DISK and item.slot != NO_SLOT
    ]
