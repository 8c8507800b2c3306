"""One life of a fake engine in which everybody does what there is to do, in the same order every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstow.clock import ManualClock
from kvstow.lifecycle.messages import RequestId, WorkOrder
from kvstow.testing.faulty_store import FaultSource, NoFaults
from kvstow.testing.sim.life import Life
from kvstow.testing.sim.requests import Prompt, SimRequest
from kvstow.testing.sim.scenario import MODELS, Scenario, draw_scenario

STEPS_MAX = 2000


def scenario_of(name: str, ranks: int = 1, slots: int = 60) -> Scenario:
    """A world where nothing fails, with the groups of ``name``."""
    drawn = draw_scenario(1)
    replace = msgspec.structs.replace
    groups = MODELS[name]
    return replace(
        drawn,
        ranks=ranks,
        model=replace(drawn.model, groups=groups, chunk_tokens=8),
        rules=replace(
            drawn.rules,
            num_blocks=24 * len(groups),
            step_tokens=24,
            running_max=3,
            steps_ahead=0,
            ignored_promises=0.0,
            caches_prefixes=False,
        ),
        # Later ranks have fewer slots; what all ranks have is the same whatever their number.
        limits=replace(
            drawn.limits,
            arena_slots=(slots + ranks - 1,) * len(groups),
            disk_frames=(80,) * len(groups),
            queue_max=256,
            load_timeout_s=1e6,
            save_timeout_s=1e6,
        ),
        pending_loads_max=64,
        pending_saves_max=64,
        pending_writes_max=64,
        min_load_tokens=1,
        faults={},
        store_faults={},
    )


class Lockstep:
    """One life in which everybody does what is to be done, in the same order every time."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        number: int = 0,
        *,
        faults: FaultSource | None = None,
        without: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.life = Life(scenario, number, folder, faults or NoFaults(), self.clock)
        self.orders: list[WorkOrder] = []
        if without:
            self.life.engine.planner = None

    def serve(self, prompts: list[Prompt]) -> list[list[int]]:
        """What the model says to each prompt."""
        served: list[SimRequest] = []
        for index, prompt in enumerate(prompts):
            served.append(self.life.engine.add(RequestId(f"r{index}"), prompt, outputs_max=4))
            self.run()
        return [request.tokens[len(request.prompt.tokens) :] for request in served]

    def run(self, step_s: float = 0.01, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to do, or ``until`` says so. Threads run while a step takes its time."""
        life = self.life
        for _ in range(STEPS_MAX):
            self.orders.append(life.send().order)
            moved = self._pass(step_s)
            for rank in life.ranks:
                _, answers = life.do_step(rank)
                for answer in answers:
                    for report in answer.reports:
                        life.planner.report(report)
            moved += self._pass(0.0)
            if until() or (not moved and life.engine.is_idle and not life.planner.wants_steps):
                return
        raise AssertionError(f"not done after {STEPS_MAX} steps")

    def _pass(self, for_s: float) -> int:
        """Let time pass, and threads run; how many tasks moved."""
        ranks = self.life.ranks
        until_s = self.clock.monotonic_s() + for_s
        moved = sum(rank.run_threads() for rank in ranks)
        while (wake_s := min(rank.wake_s for rank in ranks)) <= until_s:
            self.clock.advance(wake_s - self.clock.monotonic_s())
            moved += sum(rank.run_threads() for rank in ranks)
        self.clock.advance(until_s - self.clock.monotonic_s())
        return moved

    def loaded_tokens(self) -> int:
        return self.life.engine.counts["loaded tokens"]
