"""Windows and recurrent state in a pool and an arena that are too small, with clients that hang up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from families import GEMMA, QWEN3_NEXT, Family
from inprocess import Engine, prompt, running
from witness import Witness

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@dataclass(frozen=True)
class Crowd:
    """Requests for a family, more than it has blocks for.

    Attributes:
        options: vLLM's, on top of the family's.
        arena_gib: for about half of what they compute.
        shared: tokens that every other prompt begins with.
        lengths: of what follows, or of the whole prompt.
        answer: tokens of each answer.
        says_the_same: whether answers are compared with those of the requests alone, computed from
            nothing. In bfloat16 two tokens are as likely as each other too often, and whatever is in the
            same batch decides between them.
    """

    family: Family
    options: dict[str, Any]
    arena_gib: float
    shared: int
    lengths: Sequence[int]
    answer: int
    says_the_same: bool

    def prompts(self) -> list[list[int]]:
        """One for each length."""
        shared = prompt(self.shared, seed=0)
        return [
            shared + prompt(length, seed=100 + index)
            if index % 2
            else prompt(self.shared + length, seed=200 + index)
            for index, length in enumerate(self.lengths)
        ]


WINDOWS = Crowd(
    GEMMA,
    {"num_gpu_blocks_override": 90, "max_num_seqs": 8, "max_num_batched_tokens": 256},
    arena_gib=0.005,
    shared=130,
    lengths=range(30, 150, 10),
    answer=200,
    says_the_same=True,
)
HYBRID = Crowd(
    QWEN3_NEXT,
    {"num_gpu_blocks_override": 24, "max_num_seqs": 4, "max_num_batched_tokens": 600},
    arena_gib=0.002,
    shared=600,
    lengths=range(20, 260, 30),
    answer=150,
    says_the_same=False,
)


@pytest.mark.parametrize("crowd", [WINDOWS, HYBRID], ids=["windows", "hybrid"])
def test_what_is_loaded_was_computed_whatever_happens(crowd: Crowd, tmp_path: Path) -> None:
    model = crowd.family.make(tmp_path / "model")
    stow = {"chunk_tokens": crowd.family.chunk_tokens, "arena_gib": crowd.arena_gib}
    with running(model, stow, **{**crowd.family.options, **crowd.options}) as engine:
        witness = Witness(engine)
        prompts = crowd.prompts()
        for turn in range(2):
            names = [
                engine.submit(tokens, max_tokens=crowd.answer, name=f"{turn}-{number}")
                for number, tokens in enumerate(prompts)
            ]
            hang_up(engine, witness, names[::5])
            left = [engine.answers[name] for number, name in enumerate(names) if number % 5]
            engine.step_until(
                lambda left=left: all(answer.finish is not None for answer in left), step=witness.step
            )
            assert {answer.finish for answer in left} == {"length"}
            assert {len(answer.tokens) for answer in left} == {crowd.answer}
            engine.clear_own_cache()
        assert witness.preemptions > 0
        assert witness.loaded > 0
        counters = engine.counters()
        assert counters["loaded_tokens_arena"] > 0
        assert counters["evicted_arena"] > 0
        assert counters["load_failed"] == counters["save_failed"] == 0
        engine.expect_baseline()
        if crowd.says_the_same:
            kept = [tokens for number, tokens in enumerate(prompts) if number % 5]
            for tokens, answer in zip(kept, left, strict=True):
                alone = engine.ask(tokens, max_tokens=crowd.answer, uses_caches=False)
                assert (alone.cached, alone.tokens) == (0, answer.tokens)


def hang_up(engine: Engine, witness: Witness, names: Sequence[str]) -> None:
    """Abort each of ``names`` after some more steps."""
    for name in names:
        for _ in range(7):
            witness.step()
        engine.abort(name)
