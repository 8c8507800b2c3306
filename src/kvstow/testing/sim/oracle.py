"""What every word of KV memory must be: a function of what was read, and of where it lies.

Nothing here knows keys, chunks, blocks or stores; nothing of the code under test is used. A
token's identity is a chained digest of all tokens before it and of what else the prompt holds
(an adapter, a salt, an image); its words in memory are mixed from that identity and from the
group, the layer and the rank. Two words that may be exchanged by a mistake differ, whatever the
mistake is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """Scatter 64-bit words: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = words + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def place_words(group: int, layers: int, rank: int) -> Words:
    """One word for each layer of ``group`` on ``rank`` [layers]."""
    layer = np.arange(layers, dtype=np.uint64)
    return mix(layer | np.uint64(group << 32) | np.uint64(rank << 48))


class Reading:
    """The identities of a growing run of tokens.

    Args:
        extras: what, besides the tokens, decides the bytes; `extra_from[t]` names what begins
            at token ``t`` (an image), the rest holds from the first token on.
    """

    def __init__(self, extras: str, extra_from: dict[int, str]) -> None:
        self._extra_from = extra_from
        self._chain = hashlib.blake2b(f"extras {extras}".encode(), digest_size=8).digest()
        self._identities: list[int] = []
        self._array: Words = np.zeros(0, np.uint64)

    def extend(self, tokens: Sequence[int]) -> None:
        """Read further tokens."""
        for token in tokens:
            extra = self._extra_from.get(len(self._identities), "")
            self._chain = hashlib.blake2b(
                self._chain + token.to_bytes(4, "little") + extra.encode(), digest_size=8
            ).digest()
            self._identities.append(int.from_bytes(self._chain, "little"))

    def __len__(self) -> int:
        return len(self._identities)

    @property
    def identities(self) -> Words:
        """The identity of every token read [tokens]."""
        if len(self._array) != len(self._identities):
            self._array = np.array(self._identities, dtype=np.uint64)
        return self._array

    def token_words(self, first: int, stop: int, places: Words) -> Words:
        """What tokens [first, stop) leave in the layers at ``places`` [tokens, layers]."""
        return mix(self.identities[first:stop, None] ^ places[None, :])

    def state_words(self, boundary: int, places: Words) -> Words:
        """The state after ``boundary`` tokens (>= 1) in the layers at ``places`` [layers]."""
        return mix(~self.identities[boundary - 1] ^ places)


def fold(words: Words) -> int:
    """One number for all ``words``; any word that differs changes it."""
    return int(np.bitwise_xor.reduce(words, axis=None)) if words.size else 0


def next_token(folded: Sequence[int], vocabulary: int) -> int:
    """The token that a model would say, from the folds of what it read in each group."""
    digest = hashlib.blake2b(b"".join(value.to_bytes(8, "little") for value in folded), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % vocabulary
