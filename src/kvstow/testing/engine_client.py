"""The client of the engine contract: draws prompts, asks, and knows what must be true of every answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstow.testing.engine_under_test import Answer, EngineUnderTest, Tokens

OUTPUTS = 4
"""Tokens that an answer has, where a test does not say otherwise."""


class Client:
    """Asks, and checks of every answer what must be true of all.

    Args:
        engine: whom to ask.
        name: of the test; prompts and the names of requests follow from it.
    """

    def __init__(self, engine: EngineUnderTest, name: str) -> None:
        self.engine = engine
        self._name = name
        self._rng = random.Random(name)
        self._asked = 0
        engine.settle()
        self._free_blocks = engine.num_free_blocks

    # ---- prompts -----------------------------------------------------------------------

    def prompt(self, resumes: int, more: int | None = None) -> Tokens:
        """A prompt that nobody has sent.

        Args:
            resumes: its length in `resume_tokens`.
            more: tokens on top; half a chunk if it is not given.
        """
        chunk_tokens = self.engine.chunk_tokens
        length = resumes * self.engine.resume_tokens + (chunk_tokens // 2 if more is None else more)
        return tuple(self._rng.choices(self.engine.vocabulary, k=length))

    def with_another_chunk(self, prompt: Tokens, index: int) -> Tokens:
        """``prompt`` with other tokens in the chunk at ``index``."""
        first = index * self.engine.chunk_tokens
        stop = first + self.engine.chunk_tokens
        return prompt[:first] + self.prompt(0, more=stop - first) + prompt[stop:]

    def least_of(self, prompt: Tokens) -> int:
        """Tokens that must be there for a prompt that was computed alone before."""
        resume_tokens = self.engine.resume_tokens
        return (len(prompt) - 1) // resume_tokens * resume_tokens

    def most_of(self, prompt: Tokens) -> int:
        """Tokens that can be there at most: whole chunks, and one token is left to compute."""
        chunk_tokens = self.engine.chunk_tokens
        return (len(prompt) - 1) // chunk_tokens * chunk_tokens

    # ---- requests ----------------------------------------------------------------------

    def name(self) -> str:
        """One that no request had."""
        self._asked += 1
        return f"{self._name} {self._asked}"

    def ask(self, prompt: Tokens, outputs: int = OUTPUTS, salt: str = "") -> Answer:
        """The answer to ``prompt``, alone."""
        return self.ask_at_once([prompt], outputs, salt)[0]

    def ask_at_once(self, prompts: Sequence[Tokens], outputs: int = OUTPUTS, salt: str = "") -> list[Answer]:
        """The answers to prompts that are all there before the first is begun."""
        names = [self.name() for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.submit(name, prompt, outputs, salt)
        return [
            self.check(prompt, answer, outputs)
            for prompt, answer in zip(prompts, self.engine.finish(names), strict=True)
        ]

    def check(self, prompt: Tokens, answer: Answer, outputs: int = OUTPUTS) -> Answer:
        """``answer``, found possible: a token was left to compute, and a load ended where a chunk does."""
        assert len(answer.tokens) == outputs
        assert 0 <= answer.own_hit <= answer.own_hit + answer.loaded < len(prompt)
        if answer.loaded:
            assert (answer.own_hit + answer.loaded) % self.engine.chunk_tokens == 0
        return answer

    # ---- what is usual -----------------------------------------------------------------

    def ask_cold(self, prompt: Tokens, salt: str = "") -> Answer:
        """The answer to a prompt of which nothing may be known, and afterwards the engine knows nothing.

        Its tokens are what every later answer to the prompt must say.
        """
        answer = self.ask(prompt, salt=salt)
        assert (answer.own_hit, answer.loaded) == (0, 0)
        self.engine.forget_own_cache()
        return answer

    def expect_loaded(self, prompt: Tokens, cold: Answer, salt: str = "") -> None:
        """The prompt, of which the engine itself knows nothing, is loaded and says what it said cold."""
        answer = self.ask(prompt, salt=salt)
        assert answer.tokens == cold.tokens
        assert answer.own_hit == 0
        assert self.least_of(prompt) <= answer.loaded <= self.most_of(prompt)

    def expect_models_answers(self, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> None:
        """Each says what the model says to its prompt, alone and with nothing reused."""
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == self.engine.recompute(prompt, len(answer.tokens))

    def expect_baseline(self) -> None:
        """Every block that was taken is back."""
        self.engine.settle()
        assert self.engine.num_free_blocks == self._free_blocks
