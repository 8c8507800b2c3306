"""One rank's KV memory: the words that are there, and the words that the engine believes in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstow.layout.geometry import BlockId, GroupId, GroupKind
from kvstow.testing.sim.model import SimModel
from kvstow.testing.sim.oracle import Reading, Words, fold, place_words

Table = Sequence[BlockId]


class RankMemory:
    """Pages of all blocks on one rank.

    The forward writes words and believes them; a load that the engine was told is complete is
    believed without having been looked at. `wrong` compares the two.

    Args:
        model: what the pages hold.
        rank: whose memory it is.
        num_blocks: pages.
        noise: seed of what lies there at first.
    """

    def __init__(self, model: SimModel, rank: int, num_blocks: int, noise: int) -> None:
        shape = (num_blocks, model.page_words)
        self._model = model
        self._rank = rank
        self._places = [
            place_words(index, group.layers, 0 if group.replicated else rank)
            for index, group in enumerate(model.groups)
        ]
        self._words: Words = np.random.default_rng(noise).integers(0, 1 << 63, shape, dtype=np.uint64)
        self._believed: Words = np.zeros(shape, np.uint64)
        self._known = np.zeros(shape, np.bool_)

    @property
    def region(self) -> npt.NDArray[np.uint8]:
        """All pages as flat bytes, as a codec takes them."""
        return self._words.view(np.uint8).reshape(-1)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Blocks have a new owner: what lies in them means nothing."""
        self._known[list(blocks)] = False

    def forward(self, group: GroupId, table: Table, reading: Reading, first: int, stop: int) -> None:
        """Compute tokens [first, stop): write their words, and believe them."""
        blocks, columns, words = self._expected(group, table, reading, first, stop)
        self._words[blocks, columns] = words
        self._believed[blocks, columns] = words
        self._known[blocks, columns] = True

    def believe(self, group: GroupId, table: Table, reading: Reading, first: int, stop: int) -> None:
        """The engine was told that tokens [first, stop) (or the state at ``stop``) are loaded."""
        blocks, columns, words = self._expected(group, table, reading, first, stop)
        self._believed[blocks, columns] = words
        self._known[blocks, columns] = True

    def fold(self, group: GroupId, table: Table, reading: Reading, stop: int) -> int:
        """What a forward that ends at ``stop`` reads of ``group``, as one number."""
        blocks, columns, _ = self._expected(group, table, reading, self._needed_from(group, stop), stop)
        return fold(self._words[blocks, columns])

    def fold_expected(self, group: GroupId, reading: Reading, stop: int) -> int:
        """The same from the oracle alone."""
        return fold(self._oracle(group, reading, self._needed_from(group, stop), stop))

    def knows(self, group: GroupId, table: Table, stop: int) -> bool:
        """Whether the engine has a right to compute on from ``stop``: it believes all it needs."""
        if stop == 0:
            return True
        blocks, columns = self._cells(group, table, self._needed_from(group, stop), stop)
        return bool(self._known[blocks, columns].all())

    def wrong(self) -> list[BlockId]:
        """Blocks that hold something else than the engine believes."""
        differs = (self._words != self._believed) & self._known
        if not differs.any():
            return []
        return [BlockId(int(block)) for block in np.flatnonzero(differs.any(axis=1))]

    def expected_frame(self, group: GroupId, reading: Reading, first: int, stop: int) -> bytes:
        """The payload of a frame that holds tokens [first, stop) (or the state at ``stop``)."""
        words = self._oracle(group, reading, first, stop)
        if self._model.groups[group].kind is GroupKind.STATE:
            return words.tobytes()
        # Segment-major: a layer's tokens lie together.
        return np.ascontiguousarray(words.T).tobytes()

    def _needed_from(self, group: GroupId, stop: int) -> int:
        spec = self._model.groups[group]
        return max(0, stop - spec.window_tokens) if spec.kind is GroupKind.WINDOW else 0

    def _oracle(self, group: GroupId, reading: Reading, first: int, stop: int) -> Words:
        if self._model.groups[group].kind is GroupKind.STATE:
            return reading.state_words(stop, self._places[group])
        return reading.token_words(first, stop, self._places[group])

    def _expected(
        self, group: GroupId, table: Table, reading: Reading, first: int, stop: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Words]:
        blocks, columns = self._cells(group, table, first, stop)
        return blocks, columns, self._oracle(group, reading, first, stop)

    def _cells(
        self, group: GroupId, table: Table, first: int, stop: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Where the words of tokens [first, stop) lie: [tokens, 1] and [tokens, layers]."""
        spec = self._model.groups[group]
        layers = np.arange(spec.layers)
        if spec.kind is GroupKind.STATE:
            block = table[-(-stop // spec.block_tokens) - 1]
            if block < 0:
                raise AssertionError(f"group {group}: no block for the state at {stop}")
            return np.array(block), layers
        tokens = np.arange(first, stop)
        blocks = np.array(table, dtype=np.intp)[tokens // spec.block_tokens]
        if (blocks < 0).any():
            raise AssertionError(
                f"group {group}: tokens {first}..{stop} reach into blocks that are not there"
            )
        columns = (tokens % spec.block_tokens)[:, None] + layers[None, :] * spec.block_tokens
        return blocks[:, None], columns
