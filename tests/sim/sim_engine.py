"""The fake engine as a subject of the engine contract: everybody takes turns, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from lockstep import scenario_of

from kvstow.clock import ManualClock
from kvstow.layout.geometry import BlockId, GroupKind
from kvstow.lifecycle.messages import RequestId
from kvstow.stores.base import FrameName
from kvstow.testing.engine_under_test import Answer, Tokens, damage_frames_under
from kvstow.testing.faulty_store import StoreFault, StoreOperation
from kvstow.testing.sim.engine import Promise, Work
from kvstow.testing.sim.expected import Expected
from kvstow.testing.sim.life import Life
from kvstow.testing.sim.model import SimGroup
from kvstow.testing.sim.rank import SimRank
from kvstow.testing.sim.requests import Prompt, RequestState, SimRequest
from kvstow.testing.sim.scenario import Scenario

TURNS_MAX = 20_000
TURN_S = 0.01
COOL_DOWN_S = 60.0
"""Longer than a disk that failed is left alone."""

GARBAGE = 0xA5
WORDS = range(1000)
LOADERS = frozenset({"loader", "readers"})
SAVERS = frozenset({"saver"})

FRAMES = 120
AT_ONCE = 4
ROOM = 17
"""What the groups that keep every token have room for, in `resume_tokens`: `AT_ONCE` of the contract's
usual prompts, and three of its longest without their answers."""


class Breakable:
    """A source of faults with a switch."""

    def __init__(self) -> None:
        self.broken = False

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        return StoreFault.IO_ERROR if self.broken else None


class WatchedLife(Life):
    """Notes which promise of each request was kept last, by serial."""

    def __init__(self, scenario: Scenario, number: int, root: Path, disk: Breakable, clock: ManualClock):
        self.kept: dict[int, Promise] = {}
        super().__init__(scenario, number, root, disk, clock)

    def loaded(self, promise: Promise) -> None:
        super().loaded(promise)
        self.kept[promise.request.serial] = promise


class SimEngine:
    """A `WatchedLife` after another over one disk, stepped until what is asked for has happened.

    Whatever the contract sees, more is looked at on the way: after every turn all memory is what the
    engine believes, and every answer is the oracle's.

    Args:
        scenario: the world; its faults are not used.
        folder: an empty folder for the disk.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.clock = ManualClock(1000.0)
        self.chunk_tokens = scenario.model.chunk_tokens
        self.vocabulary = WORDS
        self._disk = Breakable()
        self._expected = Expected(scenario)
        self._held: frozenset[str] = frozenset()
        self._lives = 0
        self.life = self.start_life()

    @property
    def resume_tokens(self) -> int:
        """A step's tokens where images are taken: alone, a request's forwards end at its multiples."""
        return self.scenario.rules.step_tokens if self.scenario.model.state_tokens else self.chunk_tokens

    @property
    def room_tokens(self) -> int:
        """By the groups that keep every token; more than there is, where others need blocks too."""
        sizes = [group.block_tokens for group in self.scenario.model.groups if group.kind is GroupKind.PAGED]
        return int(self.scenario.rules.num_blocks / sum(1 / size for size in sizes or [4]))

    @property
    def num_free_blocks(self) -> int:
        return self.life.engine.allocator.pool.num_free

    @property
    def num_preemptions(self) -> int:
        counts = self.life.engine.counts
        return sum(count for what, count in counts.items() if what.startswith("preempted"))

    # ---- requests ----------------------------------------------------------------------

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        request_id = RequestId(name)
        assert not self.life.engine.is_known(request_id)
        request = self.life.engine.add(request_id, Prompt(prompt, salt), outputs)
        self._requests[name] = request

    def abort(self, name: str) -> None:
        self.life.engine.abort(RequestId(name))

    def finish(self, names: Sequence[str]) -> list[Answer]:
        requests = [self._requests[name] for name in names]
        self.turn_until(lambda: all(request.state is RequestState.GONE for request in requests))
        return [self._answer(request) for request in requests]

    def recompute(self, prompt: Tokens, outputs: int, salt: str = "") -> Tokens:
        request = SimRequest(RequestId("oracle"), 0, Prompt(prompt, salt), outputs, self.chunk_tokens)
        request.extend([0] * outputs)  # only their number is looked at
        return tuple(self._expected.outputs_of(request, self.life.ranks[0].memory))

    # ---- the engine's life -------------------------------------------------------------

    def settle(self) -> None:
        self.turn_until(self._is_quiet)

    def forget_own_cache(self) -> None:
        self.settle()
        pool = self.life.engine.allocator.pool
        pool.drop_cache()
        for rank in self.life.ranks:
            rank.memory.forget(BlockId(block) for block in range(pool.num_blocks))
            rank.memory.region[:] = GARBAGE

    def restart(self) -> None:
        self.life.shutdown()
        self.life = self.start_life()

    def kill(self) -> None:
        self.life.kill()
        self.life = self.start_life()

    def start_life(self) -> WatchedLife:
        life = WatchedLife(self.scenario, self._lives, self.folder, self._disk, self.clock)
        self._lives += 1
        self._requests: dict[str, SimRequest] = {}
        self._began: dict[int, int] = {}
        return life

    # ---- abilities ---------------------------------------------------------------------

    @contextmanager
    def hold_loads(self) -> Iterator[None]:
        with self._hold(LOADERS):
            yield

    @contextmanager
    def hold_saves(self) -> Iterator[None]:
        with self._hold(SAVERS):
            yield

    def wait_loading(self, name: str) -> None:
        self.turn_until(lambda: RequestId(name) in self.life.engine.promises)

    def break_disk(self) -> None:
        self._disk.broken = True

    def mend_disk(self) -> None:
        self.settle()
        self._disk.broken = False
        self.clock.advance(COOL_DOWN_S)

    def damage_frames(self) -> int:
        self.settle()
        return damage_frames_under(self.folder)

    # ---- turns -------------------------------------------------------------------------

    def turn_until(self, done: Callable[[], bool]) -> None:
        for _ in range(TURNS_MAX):
            if done():
                return
            self.turn()
        raise AssertionError(f"not there after {TURNS_MAX} turns")

    def turn(self) -> None:
        """A step of the engine on every rank, and all that the threads can do meanwhile."""
        life = self.life
        # Ahead only of requests: with none there would always be a step in flight.
        while not life.engine.in_flight or (life.engine.can_schedule and life.engine.requests):
            for work in life.send().work:
                self._note(work)
        for rank in life.ranks:
            self.do_step(rank)
        self._run_threads()
        for rank in life.ranks:
            assert not rank.memory.wrong(), f"rank {rank.rank}: the engine believes in what is not there"
        self.clock.advance(TURN_S)

    def do_step(self, rank: SimRank) -> None:
        _, answers = self.life.do_step(rank)
        for answer in answers:
            for report in answer.reports:
                self.life.planner.report(report)

    def _run_threads(self) -> None:
        executors = [
            executor
            for rank in self.life.ranks
            for executor in rank.executors
            if executor.name not in self._held
        ]
        while ready := [executor for executor in executors if executor.can_run]:
            for executor in ready:
                executor.run_one()

    def _is_quiet(self) -> bool:
        life = self.life
        directory = life.planner.directory
        return (
            life.engine.is_idle
            and not life.planner.wants_steps
            and not life.planner.saves_in_flight
            and not directory.pins()
            and not directory.filling()
            and all(executor.is_idle for rank in life.ranks for executor in rank.executors)
        )

    @contextmanager
    def _hold(self, executors: frozenset[str]) -> Iterator[None]:
        self._held |= executors
        try:
            yield
        finally:
            self._held -= executors

    # ---- answers -----------------------------------------------------------------------

    def _note(self, work: Work) -> None:
        self._began.setdefault(work.request.serial, work.first)

    def _answer(self, request: SimRequest) -> Answer:
        said = tuple(request.tokens[len(request.prompt.tokens) :])
        assert said == self.recompute(request.prompt.tokens, len(said), request.prompt.salt)
        began = self._began[request.serial]
        promise = self.life.kept.get(request.serial)
        loaded = promise.boundary - promise.floor if promise is not None and promise.boundary == began else 0
        return Answer(said, began - loaded, loaded)


def world_of(
    name: str,
    ranks: int,
    *,
    step_tokens: int = 24,
    steps_ahead: int = 0,
    requeries: bool = True,
    caches: bool = True,
) -> Scenario:
    """A world with room for what a test saves, and few blocks.

    Args:
        name: of `MODELS`.
        ranks: workers.
        step_tokens, steps_ahead, requeries, caches: see `EngineRules`.
    """
    replace = msgspec.structs.replace
    plain = scenario_of(name, ranks)
    groups = plain.model.groups
    resume_tokens = step_tokens if plain.model.state_tokens else plain.model.chunk_tokens
    return replace(
        plain,
        rules=replace(
            plain.rules,
            num_blocks=sum(blocks_of(group, ROOM * resume_tokens, step_tokens) for group in groups),
            step_tokens=step_tokens,
            running_max=AT_ONCE + 2,
            steps_ahead=steps_ahead,
            requeries_after_failure=requeries,
            caches_prefixes=caches,
        ),
        limits=replace(
            plain.limits,
            arena_slots=(FRAMES,) * len(groups),
            disk_frames=(10 * FRAMES,) * len(groups),
            load_timeout_s=10.0,
            save_timeout_s=60.0,
        ),
    )


def blocks_of(group: SimGroup, room_tokens: int, step_tokens: int) -> int:
    """A group's share of the blocks: of windows and states as many as requests at once can use."""
    if group.kind is GroupKind.PAGED:
        return room_tokens // group.block_tokens
    # What a window reaches into, what a step adds, and a block that is cut at each end.
    return AT_ONCE * ((group.window_tokens + step_tokens) // group.block_tokens + 2)
