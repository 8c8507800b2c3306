"""Clients that hang up at every moment, and ids that are used again: the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import Gates
from inprocess import BLOCK, CHUNK, Engine, prompt, running

from kvstow.lifecycle.messages import RequestId
from kvstow.lifecycle.requests import Phase

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(llama: Path, gates: Gates) -> Iterator[Engine]:
    with running(llama, max_num_seqs=4) as engine:
        yield engine


def saved(engine: Engine, tokens: list[int]) -> list[int]:
    """Have ``tokens`` kept by kvstow and by nobody else; what the engine generates for them."""
    text = engine.ask(tokens).tokens
    engine.clear_own_cache()
    return text


def phase(engine: Engine, name: str) -> Phase | None:
    return engine.planner.phase_of(RequestId(name))


def test_while_queued_with_a_promise(engine: Engine) -> None:
    tokens = prompt(900, seed=1)
    text = saved(engine, tokens)
    running_on = engine.submit(prompt(960, seed=2), max_tokens=30)
    engine.step()
    # 59 blocks in all, 31 of them taken: the hit is promised and cannot be allocated.
    engine.submit(tokens, name="queued")
    engine.step()
    assert phase(engine, "queued") is Phase.PROMISED
    engine.abort("queued")
    engine.step_until(lambda: engine.answers[running_on].finish is not None)
    assert phase(engine, "queued") is None
    engine.expect_baseline()

    again = engine.ask(tokens, name="queued")
    assert (again.cached, again.tokens) == (896, text)
    engine.expect_baseline()


def test_while_loading(engine: Engine, gates: Gates) -> None:
    tokens = prompt(500, seed=3)
    text = saved(engine, tokens)
    held = engine.ask(tokens)
    expected = engine.kv_bytes(held.blocks)[: 448 // BLOCK]
    engine.clear_own_cache()

    with gates.shut("load"):
        engine.submit(tokens, name="loading")
        engine.step()
        engine.step()
        assert phase(engine, "loading") is Phase.LOADING
        blocks = engine.block_ids("loading")
        engine.abort("loading")
        # The load may still write them, so nobody else may have them.
        other = engine.ask(prompt(300, seed=4))
        assert not set(other.blocks) & set(blocks)
        assert engine.free_blocks <= engine.free_at_start - len(blocks)
        # The same prompt under another id waits for nobody.
        twin = engine.submit(tokens, name="twin")
        engine.step()
    engine.step_until(lambda: engine.answers[twin].finish is not None)
    assert engine.answers[twin].tokens == text
    assert engine.kv_bytes(engine.answers[twin].blocks)[: 448 // BLOCK] == expected
    engine.expect_baseline()

    again = engine.ask(tokens, name="loading")
    assert again.tokens == text
    engine.expect_baseline()


def test_while_saving(engine: Engine, gates: Gates) -> None:
    tokens = prompt(500, seed=5)
    with gates.shut("save"):
        engine.submit(tokens, name="saving", max_tokens=30)
        for _ in range(4):
            engine.step()
        assert engine.planner.is_saving(RequestId("saving"))
        blocks = engine.block_ids("saving")
        computed = engine.kv_bytes(blocks)[: 448 // BLOCK]
        engine.abort("saving")
        # A copy is to read the blocks: they are nobody's until it has.
        other = engine.ask(prompt(300, seed=6))
        assert not set(other.blocks) & set(blocks)
        assert engine.kv_bytes(blocks)[: 448 // BLOCK] == computed
    engine.expect_baseline()

    # Once its blocks are back the same id is another request, and finds what the first one saved.
    engine.clear_own_cache()
    again = engine.ask(tokens, name="saving")
    assert again.cached == 448
    assert engine.kv_bytes(again.blocks)[: 448 // BLOCK] == computed
    engine.expect_baseline()


def test_a_request_that_ends_while_saving_keeps_its_blocks(engine: Engine, gates: Gates) -> None:
    tokens = prompt(500, seed=7)
    with gates.shut("save"):
        done = engine.ask(tokens)
        computed = engine.kv_bytes(done.blocks)[: 448 // BLOCK]
        assert engine.free_blocks == engine.free_at_start - len(done.blocks)
        # Too short to be saved, and enough of them to use every block that is free: each keeps
        # one whole block for the next in the engine's cache.
        used: set[int] = set()
        for seed in range(engine.free_blocks):
            used.update(engine.ask(prompt(CHUNK - 4, seed=100 + seed)).blocks)
        assert len(used) == engine.free_at_start - len(done.blocks)
        assert not used & set(done.blocks)
    engine.expect_baseline()
    engine.clear_own_cache()
    again = engine.ask(tokens)
    assert (again.cached, again.tokens) == (448, done.tokens)
    assert engine.kv_bytes(again.blocks)[: 448 // BLOCK] == computed


def test_an_id_used_again_at_once_is_another_request(engine: Engine) -> None:
    """Same id, other prompt: nothing of the first use is left in the second."""
    first, second = prompt(400, seed=20), prompt(400, seed=21)
    text = saved(engine, second)
    saved(engine, first)
    engine.submit(first, name="twice", max_tokens=50)
    for _ in range(3):
        engine.step()
    engine.abort("twice")
    engine.step_until(lambda: "twice" not in engine.scheduler.requests)
    again = engine.ask(second, name="twice")
    assert (again.cached, again.tokens) == (6 * CHUNK, text)
    engine.expect_baseline()


def test_aborted_at_every_step_of_its_life(engine: Engine) -> None:
    tokens = prompt(500, seed=30)
    text = saved(engine, tokens)
    for steps in range(8):
        engine.submit(tokens, name="short-lived", max_tokens=20)
        for _ in range(steps):
            engine.step()
        engine.abort("short-lived")
        engine.clear_own_cache()
        assert engine.free_blocks == engine.free_at_start
    assert engine.ask(tokens).tokens == text
    engine.expect_baseline()
