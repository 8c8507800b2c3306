"""How soon an engine's first token comes: computed, from its own cache, from DRAM, from disk."""

from __future__ import annotations

import statistics

import msgspec

from kvstow.clock import Clock, SystemClock
from kvstow.testing.engine_under_test import Answer, EngineUnderTest, Tokens


class EngineFigure(msgspec.Struct, frozen=True):
    """What a prompt took.

    Attributes:
        operation: ``cold``, ``own hit``, ``DRAM`` or ``disk``: where its tokens came from.
        prompt_tokens: length of the prompt.
        reused_tokens: how many of them were not computed.
        median_s: seconds from the request to its only token.
        cold_s: the same of the prompt that was computed, in the same run.
    """

    operation: str
    prompt_tokens: int
    reused_tokens: int
    median_s: float
    cold_s: float

    @property
    def speedup(self) -> float:
        """How many times sooner than computed."""
        return self.cold_s / self.median_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens in a second."""
        return self.prompt_tokens / self.median_s


class UnexpectedReuseError(RuntimeError):
    """A prompt did not come from where it was to come from: the figure would be of something else."""


def bench_engine(
    engine: EngineUnderTest, prompt: Tokens, rounds: int = 3, clock: Clock | None = None
) -> list[EngineFigure]:
    """The seconds to one token for ``prompt``, alone on the engine. Blocks until done; restarts it once.

    Each round has a salt of its own, so that each begins cold.

    Args:
        engine: one that keeps ``rounds`` such prompts in DRAM and on disk.
        prompt: longer than ``resume_tokens``.
        rounds: how often to measure each way.
        clock: what to measure with; the system's if it is not given.

    Returns:
        ``cold``, ``own hit`` (if the engine has a cache of its own), ``DRAM`` and ``disk``.

    Raises:
        UnexpectedReuseError: a prompt that was to be loaded was computed, or the other way round.
    """
    run = _Run(engine, prompt, clock or SystemClock())
    for number in range(rounds):
        run.measure("cold", number)
        engine.settle()
        run.measure("own hit", number)
        engine.forget_own_cache()
        run.measure("DRAM", number)
    engine.restart()
    for number in range(rounds):
        run.measure("disk", number)
    return run.figures()


class _Run:
    """Asks and notes: seconds and answers by operation, in the order of the operations."""

    def __init__(self, engine: EngineUnderTest, prompt: Tokens, clock: Clock) -> None:
        self._engine = engine
        self._prompt = prompt
        self._clock = clock
        self._seen: dict[str, list[tuple[float, Answer]]] = {}

    def measure(self, operation: str, number: int) -> None:
        name = f"bench {operation} {number}"
        start_s = self._clock.monotonic_s()
        self._engine.submit(name, self._prompt, 1, f"bench {number}")
        (answer,) = self._engine.finish([name])
        took_s = self._clock.monotonic_s() - start_s
        if operation == "own hit":
            is_expected = True  # an engine without a cache has no such figure
        elif operation == "cold":
            is_expected = not answer.own_hit and not answer.loaded
        else:
            is_expected = not answer.own_hit and answer.loaded > 0
        if not is_expected:
            raise UnexpectedReuseError(
                f"{operation}: of {len(self._prompt)} tokens {answer.loaded} were loaded and "
                f"{answer.own_hit} the engine's own hit; see that the engine is idle, keeps what it saves, "
                "and has not seen this bench's salts"
            )
        self._seen.setdefault(operation, []).append((took_s, answer))

    def figures(self) -> list[EngineFigure]:
        if not all(answer.own_hit for _, answer in self._seen["own hit"]):
            del self._seen["own hit"]
        medians_s = {
            operation: statistics.median(took_s for took_s, _ in seen)
            for operation, seen in self._seen.items()
        }
        return [
            EngineFigure(
                operation,
                len(self._prompt),
                min(answer.own_hit + answer.loaded for _, answer in seen),
                medians_s[operation],
                medians_s["cold"],
            )
            for operation, seen in self._seen.items()
        ]
