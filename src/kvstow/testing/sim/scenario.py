"""What a seed means: the model, the engine's rules, the budgets, and which faults may strike.

Every scenario leaves some faults out (swarm testing: Groce et al., 2012): a schedule in which
everything fails all the time never gets far enough to be wrong.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import TypeVar

import msgspec

from kvstow.layout.geometry import GroupKind
from kvstow.testing.faulty_store import StoreFault
from kvstow.testing.sim.engine import EngineRules
from kvstow.testing.sim.model import SimGroup, SimModel
from kvstow.testing.sim.rank import RankLimits

_T = TypeVar("_T")


class SimFault(StrEnum):
    """What goes wrong outside of a store; `StoreFault` names what goes wrong inside."""

    REPORT_LOST = "report_lost"
    REPORT_LATE = "report_late"
    REPORT_TWICE = "report_twice"
    REPORTS_REORDERED = "reports_reordered"
    RANK_DEAD = "rank_dead"
    KILLED = "killed"
    CLOCK_JUMP = "clock_jump"
    SECOND_ENGINE = "second_engine"
    MEMORY_FLIP = "memory_flip"
    FILE_GONE = "file_gone"
    EVICTED_BETWEEN = "evicted_between"


class Scenario(msgspec.Struct, frozen=True):
    """One schedule's world.

    Attributes:
        seed: of everything that is drawn while it runs.
        events: how many events happen before the world comes to rest.
        skip: events (by index) that are left out; a shrunk schedule has some.
        ranks: workers.
        model, rules, limits: what is simulated.
        pending_loads_max, pending_saves_max, pending_writes_max, min_load_tokens: the planner's.
        step_s: how long a step's forward takes at most.
        documents: beginnings that prompts share.
        faults: rate of each fault that may strike, per event.
        store_faults: rate of each fault of the disk, per operation.
        restarts: whether the engine is stopped in order and started anew now and then.
        twins: whether prompts are sent that differ in nothing but an image.
    """

    seed: int
    events: int
    skip: tuple[int, ...]
    ranks: int
    model: SimModel
    rules: EngineRules
    limits: RankLimits
    pending_loads_max: int
    pending_saves_max: int
    pending_writes_max: int
    min_load_tokens: int
    step_s: float
    documents: int
    faults: dict[SimFault, float]
    store_faults: dict[StoreFault, float]
    restarts: bool
    twins: bool = False

    @property
    def is_fault_free(self) -> bool:
        """Whether nothing goes wrong in it."""
        return not self.faults and not self.store_faults


FAULT_RATES: dict[SimFault, float] = {
    SimFault.REPORT_LOST: 0.05,
    SimFault.REPORT_LATE: 0.15,
    SimFault.REPORT_TWICE: 0.15,
    SimFault.REPORTS_REORDERED: 0.3,
    SimFault.RANK_DEAD: 0.005,
    SimFault.KILLED: 0.005,
    SimFault.CLOCK_JUMP: 0.005,
    SimFault.SECOND_ENGINE: 0.005,
    SimFault.MEMORY_FLIP: 0.01,
    SimFault.FILE_GONE: 0.01,
    SimFault.EVICTED_BETWEEN: 0.1,
}
"""How often each strikes where it may: per report, per promise (EVICTED_BETWEEN), else per event."""

STORE_FAULT_RATES: dict[StoreFault, float] = {
    StoreFault.IO_ERROR: 0.05,
    StoreFault.NO_SPACE: 0.05,
    StoreFault.SHORT_WRITE: 0.05,
    StoreFault.TORN_WRITE: 0.05,
    StoreFault.FLIPPED_WRITE: 0.05,
    StoreFault.SHORT_READ: 0.05,
    StoreFault.FLIPPED_READ: 0.05,
    StoreFault.LOST: 0.05,
    StoreFault.SLOW: 0.1,
    StoreFault.HANG: 0.03,
}
"""Per operation that may have it."""

FRAME_FAULTS = frozenset({SimFault.MEMORY_FLIP, SimFault.FILE_GONE})
FRAME_STORE_FAULTS = frozenset(
    {
        StoreFault.IO_ERROR,
        StoreFault.SHORT_WRITE,
        StoreFault.TORN_WRITE,
        StoreFault.FLIPPED_WRITE,
        StoreFault.SHORT_READ,
        StoreFault.FLIPPED_READ,
        StoreFault.LOST,
    }
)
"""After these a frame is bad, or not there, or there although it was removed."""

_PAGED = SimGroup(GroupKind.PAGED, 4, 2)
_PAGED_WIDE = SimGroup(GroupKind.PAGED, 8, 1)
_LATENT = SimGroup(GroupKind.PAGED, 4, 2, replicated=True)
_STATE = SimGroup(GroupKind.STATE, 8, 5)


def _window(tokens: int, block_tokens: int = 4) -> SimGroup:
    return SimGroup(GroupKind.WINDOW, block_tokens, 2, tokens)


MODELS: dict[str, tuple[SimGroup, ...]] = {
    "dense": (_PAGED,),
    "two block sizes": (_PAGED, _PAGED_WIDE),
    "window": (_PAGED, _window(12)),
    "window under a chunk": (_window(5), _PAGED),
    "two windows": (_PAGED, _window(6), _window(20, 8)),
    "only a window": (_window(16),),
    "hybrid": (_PAGED, _STATE),
    "hybrid, state first": (_STATE, _PAGED_WIDE),
    "all kinds": (_PAGED, _window(12), _STATE),
    "only state": (_STATE,),
    "latent": (_LATENT,),
    "latent and state": (_LATENT, _STATE),
}
"""The groups of the simulated models, by what is particular about them."""


def draw_scenario(seed: int) -> Scenario:
    """The scenario of ``seed``; the same on every machine."""
    rng = Random(seed)
    groups = MODELS[rng.choice(list(MODELS))]
    model = SimModel(groups, chunk_tokens=rng.choice([8, 8, 16]))
    fault_free = rng.random() < 0.15
    scenario = Scenario(
        seed=seed,
        events=rng.choice([100, 300, 600]),
        skip=(),
        ranks=rng.choice([1, 1, 2, 2, 3]),
        model=model,
        rules=_draw_rules(rng, len(groups)),
        limits=_draw_limits(rng, groups),
        pending_loads_max=rng.choice([1, 2, 64]),
        pending_saves_max=rng.choice([2, 64]),
        pending_writes_max=rng.choice([2, 16, 64]),
        min_load_tokens=rng.choice([1, 1, 9]),
        step_s=rng.choice([0.05, 0.05, 30.0]),
        documents=rng.choice([1, 2, 4]),
        faults={} if fault_free else _draw_some(rng, FAULT_RATES),
        store_faults={} if fault_free else _draw_some(rng, STORE_FAULT_RATES),
        restarts=rng.random() < 0.5,
        # Drawn apart: what a seed stood for before there were twins, it stands for now.
        twins=Random(f"twins {seed}").random() < 0.25,
    )
    if fault_free and rng.random() < 0.6:
        return _roomy(scenario)
    # Some reads outlast the bound of their load, and come back while its slot may be somebody else's.
    slow_s = rng.choice([1.0, 1.0, 15.0])
    scenario = msgspec.structs.replace(
        scenario, limits=msgspec.structs.replace(scenario.limits, slow_s=slow_s)
    )
    return _undamaged(scenario) if rng.random() < 0.4 else scenario


def _undamaged(scenario: Scenario) -> Scenario:
    """The same where frames are neither damaged nor lost: then none may be found bad or missing."""
    return msgspec.structs.replace(
        scenario,
        faults={fault: rate for fault, rate in scenario.faults.items() if fault not in FRAME_FAULTS},
        store_faults={
            fault: rate for fault, rate in scenario.store_faults.items() if fault not in FRAME_STORE_FAULTS
        },
    )


def _roomy(scenario: Scenario) -> Scenario:
    """The same with room for all that is ever computed: then all of it must be found again."""
    replace = msgspec.structs.replace
    limits = replace(
        scenario.limits,
        arena_slots=(600,) * len(scenario.model.groups),
        queue_max=256,
        save_timeout_s=1e9,
    )
    rules = replace(scenario.rules, num_blocks=100 * len(scenario.model.groups))
    return replace(
        scenario, limits=limits, rules=rules, pending_saves_max=64, pending_loads_max=64, restarts=False
    )


def _draw_rules(rng: Random, groups: int) -> EngineRules:
    return EngineRules(
        num_blocks=groups * rng.choice([20, 28, 60]),
        step_tokens=rng.choice([8, 24, 64]),
        running_max=rng.choice([1, 3, 6]),
        steps_ahead=rng.choice([0, 0, 1]),
        ignored_promises=rng.choice([0.0, 0.0, 0.2]),
        requeries_after_failure=rng.random() < 0.6,
        caches_prefixes=rng.random() < 0.5,
    )


def _draw_limits(rng: Random, groups: tuple[SimGroup, ...]) -> RankLimits:
    slots = rng.choice([2, 6, 10, 20])
    frames = rng.choice([0, 4, 20, 80, 80])
    # A state group's frames are few and large: its share is its own.
    share = rng.choice([1, 2])
    return RankLimits(
        arena_slots=tuple(
            max(1, slots // share) if group.kind is GroupKind.STATE else slots for group in groups
        ),
        disk_frames=tuple(frames // share if group.kind is GroupKind.STATE else frames for group in groups),
        readers=rng.choice([1, 2]),
        load_threads=rng.choice([1, 2]),
        queue_max=rng.choice([2, 256, 256, 256]),
        load_timeout_s=10.0,
        save_timeout_s=rng.choice([5.0, 60.0]),
    )


def _draw_some(rng: Random, rates: dict[_T, float]) -> dict[_T, float]:
    """Each with its rate, about half of them."""
    return {fault: rate for fault, rate in rates.items() if rng.random() < 0.5}
