"""What the demo measured, and whether it is what is promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvstow.cli.demo.client import Counters
from kvstow.cli.demo.document import facts_found


class Stage(StrEnum):
    """Where the document's keys and values come from."""

    COLD = "cold"
    ENGINE = "engine"
    ARENA = "arena"
    DISK = "disk"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Promise:
    """What must hold at least.

    Attributes:
        restored_share: of the document's tokens, from the tier that the stage is about.
        speedup: time to first token, computed over this stage's.
    """

    restored_share: float
    speedup: float


PROMISES: Mapping[Stage, Promise] = {
    Stage.ARENA: Promise(restored_share=0.9, speedup=5.0),
    Stage.DISK: Promise(restored_share=0.9, speedup=5.0),
}

_ENGINE_LEFT_MAX = 0.02
"""Of the document's tokens, so many may come from the engine's own cache where it is said to have
lost them: the chat template's first words, which every prompt shares."""


@dataclass(frozen=True)
class Measured:
    """One stage.

    Attributes:
        ttft_s: time to first token of the first question, on the client's clock.
        prompt_tokens: of the first question.
        counted: the server's counts for the first question.
        answers: to all questions, in order.
    """

    ttft_s: float
    prompt_tokens: int
    counted: Counters
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One stage beside the others.

    Attributes:
        stage: which.
        measured: what was measured.
        speedup: time to first token, computed over this stage's; computed is the faster of the cold
            and the recomputed stage, so that a busy moment of the machine flatters nobody.
        same_text: whether every answer equals that of the engine's own prefix hit.
        facts: how many of the three facts stand in the answers.
        broken: what was promised and does not hold; empty when all does.
    """

    stage: Stage
    measured: Measured
    speedup: float
    same_text: bool
    facts: int
    broken: tuple[str, ...]


def judge(stages: Mapping[Stage, Measured]) -> list[Row]:
    """Compare all stages; ``stages`` holds every `Stage`."""
    cold, engine = stages[Stage.COLD], stages[Stage.ENGINE]
    computed_s = min(cold.ttft_s, stages[Stage.RECOMPUTE].ttft_s)
    rows = []
    for stage in Stage:
        measured = stages[stage]
        speedup = computed_s / measured.ttft_s
        rows.append(
            Row(
                stage=stage,
                measured=measured,
                speedup=speedup,
                same_text=measured.answers == engine.answers,
                facts=facts_found(measured.answers),
                broken=tuple(_broken(stage, measured, speedup, engine=engine, cold=cold)),
            )
        )
    return rows


def _broken(stage: Stage, measured: Measured, speedup: float, engine: Measured, cold: Measured) -> list[str]:
    counted, tokens = measured.counted, measured.prompt_tokens
    broken = []
    if stage is Stage.ENGINE:
        if counted.engine < 0.9 * tokens:
            broken.append(f"the engine's own cache held {counted.engine} of {tokens} tokens, want 90 %")
    elif counted.engine > _ENGINE_LEFT_MAX * tokens:
        broken.append(f"the engine's own cache still held {counted.engine} of {tokens} tokens")

    promise = PROMISES.get(stage)
    if promise is None:
        if counted.restored:
            broken.append(f"{counted.restored} tokens were restored, want 0")
    else:
        restored = counted.arena if stage is Stage.ARENA else counted.disk
        if restored < promise.restored_share * tokens:
            broken.append(
                f"{restored} of {tokens} tokens came from {stage}, want {promise.restored_share:.0%} "
                f"(arena {counted.arena}, disk {counted.disk}, unnamed {counted.unknown})"
            )
        if speedup < promise.speedup:
            broken.append(f"{speedup:.1f} times as fast as computed, want {promise.speedup:g}")
        if measured.answers != engine.answers:
            broken.append("the text differs from that of the engine's own prefix hit")
    if stage is Stage.RECOMPUTE and measured.answers != cold.answers:
        broken.append("the text differs from the cold one")
    return broken
