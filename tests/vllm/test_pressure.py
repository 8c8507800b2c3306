"""Two dozen requests at once in a pool that is too small: preemption, with loads and saves in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import Gates
from inprocess import CHUNK, Engine, prompt, running
from witness import Witness

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS = 24
ANSWER = 48


@pytest.fixture(scope="module")
def engine(llama: Path, gates: Gates) -> Iterator[Engine]:
    with running(llama, max_num_seqs=8, max_num_batched_tokens=256) as engine:
        yield engine


def test_preempted_requests_resume_from_what_was_computed(engine: Engine) -> None:
    before = engine.counters()
    shared = prompt(200, seed=0)
    prompts = [
        shared + prompt(60 + index, seed=100 + index)
        if index % 2
        else prompt(230 + 5 * index, seed=200 + index)
        for index in range(REQUESTS)
    ]
    witness = Witness(engine)
    names = [engine.submit(tokens, max_tokens=ANSWER) for tokens in prompts]
    engine.step_until(
        lambda: all(engine.answers[name].finish is not None for name in names), step=witness.step
    )

    assert witness.preemptions > 0
    assert witness.loaded > 0
    assert {engine.answers[name].finish for name in names} == {"length"}
    assert {len(engine.answers[name].tokens) for name in names} == {ANSWER}
    counted = engine.counted_since(before)
    assert counted["loaded_tokens_arena"] > 0
    assert "load_failed" not in counted
    assert "save_failed" not in counted
    engine.expect_baseline()

    reload_alone(engine, witness, prompts[:6])


def test_a_preempted_request_is_not_saved_out_of_blocks_it_lost(engine: Engine, gates: Gates) -> None:
    """Its saves wait; meanwhile the engine gives its blocks to others, which write them."""
    before = engine.counters()
    witness = Witness(engine)
    prompts = [prompt(600, seed=301), prompt(620, seed=302), prompt(580, seed=303)]
    with gates.shut("save"):
        names = [engine.submit(tokens, max_tokens=120) for tokens in prompts]
        engine.step_until(lambda: witness.preemptions > 0, step=witness.step)
        engine.step_until(
            lambda: any(engine.answers[name].finish is not None for name in names), step=witness.step
        )
    engine.step_until(
        lambda: all(engine.answers[name].finish is not None for name in names), step=witness.step
    )
    engine.settle()
    counted = engine.counted_since(before)
    assert counted["save_cancelled"] > 0
    assert counted["saves"] > 0
    reload_alone(engine, witness, prompts)


def reload_alone(engine: Engine, witness: Witness, prompts: list[list[int]]) -> None:
    """What was saved under pressure is loaded by requests that have the engine for themselves."""
    loaded = witness.loaded
    engine.clear_own_cache()
    for tokens in prompts:
        name = engine.submit(tokens)
        engine.step_until(lambda name=name: engine.answers[name].finish is not None, step=witness.step)
        assert engine.answers[name].cached == (len(tokens) - 1) // CHUNK * CHUNK
        engine.clear_own_cache()
    assert witness.loaded > loaded
    engine.expect_baseline()
