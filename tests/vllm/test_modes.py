"""The ways to name the connector, what is saved, resets, and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import CHUNK, Engine, ask_twice, prompt, running, second_turn
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvstow.metrics import SPECS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    """By module path, with numbers: all else as a user would leave it."""
    transfer = {"kv_connector_module_path": "kvstow.adapters.vllm.connector"}
    with running(llama, transfer=transfer, disable_log_stats=False) as engine:
        yield engine


def test_the_module_path_works_as_the_name_does(engine: Engine) -> None:
    assert ask_twice(engine, seed=1) == 448
    engine.expect_baseline()


def test_a_failed_load_is_a_recompute_also_where_nobody_said_so(engine: Engine) -> None:
    """vLLM's own default would make it an error to the client."""
    assert engine.core.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_generated_tokens_are_saved(engine: Engine) -> None:
    second = second_turn(engine, seed=2)
    # 349 tokens were computed: five chunks, two of them past the prompt.
    assert second.cached == 5 * CHUNK
    engine.expect_baseline()


def test_a_reset_of_the_connector_forgets_everything(engine: Engine) -> None:
    tokens = prompt(500, seed=3)
    engine.ask(tokens)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.planner.directory.arena_in_use(0) == 0
    before = engine.counters()
    assert engine.ask(tokens).cached == 0
    assert "promised_tokens" not in engine.counted_since(before)
    engine.clear_own_cache()
    assert engine.ask(tokens).cached == 448
    engine.expect_baseline()


def test_a_reset_during_a_save_says_that_it_is_not_done(engine: Engine) -> None:
    engine.submit(prompt(500, seed=4), max_tokens=20)
    engine.step_until(lambda: engine.planner.saves_in_flight)
    assert engine.scheduler.reset_connector_cache() is False
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.expect_baseline()


def shown() -> dict[str, float]:
    """kvstow's numbers as a scrape of this process would see them."""
    return {
        sample.name.removesuffix("_total") + sample.labels.get("tier", ""): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("kvstow_") and not sample.name.endswith("_created")
    }


def test_the_numbers_are_on_vllms_metrics(engine: Engine) -> None:
    tokens = prompt(500, seed=5)
    engine.ask(tokens)
    engine.clear_own_cache()
    before = shown()
    assert len(before) == len(SPECS)
    assert before["kvstow_saves"] == engine.counters()["saves"] > 0
    engine.ask(tokens)
    after = shown()
    assert after["kvstow_loaded_tokensarena"] - before["kvstow_loaded_tokensarena"] == 448
    assert after["kvstow_promised_tokens"] - before["kvstow_promised_tokens"] == 448
    # All of it has been sent: nothing is counted twice by asking.
    assert engine.connector.get_kv_connector_stats() is None
    assert get_kv_transfer_group().get_kv_connector_stats() is None
