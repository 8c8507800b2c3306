"""Decides what is promised, loaded, saved and written; does nothing itself.

Events come in (match, allocated, progress, snapshot, finished, preempted, report), orders go out
(`Planner.step`). No thread, no I/O, an injected clock; it lives on the scheduler's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvstow.clock import Clock
from kvstow.errors import ConfigError
from kvstow.keys.ids import ChunkId
from kvstow.lifecycle.delivery import Inbox
from kvstow.lifecycle.directory import Directory
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.loading import LoadPlanner
from kvstow.lifecycle.messages import Hello, Hold, ImageOffer, JobId, Report, RequestId, Tier, WorkOrder
from kvstow.lifecycle.requests import Match, Phase, TrackedRequest
from kvstow.lifecycle.saving import SavePlanner
from kvstow.lifecycle.snapshots import SnapshotPlanner
from kvstow.lifecycle.writing import WritePlanner
from kvstow.metrics import Metric, Recorder


class Planner:
    """The request life of docs/design section 5 for one engine.

    Args:
        limits: what it may do.
        clock: monotonic time.
        recorder: counts what happens.
    """

    def __init__(self, limits: PlannerLimits, clock: Clock, recorder: Recorder) -> None:
        self._limits = limits
        self._recorder = recorder
        self.directory = Directory(recorder)
        jobs = itertools.count(1)
        self._loads = LoadPlanner(limits, self.directory, clock, recorder, jobs)
        self._writes = WritePlanner(limits, self.directory, clock, recorder, jobs)
        self._saves = SavePlanner(limits, self.directory, self._writes, recorder, jobs)
        self._snapshots = SnapshotPlanner(limits, self.directory, self._writes, recorder, jobs)
        self._requests: dict[RequestId, TrackedRequest] = {}
        self._generations = 0
        self._fences: list[JobId] = []
        self._holds: list[Hold] = []
        self._holding: set[JobId] = set()
        self._inbox = Inbox()

    def open(self, hellos: Sequence[Hello]) -> None:
        """Start with what every rank said; raises ConfigError if they disagree, or with the limits."""
        self.directory.open(hellos)
        first = hellos[0]
        if (first.chunk_tokens, first.rules) != (self._limits.chunk_tokens, self._limits.rules):
            raise ConfigError(
                f"the ranks keep chunks of {first.chunk_tokens} tokens by {first.rules}, the scheduler plans "
                f"{self._limits.chunk_tokens} by {self._limits.rules}; start all with one configuration"
            )
        self._writes.open()
        self._inbox.open(len(hellos))

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
        return self._loads.match(self._tracked(request_id, chunks), num_tokens, computed)

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
        self._loads.allocate(request, blocks, promised)

    def progress(
        self,
        request_id: RequestId,
        chunks: Sequence[ChunkId],
        computed: int,
        blocks: Callable[[], BlockTables],
    ) -> None:
        """``computed`` tokens of the request are in its blocks and final: save what is not kept.

        Of PAGED groups only: what the others hold is gone by then, see `snapshot`.

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
        if self._saves.find_unsaved(request, computed):
            self._saves.save(request, computed, blocks())

    def snapshot(
        self,
        request_id: RequestId,
        chunks: Sequence[ChunkId],
        computed: int,
        blocks: Callable[[], BlockTables],
        images: Sequence[ImageOffer] = (),
    ) -> None:
        """This step's forward leaves ``computed`` final tokens in the request's blocks.

        Orders copies, in the same step, of what the engine may not have any more in the next: the
        WINDOW chunks that end by then, and the images offered. To be called between the events
        of a scheduling pass and its `step`.

        Args:
            request_id: the engine's id.
            chunks: ids of all whole chunks of the known tokens.
            computed: tokens that are computed when the forward has run.
            blocks: gives the block tables; called only when a window chunk is to be saved.
            images: the states that the forward leaves in blocks. One that is not at the end of
                a chunk cannot be named, and is counted and not kept.
        """
        if not self._limits.saves or not self.directory.is_open:
            return
        request = self._tracked(request_id, chunks)
        if request.phase is not Phase.LOADING:
            self._snapshots.snapshot(request, computed, blocks, images)

    def finished(self, request_id: RequestId) -> bool:
        """The engine is done with the request.

        Returns:
            Whether its blocks must stay until a worker reports the request as sent: a save
            reads them. Never while a load writes them (the load's own end frees them), and
            never for a snapshot: one that is not ordered yet is dropped.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._snapshots.drop_orders(request)
        self.directory.retire(request.chunks)
        if not request.save_jobs or request.phase is Phase.LOADING:
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
        # A fence stops a copy that a worker knows of. One that it does not know yet would be
        # of whatever the engine puts there next.
        self._saves.drop_orders(request)
        self._snapshots.drop_orders(request)
        request.next_window.clear()
        self._fences.extend(sorted(request.save_jobs))
        if request.phase is not Phase.LOADING:
            request.phase = Phase.NEW

    def promised_by_tier(self, request_id: RequestId) -> dict[Tier, int]:
        """Tokens that the request's load in flight brings, by the tier they come from."""
        request = self._requests.get(request_id)
        return self._loads.promised_by_tier(request) if request is not None else {}

    def forget_all(self) -> bool:
        """Drop everything that no job uses; whether nothing is left. Files go with the next step."""
        self._writes.forget_waiting()
        return self.directory.forget_all()

    def is_saving(self, request_id: RequestId) -> bool:
        """Whether a copy out of the request's blocks is in flight."""
        request = self._requests.get(request_id)
        return request is not None and bool(request.save_jobs)

    @property
    def saves_in_flight(self) -> bool:
        """Whether any copy out of blocks that must stay for it is in flight."""
        return self._saves.in_flight

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of finished requests will come free when saves in flight end."""
        return bool(self._holding)

    @property
    def wants_steps(self) -> bool:
        """Whether steps are needed though no request is: frames wait to be ordered to disk."""
        return self._writes.has_waiting

    def phase_of(self, request_id: RequestId) -> Phase | None:
        """The request's phase, or None if it is not known (any more)."""
        request = self._requests.get(request_id)
        return request.phase if request is not None else None

    # ---- orders to the workers ---------------------------------------------------------

    def step(self) -> WorkOrder:
        """Everything that every rank is to do now; each order is given once."""
        self._loads.refresh_disk()
        # Before the removals are taken: all of these may order some.
        self._loads.end_silent()
        writes = self._writes.take()
        saves, snapshots = self._saves.take_orders(), self._snapshots.take_orders()
        order = WorkOrder(
            removes=self.directory.take_removes(),
            saves=saves,
            snapshots=snapshots,
            loads=self._loads.take_orders(),
            writes=writes,
            fences=tuple(self._fences),
            holds=tuple(self._holds),
            acknowledged=self._inbox.acknowledgements(),
        )
        self._fences.clear()
        self._holds.clear()
        return order

    # ---- reports from the workers ------------------------------------------------------

    def report(self, report: Report) -> None:
        """Take in what ended on one rank. One that comes twice, late or too early changes nothing."""
        if not self._inbox.take(report):
            self._recorder.count(Metric.LATE_REPORTS)
            return
        self._loads.heard(report.rank)
        for save in report.saves:
            if save.job in self._snapshots:
                self._snapshots.reported(report.rank, save)
            elif self._saves.reported(report.rank, save):
                self._holding.discard(save.job)
        self._writes.reported(report.rank, report.writes)
        for load in report.loads:
            self._loads.reported(report.rank, load)
        for group, slot in report.freed:
            self._loads.slot_freed(group, slot)

    # ---- inside ------------------------------------------------------------------------

    def _tracked(self, request_id: RequestId, chunks: Sequence[ChunkId]) -> TrackedRequest:
        request = self._requests.get(request_id)
        if request is None:
            self._generations += 1
            request = TrackedRequest(request_id, self._generations)
            self._requests[request_id] = request
        if chunks:
            request.chunks = chunks
        return request
