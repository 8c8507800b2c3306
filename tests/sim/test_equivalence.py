"""The same requests say the same: with and without kvstow, cold and warm, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from lockstep import Lockstep, scenario_of

from kvstow.lifecycle.messages import WorkOrder
from kvstow.testing.sim.clients import Clients
from kvstow.testing.sim.requests import Prompt
from kvstow.testing.sim.scenario import MODELS


def prompts() -> list[Prompt]:
    clients, rng = Clients(seed=5, documents=2), Random(3)
    return [clients.draw(rng, []) for _ in range(12)] * 2


@pytest.mark.parametrize("name", MODELS)
def test_with_and_without_kvstow(name: str, tmp_path: Path) -> None:
    scenario = scenario_of(name)
    with_it = Lockstep(scenario, tmp_path / "with")
    without = Lockstep(scenario, tmp_path / "without", without=True)
    assert with_it.serve(prompts()) == without.serve(prompts())
    assert with_it.loaded_tokens() > 0
    assert without.loaded_tokens() == 0


@pytest.mark.parametrize("name", MODELS)
def test_cold_and_warm(name: str, tmp_path: Path) -> None:
    scenario = scenario_of(name)
    cold = Lockstep(scenario, tmp_path)
    said = cold.serve(prompts()[:12])
    cold.life.shutdown()
    warm = Lockstep(scenario, tmp_path, number=1)
    assert warm.serve(prompts()[:12]) == said
    assert warm.loaded_tokens() > cold.loaded_tokens()


def plan(run: Lockstep) -> list[WorkOrder]:
    """What was ordered; acknowledgements are by rank."""
    return [msgspec.structs.replace(order, acknowledged=()) for order in run.orders]


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_and_three_make_the_same_plan(name: str, tmp_path: Path) -> None:
    one = Lockstep(scenario_of(name, ranks=1, slots=9), tmp_path / "one")
    three = Lockstep(scenario_of(name, ranks=3, slots=9), tmp_path / "three")
    assert one.serve(prompts()) == three.serve(prompts())
    assert plan(one) == plan(three)
    assert any(order.loads for order in one.orders)
