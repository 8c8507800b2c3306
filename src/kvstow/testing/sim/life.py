"""One life of an engine: from its start over whatever lies on disk, to its end in order or by a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from kvstow.clock import ManualClock
from kvstow.keys.ids import NamespaceDigest
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.limits import PlannerLimits
from kvstow.lifecycle.messages import Report, RequestId
from kvstow.lifecycle.planner import Planner
from kvstow.lifecycle.requests import Phase
from kvstow.metrics import Recorder
from kvstow.testing.faulty_store import FaultSource
from kvstow.testing.sim.engine import FakeEngine, Listener, Promise, Step, StepAnswer
from kvstow.testing.sim.rank import RankLimits, SimRank
from kvstow.testing.sim.scenario import Scenario


class Life(Listener):
    """The scheduler's process and its ranks.

    Attributes:
        evicts_between: asked between a lookup and its load: whether everything is evicted there.
        late_reports: on their way for longer than others.

    Args:
        scenario: what is simulated.
        number: how many lives were before.
        root: the disk's folder.
        faults: what the disks do wrong.
        clock: simulated time.
    """

    def __init__(
        self, scenario: Scenario, number: int, root: Path, faults: FaultSource, clock: ManualClock
    ) -> None:
        model = scenario.model
        namespace = NamespaceDigest(hashlib.sha256(msgspec.json.encode((model, scenario.ranks))).digest())
        self.recorder = Recorder()
        # Every other engine whose ranks hold the same bytes keeps them once.
        shares = scenario.ranks > 1 and scenario.seed % 2 == 0
        self.ranks: list[SimRank] = []
        for rank in range(scenario.ranks):
            self.ranks.append(
                SimRank(
                    model,
                    rank,
                    scenario.ranks,
                    scenario.rules.num_blocks,
                    _limits_of(scenario.limits, rank),
                    namespace,
                    root,
                    f"life-{number}",
                    faults,
                    clock,
                    noise=scenario.seed * 1000 + number * 10 + rank,
                    first=self.ranks[0] if rank else None,
                    shares=shares,
                )
            )
        rules = self.ranks[0].hello.rules
        limits = PlannerLimits(
            chunk_tokens=model.chunk_tokens,
            rules=rules,
            loads=True,
            saves=True,
            min_load_tokens=scenario.min_load_tokens,
            load_timeout_s=scenario.limits.load_timeout_s,
            pending_loads_max=scenario.pending_loads_max,
            pending_saves_max=scenario.pending_saves_max,
            pending_writes_max=scenario.pending_writes_max,
            disk_cooldown_s=30.0,
        )
        self.limits = limits
        self.planner = Planner(limits, clock, self.recorder)
        self.planner.open([rank.hello for rank in self.ranks])
        self.engine = FakeEngine(
            model, scenario.rules, scenario.ranks, self.planner, Random(scenario.seed + number), self
        )
        self.late_reports: list[Report] = []
        self.evicts_between: Callable[[], bool] = lambda: False
        self._answers: dict[int, list[StepAnswer]] = {}

    def promising(self) -> None:
        if self.evicts_between():
            self.planner.forget_all()

    def loaded(self, promise: Promise) -> None:
        for rank in self.ranks:
            rank.believe(promise)

    def send(self) -> Step:
        """Schedule a step and send it to every rank."""
        step = self.engine.schedule()
        for rank in self.ranks:
            rank.inbox.append(step)
        return step

    def do_step(self, rank: SimRank) -> tuple[StepAnswer, list[StepAnswer]]:
        """One rank does its oldest step; its answer, and all of them if it was the last to answer."""
        number = rank.inbox[0].number
        answer = rank.do_step()
        answers = self._answers.setdefault(number, [])
        answers.append(answer)
        if len(answers) < len(self.ranks):
            return answer, []
        del self._answers[number]
        answers.sort(key=lambda answer: answer.rank)
        self.engine.absorb(answers)
        return answer, answers

    @property
    def num_slots(self) -> Sequence[int]:
        """Slots of each group that every rank has."""
        groups = range(len(self.limits.rules))
        return [min(rank.hello.arena_slots[group] for rank in self.ranks) for group in groups]

    @property
    def num_frames(self) -> Sequence[int]:
        """Disk places of each group that every rank has."""
        groups = range(len(self.limits.rules))
        return [min(rank.hello.disk_frames[group] for rank in self.ranks) for group in groups]

    def phases(self) -> dict[RequestId, Phase | None]:
        """The planner's phase of every request of the engine."""
        return {request_id: self.planner.phase_of(request_id) for request_id in self.engine.requests}

    def in_use(self) -> tuple[int, ...]:
        """What the directory says is in use: pins, copies being made, slots and places by group."""
        directory = self.planner.directory
        groups = [GroupId(group) for group in range(len(self.limits.rules))]
        return (
            directory.pins(),
            directory.filling(),
            *(directory.arena_in_use(group) for group in groups),
            *(directory.disk_in_use(group) for group in groups),
        )

    def shutdown(self) -> None:
        """Stop in order."""
        for rank in self.ranks:
            rank.shutdown()

    def kill(self) -> None:
        """SIGKILL to every process of the engine."""
        for rank in self.ranks:
            rank.kill()


def _limits_of(limits: RankLimits, rank: int) -> RankLimits:
    """Later ranks are a little poorer: the planner has to go by the poorest."""
    return msgspec.structs.replace(
        limits, arena_slots=tuple(max(1, slots - rank) for slots in limits.arena_slots)
    )
