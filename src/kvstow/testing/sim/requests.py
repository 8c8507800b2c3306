"""Prompts that share beginnings, and a request as the fake engine knows it."""

from __future__ import annotations

from enum import Enum

import msgspec

from kvstow.keys.chain import Extras, Media, TokenChain
from kvstow.layout.geometry import BlockId
from kvstow.lifecycle.messages import RequestId
from kvstow.testing.sim.oracle import Reading


class Prompt(msgspec.Struct, frozen=True):
    """What a client sends.

    Attributes:
        tokens: ids; an image's placeholders look the same whatever it shows.
        salt: keeps tenants apart, or "".
        image: (offset, placeholder tokens, content), or None.
    """

    tokens: tuple[int, ...]
    salt: str = ""
    image: tuple[int, int, str] | None = None

    def reading(self) -> Reading:
        """The oracle's view: nothing read yet."""
        begins = {} if self.image is None else {self.image[0]: f"{self.image[2]} {self.image[1]}"}
        return Reading(self.salt, begins)

    def chain(self, chunk_tokens: int) -> TokenChain:
        """The product's view: no chunk named yet."""
        media = () if self.image is None else (Media(self.image[0], self.image[1], self.image[2]),)
        return TokenChain(chunk_tokens, Extras(cache_salt=self.salt, media=media))


class RequestState(Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    GONE = "gone"


class SimRequest:
    """One request. `serial` tells uses of one id apart.

    Attributes:
        tables: block ids by group, in token order; -1 where the engine keeps nothing.
        computed: tokens that are computed, or scheduled to be.
        asked: whether a token of it is being computed whose value is not known yet.
        requery: whether the planner is asked when it is admitted.
    """

    def __init__(
        self, request_id: RequestId, serial: int, prompt: Prompt, outputs_max: int, chunk_tokens: int
    ) -> None:
        self.request_id = request_id
        self.serial = serial
        self.prompt = prompt
        self.outputs_max = outputs_max
        self.tokens: list[int] = []
        self.reading = prompt.reading()
        self.chain = prompt.chain(chunk_tokens)
        self.state = RequestState.WAITING
        self.tables: list[list[BlockId]] = []
        self.computed = 0
        self.asked = False
        self.requery = True
        self.extend(list(prompt.tokens))

    def extend(self, tokens: list[int]) -> None:
        """Append known tokens."""
        self.tokens.extend(tokens)
        self.reading.extend(tokens)
        self.chain.extend(tokens)

    @property
    def num_outputs(self) -> int:
        """Tokens said so far."""
        return len(self.tokens) - len(self.prompt.tokens)

    def __repr__(self) -> str:
        return f"{self.request_id}#{self.serial}"
