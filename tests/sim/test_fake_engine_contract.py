"""The fake engine, by the contract of engines: every kind of group, one rank and two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sim_engine import SimEngine, world_of

from kvstow.layout.geometry import GroupKind
from kvstow.testing.engine_bench import bench_engine
from kvstow.testing.engine_contract import EngineContract
from kvstow.testing.sim.scenario import Scenario


class FakeEngine(EngineContract):
    """What all of the simulated engines have in common."""

    __test__ = False
    world: Scenario

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[SimEngine]:
        engine = SimEngine(self.world, tmp_path)
        yield engine
        engine.life.kill()


def contract(world: Scenario) -> type[FakeEngine]:
    """The contract in ``world``."""
    kinds = {group.kind for group in world.model.groups}

    class Contract(FakeEngine):
        __test__ = True
        caches_prefixes = world.rules.caches_prefixes
        # A window or a state has as many blocks at its end as at its beginning.
        preempts = GroupKind.PAGED in kinds

    Contract.world = world
    return Contract


TestDense = contract(world_of("dense", 1))
TestDenseTwoRanks = contract(world_of("dense", 2, steps_ahead=1, requeries=False))
TestDenseWithoutCache = contract(world_of("dense", 1, caches=False))
TestTwoBlockSizes = contract(world_of("two block sizes", 1, steps_ahead=1))
TestWindow = contract(world_of("window", 2))
TestWindowUnderAChunk = contract(world_of("window under a chunk", 1, requeries=False))
TestOnlyAWindow = contract(world_of("only a window", 1))
TestHybrid = contract(world_of("hybrid", 2, steps_ahead=1))
TestHybridImagesAtEveryChunk = contract(world_of("hybrid", 1, step_tokens=8, requeries=False))
TestAllKinds = contract(world_of("all kinds", 1))
TestOnlyState = contract(world_of("only state", 2, caches=False))


def test_the_bench_of_engines(tmp_path: Path) -> None:
    """In simulated time a reload takes fewer turns than computing, and everything is named."""
    engine = SimEngine(world_of("dense", 1, step_tokens=8), tmp_path)
    prompt = tuple(range(100))
    figures = bench_engine(engine, prompt, rounds=2, clock=engine.clock)
    assert [figure.operation for figure in figures] == ["cold", "own hit", "DRAM", "disk"]
    assert [figure.reused_tokens for figure in figures] == [0, 96, 96, 96]
    cold, own, dram, disk = figures
    assert cold.median_s == pytest.approx(0.13)  # 13 steps
    assert own.median_s == pytest.approx(0.01)
    assert own.median_s < dram.median_s <= disk.median_s < cold.median_s
    assert cold.speedup == 1
    assert dram.speedup == cold.median_s / dram.median_s
    assert dram.tokens_per_s == 100 / dram.median_s
