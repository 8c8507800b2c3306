"""What clients send: prompts that share beginnings, go on from earlier answers, or differ in an image."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from kvstow.testing.sim.requests import Prompt, SimRequest

PROMPT_TOKENS_MAX = 62
OUTPUTS_MAX = 5

_DOCUMENT_TOKENS = 50
_PLACEHOLDER = 99
_IMAGE_TOKENS = 4


class Clients:
    """Draws prompts from a few documents.

    Args:
        seed: of the documents.
        documents: how many there are; few documents share more.
        twins: whether prompts are sent that differ from another in nothing but their image.
    """

    def __init__(self, seed: int, documents: int, *, twins: bool = False) -> None:
        self._twins = twins
        self._pictured: list[tuple[Prompt, int]] = []  # with where the placeholders begin
        self._documents = []
        for index in range(documents):
            rng = Random(seed * 31 + index)
            self._documents.append([rng.randrange(_DOCUMENT_TOKENS) for _ in range(PROMPT_TOKENS_MAX)])

    def draw(self, rng: Random, served: Sequence[SimRequest], sent: Sequence[Prompt] = ()) -> Prompt:
        """One that goes on from a request that was served, one that was sent before, or a new one.

        Args:
            rng: decides.
            served: requests to go on from.
            sent: prompts of earlier days, before the engine was restarted.
        """
        if self._pictured and rng.random() < 0.4:
            prompt, first = rng.choice(self._pictured)
            return msgspec.structs.replace(prompt, image=_draw_image(rng, first))
        if sent and rng.random() < 0.4:
            return rng.choice(sent)
        if served and rng.random() < 0.5:
            request = rng.choice(served)
            tokens = request.tokens + [60 + rng.randrange(3)] * rng.randrange(12)
            if len(tokens) < PROMPT_TOKENS_MAX:
                return msgspec.structs.replace(request.prompt, tokens=tuple(tokens))
            return request.prompt
        length = rng.randrange(5, PROMPT_TOKENS_MAX)
        tokens = rng.choice(self._documents)[:length]
        if rng.random() < 0.3:
            cut = rng.randrange(1, length)
            tokens = tokens[:cut] + [50 + rng.randrange(3)] * (length - cut)
        image = None
        if self._twins and length > _IMAGE_TOKENS + 3:
            # One placeholder more than the image has: it may begin at either of two.
            first = rng.randrange(length - _IMAGE_TOKENS - 2)
            stop = first + _IMAGE_TOKENS + 1
            tokens = tokens[:first] + [_PLACEHOLDER] * (stop - first) + tokens[stop:]
            prompt = Prompt(tuple(tokens), image=_draw_image(rng, first))
            self._pictured = [*self._pictured[-3:], (prompt, first)]
            return prompt
        if rng.random() < 0.2 and length > _IMAGE_TOKENS + 2:
            offset = rng.randrange(length - _IMAGE_TOKENS - 1)
            tokens = tokens[:offset] + [_PLACEHOLDER] * _IMAGE_TOKENS + tokens[offset + _IMAGE_TOKENS :]
            image = (offset, _IMAGE_TOKENS, rng.choice(["cat", "dog"]))
        return Prompt(tuple(tokens), rng.choice(["", "", "", "tenant"]), image)


def _draw_image(rng: Random, first: int) -> tuple[int, int, str]:
    """One of four images that the same placeholders may stand for."""
    return first + rng.randrange(2), _IMAGE_TOKENS, rng.choice(["cat", "dog"])
