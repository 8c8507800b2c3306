"""Decides what is promised, loaded, saved and written; does nothing itself.

Events come in (match, allocated, progress, finished, preempted, report), orders go out
(`Planner.step`). No thread, no I/O, an injected clock; it lives on the scheduler's thread. What
may veto a promise is asked in `Planner.match`, so that only what will be issued is promised.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvstow.clock import Clock
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef
from kvstow.layout.geometry import BlockId, GroupId
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.ledger import LoadLedger
from kvstow.lifecycle.messages import (
    NO_SLOT,
    Fault,
    Hello,
    Hold,
    JobId,
    LoadItem,
    LoadJob,
    LoadReport,
    Report,
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
from kvstow.lifecycle.requests import (
    MISS,
    PENDING,
    LoadRun,
    Lookup,
    Match,
    Phase,
    SaveRun,
    TrackedRequest,
    WriteRun,
)
from kvstow.metrics import Metric, Recorder

logger = logging.getLogger(__name__)

BlockTables = Sequence[Sequence[BlockId]]
"""Block ids of a request, by group, in token order."""


class PlannerLimits(msgspec.Struct, frozen=True):
    """What the planner may do.

    Attributes:
        chunk_tokens: tokens per chunk.
        block_tokens: tokens per block, by group.
        loads, saves: whether this engine reads and writes at all.
        min_load_tokens: smaller hits are recomputed.
        load_timeout_s: the workers' bound on a load; the planner's own is twice that, so that
            it only ever speaks when a worker's report was lost.
        pending_loads_max, pending_saves_max, pending_writes_max: jobs, chunks and frames in
            flight at once.
        disk_cooldown_s: how long nothing is promised from disk after it timed out.
    """

    chunk_tokens: int
    block_tokens: tuple[int, ...]
    loads: bool
    saves: bool
    min_load_tokens: int
    load_timeout_s: float
    pending_loads_max: int
    pending_saves_max: int
    pending_writes_max: int
    disk_cooldown_s: float


class Planner:
    """The request life of docs/design section 5 for one engine.

    Args:
        limits: what it may do.
        clock: monotonic time.
        recorder: counts what happens.
    """

    def __init__(self, limits: PlannerLimits, clock: Clock, recorder: Recorder) -> None:
        self._limits = limits
        self._clock = clock
        self._recorder = recorder
        self.directory = Directory(recorder)
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._generations = 0
        self._next_job = 0
        self._load_runs: dict[JobId, LoadRun] = {}
        self._save_runs: dict[JobId, SaveRun] = {}
        self._write_runs: dict[tuple[GroupId, ChunkId], WriteRun] = {}
        self._unwritten: deque[tuple[ChunkRef, Sequence[ChunkId]]] = deque(
            maxlen=max(1, limits.pending_writes_max)
        )
        self._saving_chunks = 0
        self._writes_max = 0
        self._ledger = LoadLedger(clock, 2 * limits.load_timeout_s)
        self._disk_degraded_until_s = float("-inf")
        self._loads: list[LoadJob] = []
        self._saves: list[SaveJob] = []
        self._fences: list[JobId] = []
        self._abandons: list[JobId] = []
        self._holds: list[Hold] = []
        self._holding: set[JobId] = set()

    def open(self, hellos: Sequence[Hello]) -> None:
        """Start with what every rank said; raises ConfigError if they disagree."""
        self.directory.open(hellos)
        # A frame being written keeps its slot; at most half of the arena waits for the disk.
        slots = min(self.directory.arena_slots(group) for group in self.directory.group_ids)
        self._writes_max = min(self._limits.pending_writes_max, slots // 2)

    # ---- events from the engine --------------------------------------------------------

    def match(
        self, request_id: RequestId, chunks: Sequence[ChunkId], num_tokens: int, computed: int
    ) -> Match:
        """How many tokens beyond ``computed`` would be loaded. Idempotent and cheap: polled.

        Args:
            request_id: the engine's id; may be one that was used before.
            chunks: ids of all whole chunks of the request's known tokens. Kept by reference:
                the adapter may extend it as tokens come.
            num_tokens: known tokens, prompt and output.
            computed: the engine's floor as far as it is known now; whole blocks.
        """
        request = self._tracked(request_id, chunks)
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
        if not limits.loads or not self.directory.is_open:
            return MISS
        if len(self._load_runs) >= limits.pending_loads_max:
            return MISS
        self._refresh_disk()
        start = computed // limits.chunk_tokens
        # One token at least is left to compute.
        stop = min(len(request.chunks), (num_tokens - 1) // limits.chunk_tokens)
        if start >= stop:
            return MISS
        end, pending = self.directory.held_until(request.chunks, start, stop, request.denied)
        if pending and end < stop:
            return PENDING
        tokens = end * limits.chunk_tokens - computed
        if end <= start or tokens < max(1, limits.min_load_tokens):
            return MISS
        return Match(Lookup.HIT, tokens)

    def allocated(self, request_id: RequestId, blocks: BlockTables, promised: int) -> None:
        """The engine gave the request its blocks; ``promised`` tokens are to be loaded.

        0 means that the engine ignored the promise. Otherwise a load is issued for exactly the
        tokens from the floor to ``floor + promised``; what cannot be issued after all is
        ordered as a load that fails at once, so that the promise still ends.
        """
        request = self._requests.get(request_id)
        if promised <= 0:
            if request is not None and request.phase is Phase.PROMISED:
                request.phase = Phase.MISSED
            return
        if request is None:
            request = self._tracked(request_id, ())
        job = self._new_job()
        items: tuple[LoadItem, ...] = ()
        pinned: list[ChunkRef] = []
        boundary = request.floor + promised
        aligned = boundary % self._limits.chunk_tokens == 0
        if request.phase is Phase.PROMISED and boundary <= request.boundary and aligned:
            stop = boundary // self._limits.chunk_tokens
            pinned = self.directory.pin_prefix(request.chunks, stop)
            items = self._load_items(request, blocks, stop)
        if not items:
            self._recorder.count(Metric.REFUSED_PROMISES)
            logger.error(
                "kvstow: %d tokens promised to request %s at floor %d cannot be loaded any more; recomputing",
                promised,
                request_id,
                request.floor,
            )
        request.boundary = boundary
        request.phase = Phase.LOADING
        self._load_runs[job] = LoadRun(request, items, pinned, max(1, self.directory.world_size))
        self._ledger.dispatch(job)
        self._loads.append(LoadJob(job, request_id, items))
        self._recorder.count(Metric.PROMISED_TOKENS, promised)

    def progress(
        self,
        request_id: RequestId,
        chunks: Sequence[ChunkId],
        computed: int,
        blocks: Callable[[], BlockTables],
    ) -> None:
        """``computed`` tokens of the request are in its blocks and final: save what is not kept.

        Args:
            request_id: the engine's id.
            chunks: ids of all whole chunks of the known tokens.
            computed: tokens whose blocks hold their final bytes.
            blocks: gives the block tables; called only when something is to be saved.
        """
        if not self._limits.saves or not self.directory.is_open:
            return
        request = self._tracked(request_id, chunks)
        if request.phase is Phase.LOADING:
            return
        stop = min(len(chunks), computed // self._limits.chunk_tokens)
        while request.next_save < stop and self.directory.is_kept(chunks[request.next_save]):
            request.next_save += 1
        if request.next_save < stop:
            self._save(request, stop, blocks())

    def finished(self, request_id: RequestId) -> bool:
        """The engine is done with the request.

        Returns:
            Whether its blocks must stay until a worker reports the request as sent: a save
            reads them. Never while a load writes them (the load's own end frees them).
        """
        request = self._requests.pop(request_id, None)
        if request is None or not request.save_jobs or request.phase is Phase.LOADING:
            # Saves of a request that loads are of blocks it had before it was preempted.
            return False
        self._holds.append(Hold(request_id, tuple(sorted(request.save_jobs))))
        self._holding.update(request.save_jobs)
        return True

    def preempted(self, request_id: RequestId) -> None:
        """The engine took the request's blocks: copies from them stop before it overwrites."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._fences.extend(sorted(request.save_jobs))
        if request.phase is not Phase.LOADING:
            request.phase = Phase.NEW

    def promised_by_tier(self, request_id: RequestId) -> dict[Tier, int]:
        """Tokens that the request's load in flight brings, by the tier they come from."""
        tokens = dict.fromkeys(Tier, 0)
        request = self._requests.get(request_id)
        for run in self._load_runs.values():
            if run.request is request:
                for item in run.items:
                    tokens[item.source] += self._tokens_of(item)
        return tokens

    def forget_all(self) -> bool:
        """Drop everything that no job uses; whether nothing is left. Files go with the next step."""
        self._unwritten.clear()
        return self.directory.forget_all()

    def is_saving(self, request_id: RequestId) -> bool:
        """Whether a copy out of the request's blocks is in flight."""
        request = self._requests.get(request_id)
        return request is not None and bool(request.save_jobs)

    @property
    def saves_in_flight(self) -> bool:
        """Whether any copy out of blocks is in flight."""
        return bool(self._save_runs)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of finished requests will come free when saves in flight end."""
        return bool(self._holding)

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """The request's phase, or None if it is not known (any more)."""
        request = self._requests.get(request_id)
        return request.phase if request is not None else None

    # ---- orders to the workers ---------------------------------------------------------

    def step(self) -> WorkOrder:
        """Everything that every rank is to do now; each order is given once."""
        self._refresh_disk()
        self._expire_loads()
        writes = self._next_writes()
        order = WorkOrder(
            removes=self.directory.take_removes(),
            saves=tuple(self._saves),
            loads=tuple(self._loads),
            writes=writes,
            fences=tuple(self._fences),
            abandons=tuple(self._abandons),
            holds=tuple(self._holds),
        )
        for pending in (self._saves, self._loads, self._fences, self._abandons, self._holds):
            pending.clear()
        return order

    # ---- reports from the workers ------------------------------------------------------

    def report(self, report: Report) -> None:
        """Take in what ended on one rank. A late report changes nothing."""
        for save in report.saves:
            self._save_reported(report, save)
        written: dict[int, tuple[Sequence[ChunkId], int]] = {}
        for write in report.writes:
            run = self._write_reported(report, write)
            if run is not None:
                _, stop = written.get(id(run.chunks), (run.chunks, 0))
                written[id(run.chunks)] = (run.chunks, max(stop, write.ref.index + 1))
        for chunks, stop in written.values():
            # Writes end first chunk first; eviction wants the first chunk to be the most recent.
            self.directory.touch_prefix(chunks, stop)
        for load in report.loads:
            self._load_reported(report, load)
        for group, slot in report.freed:
            self._slot_freed(group, slot)

    def _load_reported(self, report: Report, load: LoadReport) -> None:
        run = self._load_runs.get(load.job)
        if run is None or report.rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return
        run.waiting.discard(report.rank)
        run.refused = run.refused or load.refused
        for failed in load.failed:
            run.faults[failed.item] = failed.fault
        for place in load.busy:
            run.busy[place] = run.busy.get(place, 0) + 1
        if not run.waiting:
            self._end_load(load.job, run)

    def _save_reported(self, report: Report, save: SaveReport) -> None:
        run = self._save_runs.get(save.job)
        if run is None or report.rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return
        run.waiting.discard(report.rank)
        run.failed.update(failed.item for failed in save.failed)
        if not run.waiting:
            self._end_save(save.job, run)

    def _write_reported(self, report: Report, write: WriteReport) -> WriteRun | None:
        """Note one rank's write; the run if it is now on disk on every rank."""
        key = (write.ref.group, write.ref.chunk)
        run = self._write_runs.get(key)
        if run is None or report.rank not in run.waiting:
            self._recorder.count(Metric.LATE_REPORTS)
            return None
        run.waiting.discard(report.rank)
        run.stored = run.stored and write.stored
        if run.waiting:
            return None
        del self._write_runs[key]
        if not run.stored:
            self.directory.disk_failed(write.ref)
            self._recorder.count(Metric.DISK_WRITE_FAILED)
            return None
        self.directory.disk_filled(write.ref)
        self._recorder.count(Metric.DISK_WRITES)
        return run

    def _slot_freed(self, group: GroupId, slot: Slot) -> None:
        for run in self._load_runs.values():
            left = run.busy.get((group, slot))
            if left:
                run.busy[group, slot] = left - 1
                return
        self.directory.slot_freed(group, slot)

    # ---- loads -------------------------------------------------------------------------

    def _load_items(self, request: TrackedRequest, blocks: BlockTables, stop: int) -> tuple[LoadItem, ...]:
        """Orders for the chunks from the floor to chunk ``stop``, or () if one is gone."""
        start = request.floor // self._limits.chunk_tokens
        refs = [
            self._ref(request, group, index)
            for index in range(start, stop)
            for group in self.directory.group_ids
        ]
        tiers = [self.directory.tier_of(ref) for ref in refs]
        if None in tiers or not self._blocks_reach(blocks, stop):
            return ()
        items = []
        for ref, tier in zip(refs, tiers, strict=True):
            if tier is Tier.ARENA:
                slot = self.directory.slot_of(ref)
            else:
                slot = self.directory.reserve_arena(ref, promoting=True)
            block_tokens = self._limits.block_tokens[ref.group]
            skip = max(0, (request.floor - ref.index * self._limits.chunk_tokens) // block_tokens)
            items.append(LoadItem(ref, tier or Tier.ARENA, slot, self._chunk_blocks(blocks, ref), skip))
        return tuple(items)

    def _end_load(self, job: JobId, run: LoadRun) -> None:
        del self._load_runs[job]
        self._ledger.ended(job)
        request, directory = run.request, self.directory
        failed = bool(run.faults) or run.refused or not run.items
        directory.unpin(run.pinned)
        loaded = {Tier.ARENA: 0, Tier.DISK: 0}
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
            if fault is Fault.TIMEOUT and item.source is Tier.DISK:
                self._degrade_disk()
            if fault is not None and fault is not Fault.CANCELLED:
                request.denied.add(item.ref.chunk)
            loaded[item.source] += self._tokens_of(item)
        if failed:
            # With no item to blame, none of them is promised to this request again.
            if not set(run.faults.values()) - {Fault.CANCELLED}:
                chunk_tokens = self._limits.chunk_tokens
                first, stop = request.floor // chunk_tokens, -(-request.boundary // chunk_tokens)
                request.denied.update(request.chunks[first:stop])
            self._load_failed(job, run)
        else:
            directory.touch_prefix(request.chunks, request.boundary // self._limits.chunk_tokens)
            self._recorder.count(Metric.LOADED_TOKENS_ARENA, loaded[Tier.ARENA])
            self._recorder.count(Metric.LOADED_TOKENS_DISK, loaded[Tier.DISK])
        if request.phase is Phase.LOADING:
            request.phase = Phase.FAILED if failed else Phase.LOADED

    def _load_failed(self, job: JobId, run: LoadRun) -> None:
        request = run.request
        tokens = request.boundary - request.floor
        self._recorder.count(Metric.LOAD_FAILED)
        self._recorder.count(Metric.LOAD_FAILED_TOKENS, tokens)
        faults = sorted({fault.value for fault in run.faults.values()}) or ["refused"]
        if Fault.TIMEOUT.value in faults:
            self._recorder.count(Metric.LOAD_TIMEOUTS)
        logger.error(
            "kvstow: load %d of request %s failed (%s): %d of %d frames, %d tokens from token %d; "
            "the request recomputes them",
            job,
            request.request_id,
            ", ".join(faults),
            len(run.faults),
            len(run.items),
            tokens,
            request.floor,
        )

    def _expire_loads(self) -> None:
        for job in self._ledger.expired():
            run = self._load_runs[job]
            if not run.abandoned:
                run.abandoned = True
                self._abandons.append(job)
                self._ledger.restart(job)
                continue
            # No rank that is alive keeps silent for two bounds. Its reads may still land in
            # the slots, so those are never used again.
            silent = len(run.waiting)
            for item in run.items:
                if item.source is Tier.DISK and item.slot != NO_SLOT:
                    place = (item.ref.group, item.slot)
                    run.busy[place] = run.busy.get(place, 0) + silent
            run.faults.update(dict.fromkeys(range(len(run.items)), Fault.TIMEOUT))
            run.refused = True
            self._end_load(job, run)

    def _refresh_disk(self) -> None:
        usable = self._clock.monotonic_s() >= self._disk_degraded_until_s
        if usable is not self.directory.disk_usable:
            self.directory.disk_usable = usable
            self._recorder.gauge(Metric.DISK_DEGRADED, float(not usable))

    def _degrade_disk(self) -> None:
        self._disk_degraded_until_s = self._clock.monotonic_s() + self._limits.disk_cooldown_s
        self._refresh_disk()

    # ---- saves and writes --------------------------------------------------------------

    def _save(self, request: TrackedRequest, stop: int, blocks: BlockTables) -> None:
        items: list[SaveItem] = []
        groups = self.directory.group_ids
        index = request.next_save
        while index < stop and self._saving_chunks < self._limits.pending_saves_max:
            if not self.directory.is_kept(request.chunks[index]):
                if not self._blocks_reach(blocks, index + 1):
                    break
                refs = [self._ref(request, group, index) for group in groups]
                slots = [self.directory.reserve_arena(ref) for ref in refs]
                if NO_SLOT in slots:
                    for ref, slot in zip(refs, slots, strict=True):
                        if slot != NO_SLOT:
                            self.directory.arena_failed(ref)
                    self._recorder.count(Metric.SAVE_SKIPPED_NO_SPACE)
                    break
                for ref, slot in zip(refs, slots, strict=True):
                    # Pinned while it fills: eviction must not take its parents before it.
                    write = self._begin_write(ref, request.chunks)
                    items.append(SaveItem(ref, slot, self._chunk_blocks(blocks, ref), write))
                self._saving_chunks += 1
            index += 1
        request.next_save = index
        if not items:
            return
        job = self._new_job()
        pinned = self.directory.pin_prefix(request.chunks, index)
        run = SaveRun(request, tuple(items), pinned, index, self.directory.world_size)
        self._save_runs[job] = run
        request.save_jobs.add(job)
        self._saves.append(SaveJob(job, request.request_id, run.items))

    def _end_save(self, job: JobId, run: SaveRun) -> None:
        del self._save_runs[job]
        request = run.request
        request.save_jobs.discard(job)
        self._holding.discard(job)
        self._saving_chunks -= len({item.ref.chunk for item in run.items})
        self.directory.unpin(run.pinned)
        for index, item in enumerate(run.items):
            if index in run.failed:
                self.directory.arena_failed(item.ref)
                request.next_save = min(request.next_save, item.ref.index)
                self._recorder.count(Metric.SAVE_CANCELLED)
            else:
                self.directory.arena_filled(item.ref)
                self._recorder.count(Metric.SAVES)
        self.directory.touch_prefix(request.chunks, run.stop)

    def _begin_write(self, ref: ChunkRef, chunks: Sequence[ChunkId]) -> bool:
        """Reserve a place on disk for ``ref`` if one more write may be in flight."""
        if len(self._write_runs) >= self._writes_max:
            if self._writes_max:
                if len(self._unwritten) == self._unwritten.maxlen:
                    self._recorder.count(Metric.DISK_WRITE_SKIPPED)
                self._unwritten.append((ref, chunks))
            return False
        if not self.directory.reserve_disk(ref):
            return False
        self._write_runs[ref.group, ref.chunk] = WriteRun(chunks, self.directory.world_size)
        return True

    def _next_writes(self) -> tuple[WriteItem, ...]:
        """Frames whose write had to wait, now that others have ended."""
        items = []
        for _ in range(len(self._unwritten)):
            if len(self._write_runs) >= self._writes_max:
                break
            ref, chunks = self._unwritten.popleft()
            if self.directory.tier_of(ref) is Tier.ARENA and self._begin_write(ref, chunks):
                items.append(WriteItem(ref, self.directory.slot_of(ref)))
        return tuple(items)

    # ---- small things ------------------------------------------------------------------

    def _tracked(self, request_id: RequestId, chunks: Sequence[ChunkId]) -> TrackedRequest:
        request = self._requests.get(request_id)
        if request is None:
            self._generations += 1
            request = TrackedRequest(request_id, self._generations)
            self._requests[request_id] = request
        if chunks:
            request.chunks = chunks
        return request

    def _tokens_of(self, item: LoadItem) -> int:
        """Tokens an item brings; a chunk's frames in further groups are the same tokens."""
        if item.ref.group != self.directory.group_ids[0]:
            return 0
        return self._limits.chunk_tokens - item.skip_blocks * self._limits.block_tokens[item.ref.group]

    def _new_job(self) -> JobId:
        self._next_job += 1
        return JobId(self._next_job)

    def _ref(self, request: TrackedRequest, group: GroupId, index: int) -> ChunkRef:
        parent = request.chunks[index - 1] if index else ROOT_CHUNK
        return ChunkRef(group, index, request.chunks[index], parent)

    def _chunk_blocks(self, blocks: BlockTables, ref: ChunkRef) -> tuple[BlockId, ...]:
        per_chunk = self._limits.chunk_tokens // self._limits.block_tokens[ref.group]
        return tuple(blocks[ref.group][ref.index * per_chunk : (ref.index + 1) * per_chunk])

    def _blocks_reach(self, blocks: BlockTables, stop: int) -> bool:
        """Whether every group's table covers the first ``stop`` chunks."""
        return len(blocks) == len(self._limits.block_tokens) and all(
            len(table) * tokens >= stop * self._limits.chunk_tokens
            for table, tokens in zip(blocks, self._limits.block_tokens, strict=True)
        )
