"""A deadline bounds work, not queues: loads behind many others, on a slow disk, with slow steps."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from lockstep import Lockstep, scenario_of

from kvstow.lifecycle.messages import RequestId
from kvstow.stores.base import FrameName
from kvstow.testing.faulty_store import StoreFault, StoreOperation
from kvstow.testing.sim.requests import Prompt
from kvstow.testing.sim.scenario import Scenario

LOADS = 66
READ_S = 8.0
STEP_S = 30.0
BOUND_S = 10.0


class SlowReads:
    """Every read takes `READ_S`."""

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        return StoreFault.SLOW if operation is StoreOperation.GET else None


class StuckReads:
    """No read ever comes back."""

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        return StoreFault.HANG if operation is StoreOperation.GET else None


def scenario() -> Scenario:
    """One rank, two readers, room for everything."""
    replace = msgspec.structs.replace
    plain = scenario_of("dense")
    return replace(
        plain,
        rules=replace(plain.rules, num_blocks=800, running_max=LOADS, step_tokens=4096),
        limits=replace(
            plain.limits,
            arena_slots=(4 * LOADS,),
            disk_frames=(4 * LOADS,),
            readers=2,
            load_timeout_s=BOUND_S,
            slow_s=READ_S,
            queue_max=1024,
        ),
        pending_loads_max=2 * LOADS,
        pending_saves_max=4 * LOADS,
        pending_writes_max=2 * LOADS,
    )


def prompts() -> list[Prompt]:
    rng = Random(7)
    return [Prompt(tuple(rng.randrange(1000) for _ in range(18))) for _ in range(LOADS)]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A disk that holds all prompts."""
    cold = Lockstep(scenario(), tmp_path)
    cold.serve(prompts())
    cold.life.shutdown()
    return tmp_path


def test_loads_behind_sixty_four_others_are_not_late(filled: Path) -> None:
    warm = Lockstep(scenario(), filled, number=1, faults=SlowReads())
    requests = [
        warm.life.engine.add(RequestId(f"r{index}"), prompt, outputs_max=1)
        for index, prompt in enumerate(prompts())
    ]
    began_s = warm.clock.monotonic_s()
    warm.run(step_s=STEP_S)
    assert warm.life.engine.counts["loads"] == LOADS
    assert warm.life.engine.counts["loads failed"] == 0
    assert warm.loaded_tokens() == 16 * LOADS
    assert len(warm.life.engine.finished) == len(requests)
    # They did wait: two at a time, two frames each, every read longer than most of the bound.
    assert warm.clock.monotonic_s() - began_s > LOADS * READ_S > 50 * BOUND_S


def test_loads_behind_two_that_hang_fail_in_bounded_time(filled: Path) -> None:
    warm = Lockstep(scenario(), filled, number=1, faults=StuckReads())
    for index, prompt in enumerate(prompts()):
        warm.life.engine.add(RequestId(f"r{index}"), prompt, outputs_max=1)
    began_s = warm.clock.monotonic_s()
    warm.run(step_s=1.0, until=lambda: not warm.life.engine.promises)
    assert warm.life.engine.counts["loads failed"] > 0
    assert warm.clock.monotonic_s() - began_s < 4 * BOUND_S
