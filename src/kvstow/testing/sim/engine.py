"""The fake engine: schedules, allocates, preempts and believes, as the real ones do.

One object in the scheduler's process. It calls the planner as an engine adapter does, sends a
`Step` to every rank, and takes in what the ranks answer. Its rules are switches (`EngineRules`):
with some it behaves as vLLM, with others as an engine with its own hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec

from kvstow.layout.geometry import BlockId, GroupKind
from kvstow.lifecycle.messages import ImageOffer, Report, RequestId, WorkOrder
from kvstow.lifecycle.planner import Planner
from kvstow.lifecycle.requests import Lookup
from kvstow.testing.sim.allocation import Allocator, FrozenTables, frozen
from kvstow.testing.sim.model import SimModel
from kvstow.testing.sim.requests import Prompt, RequestState, SimRequest


class EngineRules(msgspec.Struct, frozen=True):
    """How an engine behaves.

    Attributes:
        num_blocks: blocks on every rank.
        step_tokens: tokens that one step computes at most.
        running_max: requests that run at once.
        steps_ahead: steps scheduled before the results of the first are known.
        ignored_promises: share of promises that the engine does not take up.
        requeries_after_failure: a failed load gives all blocks back and asks again (vLLM);
            otherwise the request goes on from its floor.
        caches_prefixes: whether it has a prefix cache of its own.
    """

    num_blocks: int
    step_tokens: int
    running_max: int
    steps_ahead: int
    ignored_promises: float
    requeries_after_failure: bool
    caches_prefixes: bool


class Work(msgspec.Struct, frozen=True):
    """Tokens [first, stop) of one request, to be computed in one step, in these blocks."""

    request: SimRequest
    tables: FrozenTables
    first: int
    stop: int
    says_token: bool


class Promise(msgspec.Struct, frozen=True):
    """Tokens [floor, boundary) that the planner said it would load, and where to."""

    request: SimRequest
    tables: FrozenTables
    floor: int
    boundary: int


class Step(msgspec.Struct, frozen=True):
    """What every rank does at once."""

    number: int
    order: WorkOrder
    work: tuple[Work, ...]
    promises: tuple[Promise, ...]
    fresh: tuple[BlockId, ...]


class StepAnswer(msgspec.Struct, frozen=True):
    """What one rank says after a step. ``said``: the next token by serial of the request."""

    rank: int
    reports: tuple[Report, ...]
    loads: tuple[tuple[RequestId, bool], ...]
    sent: tuple[RequestId, ...]
    said: dict[int, int]


class Listener:
    """Told what the engine does. Override what is of interest."""

    def promising(self) -> None:
        """A promise was made; the blocks are there, and the planner is about to be told."""

    def loaded(self, promise: Promise) -> None:
        """All of ``promise`` is in its blocks, says the engine."""


class FakeEngine:
    """See the module.

    Args:
        model: groups and chunk.
        rules: switches.
        ranks: how many answers make a result.
        planner: the planner under test, or None to run without kvstow.
        rng: decides what `rules` leaves open.
        listener: told what the engine does.
    """

    def __init__(
        self,
        model: SimModel,
        rules: EngineRules,
        ranks: int,
        planner: Planner | None,
        rng: Random,
        listener: Listener,
    ) -> None:
        self.model = model
        self.rules = rules
        self.planner = planner
        self.allocator = Allocator(model, rules.num_blocks)
        self.requests: dict[RequestId, SimRequest] = {}
        self.promises: dict[RequestId, Promise] = {}
        self.finished: list[SimRequest] = []
        self.in_flight: list[Step] = []
        self.counts: Counter[str] = Counter()
        self._ranks = ranks
        self._rng = rng
        self._listener = listener
        self._waiting: list[SimRequest] = []
        self._running: list[SimRequest] = []
        self._held: dict[RequestId, SimRequest] = {}
        self._ended: dict[RequestId, set[int]] = {}
        self._failed: set[RequestId] = set()
        self._sent: dict[RequestId, set[int]] = {}
        self._serial = 0
        self._number = 0

    # ---- clients -----------------------------------------------------------------------

    def add(self, request_id: RequestId, prompt: Prompt, outputs_max: int) -> SimRequest:
        """A request arrives; its id is free (see `is_known`)."""
        self._serial += 1
        request = SimRequest(request_id, self._serial, prompt, outputs_max, self.model.chunk_tokens)
        self.requests[request_id] = request
        self._waiting.append(request)
        return request

    def abort(self, request_id: RequestId) -> None:
        """The client went away."""
        request = self.requests[request_id]
        self.counts["aborted while " + request.state.value] += 1
        self._end(request)

    def is_known(self, request_id: RequestId) -> bool:
        """Whether the engine still has something of the id: a request, a load, or held blocks."""
        return request_id in self.requests or request_id in self.promises or request_id in self._held

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do, and no block is kept for somebody."""
        return not (self.requests or self.promises or self._held or self.in_flight)

    @property
    def can_schedule(self) -> bool:
        """Whether one more step may be sent before an answer is in."""
        return len(self.in_flight) <= self.rules.steps_ahead

    # ---- a step ------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide what the next step does, and take the planner's orders."""
        self._number += 1
        work: list[Work] = []
        promises: list[Promise] = []
        preempted: list[SimRequest] = []
        left = self._schedule_running(work, preempted)
        if not preempted:
            self._admit(work, promises, preempted, left)
        order = WorkOrder()
        if self.planner is not None:
            for request in preempted:
                self.planner.preempted(request.request_id)
            for item in work:
                self._note_work(item)
            order = self.planner.step()
        step = Step(
            self._number, order, tuple(work), tuple(promises), tuple(self.allocator.pool.take_fresh())
        )
        self.in_flight.append(step)
        return step

    def absorb(self, answers: Sequence[StepAnswer]) -> None:
        """Every rank has done the oldest step: what it computed, loaded and sent."""
        step = self.in_flight.pop(0)
        said = answers[0].said
        for item in step.work:
            request = item.request
            if request.state is not RequestState.RUNNING or not item.says_token:
                continue
            if request.serial not in said or not request.asked:
                continue
            request.asked = False
            request.extend([said[request.serial]])
            if request.num_outputs >= request.outputs_max:
                self.finished.append(request)
                self._end(request)
        for answer in answers:
            for request_id, loaded in answer.loads:
                self._load_ended(answer.rank, request_id, loaded)
            for request_id in answer.sent:
                self._blocks_sent(answer.rank, request_id)

    # ---- running -----------------------------------------------------------------------

    def _schedule_running(self, work: list[Work], preempted: list[SimRequest]) -> int:
        left = self.rules.step_tokens
        for request in list(self._running):
            if request not in self._running or request.asked:
                continue
            stop = self._stop_of(request, left)
            if stop <= request.computed:
                continue
            while not self.allocator.allocate(request, stop):
                victim = self._victim()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            if request in self._running:
                left -= stop - request.computed
                work.append(self._run(request, stop))
        # A victim may have been given work before it was chosen: that work is not done.
        work[:] = [item for item in work if item.request in self._running]
        return left

    def _admit(
        self, work: list[Work], promises: list[Promise], preempted: list[SimRequest], left: int
    ) -> None:
        for request in list(self._waiting):
            if left <= 0 or len(self._running) >= self.rules.running_max:
                return
            if request.state is RequestState.WAITING and not request.tables:
                promised = self._start(request)
                if promised is None:
                    continue
                if promised:
                    promise = self._promise(request, promised)
                    if promise is None:
                        return
                    promises.append(promise)
                    continue
            stop = self._stop_of(request, left)
            if stop <= request.computed or not self.allocator.allocate(request, stop):
                self._unstart(request)
                self._unlock(request, preempted)
                return
            if self.planner is not None:
                self.planner.allocated(request.request_id, (), 0)
            self._waiting.remove(request)
            self._running.append(request)
            request.state = RequestState.RUNNING
            left -= stop - request.computed
            work.append(self._run(request, stop))

    def _start(self, request: SimRequest) -> int | None:
        """Take the engine's own hit; how many tokens are promised beyond it, None to wait."""
        hit = self.allocator.find_hit(request) if self.rules.caches_prefixes else 0
        promised = 0
        if self.planner is not None and request.requery:
            match = self.planner.match(request.request_id, request.chain.ids, len(request.tokens), hit)
            if match.lookup is Lookup.PENDING:
                self.counts["pending"] += 1
                return None
            promised = match.tokens
            if promised and self._rng.random() < self.rules.ignored_promises:
                self.counts["ignored promises"] += 1
                promised = 0
        self.allocator.take_hit(request, hit)
        self.counts["own hits"] += bool(hit)
        return promised

    def _unstart(self, request: SimRequest) -> None:
        """It does not fit now; a request whose tokens are loaded keeps its blocks."""
        if request.state is RequestState.WAITING:
            self.allocator.give_back(request)

    def _unlock(self, head: SimRequest, preempted: list[SimRequest]) -> None:
        """Requests that hold loaded tokens while nothing runs would wait for each other for ever."""
        if self._running or self.promises or self._held:
            return
        others = [
            request
            for request in self._waiting
            if request.state is RequestState.LOADED and request is not head
        ]
        if others:
            self._preempt(others[-1])
            preempted.append(others[-1])

    def _promise(self, request: SimRequest, promised: int) -> Promise | None:
        assert self.planner is not None
        floor = request.computed
        if not self.allocator.allocate(request, floor + promised, loads_from=floor):
            self._unstart(request)
            return None
        promise = Promise(request, frozen(request.tables), floor, floor + promised)
        self._listener.promising()
        self.planner.allocated(request.request_id, promise.tables, promised)
        request.state = RequestState.LOADING
        self._waiting.remove(request)
        self.promises[request.request_id] = promise
        self.counts["promises"] += 1
        self.counts["promised tokens"] += promised
        return promise

    def _run(self, request: SimRequest, stop: int) -> Work:
        first, request.computed = request.computed, stop
        says_token = stop == len(request.tokens)
        request.asked = says_token
        if self.rules.caches_prefixes:
            self.allocator.cache(request, stop)
        return Work(request, frozen(request.tables), first, stop, says_token)

    def _stop_of(self, request: SimRequest, left: int) -> int:
        """How far the request's prefill may go in this step; images are taken where one ends."""
        known = len(request.tokens)
        stop = min(known, request.computed + left)
        grid = self.model.state_tokens
        if grid:
            last = stop // grid * grid
            if last > request.computed:
                return last
        return stop

    def _victim(self) -> SimRequest:
        """Who gives up its blocks: one that waits with loaded tokens, or else the youngest that runs."""
        loaded = [request for request in self._waiting if request.state is RequestState.LOADED]
        return loaded[-1] if loaded else self._running[-1]

    def _preempt(self, request: SimRequest) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._waiting.insert(0, request)
        self.counts["preempted while " + request.state.value] += 1
        request.state = RequestState.WAITING
        request.asked = False
        request.requery = True
        self.allocator.give_back(request)

    def _note_work(self, item: Work) -> None:
        """Tell the planner what is final, and what this step is going to leave behind."""
        assert self.planner is not None
        request = item.request
        self.planner.progress(request.request_id, request.chain.ids, item.first, lambda: item.tables)
        images = []
        for group, spec in self.allocator.groups:
            if spec.kind is GroupKind.STATE and item.stop % spec.block_tokens == 0:
                block = item.tables[group][item.stop // spec.block_tokens - 1]
                images.append(ImageOffer(group, item.stop, block))
        self.planner.snapshot(request.request_id, request.chain.ids, item.stop, lambda: item.tables, images)

    # ---- ends --------------------------------------------------------------------------

    def _end(self, request: SimRequest) -> None:
        was, request.state = request.state, RequestState.GONE
        del self.requests[request.request_id]
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._running:
            self._running.remove(request)
        holds = False
        if self.planner is not None:
            if was is RequestState.RUNNING:
                tables = frozen(request.tables)
                self.planner.progress(request.request_id, request.chain.ids, request.computed, lambda: tables)
            holds = self.planner.finished(request.request_id)
        if was is RequestState.LOADING:
            if holds:
                raise AssertionError(f"{request}: blocks are held for a save while a load writes them")
            return  # its blocks come back when the load has ended on every rank
        if holds:
            self._held[request.request_id] = request
            self.counts["held"] += 1
        else:
            self.allocator.give_back(request)

    def _load_ended(self, rank: int, request_id: RequestId, loaded: bool) -> None:
        promise = self.promises.get(request_id)
        ended = self._ended.setdefault(request_id, set())
        if promise is None or rank in ended:
            raise AssertionError(f"rank {rank} ends a load of {request_id}, which has no promise open there")
        ended.add(rank)
        if not loaded:
            self._failed.add(request_id)
        if len(ended) < self._ranks:
            return
        del self.promises[request_id], self._ended[request_id]
        failed = request_id in self._failed
        self._failed.discard(request_id)
        request = promise.request
        self.counts["loads failed" if failed else "loads"] += 1
        if request.state is RequestState.GONE:
            self.allocator.give_back(request)
            return
        self._waiting.insert(0, request)
        if failed:
            self._after_failure(request, promise)
            return
        request.state = RequestState.LOADED
        request.computed = promise.boundary
        self.counts["loaded tokens"] += promise.boundary - promise.floor
        self._listener.loaded(promise)
        if self.rules.caches_prefixes:
            self.allocator.cache(request, promise.boundary)

    def _after_failure(self, request: SimRequest, promise: Promise) -> None:
        if self.rules.requeries_after_failure:
            request.state = RequestState.WAITING
            self.allocator.give_back(request)
            return
        # Goes on from its floor: blocks beyond it are given back, those below it are good.
        request.state = RequestState.LOADED
        request.requery = False
        self.allocator.cut(request, promise.floor)

    def _blocks_sent(self, rank: int, request_id: RequestId) -> None:
        sent = self._sent.setdefault(request_id, set())
        if request_id not in self._held or rank in sent:
            raise AssertionError(f"rank {rank} says that {request_id} is sent, which is not held there")
        sent.add(rank)
        if len(sent) == self._ranks:
            del self._sent[request_id]
            self.allocator.give_back(self._held.pop(request_id))
