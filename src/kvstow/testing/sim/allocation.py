"""The fake engine's block tables: what a request is given, what it leaves behind, and its own hits."""

from __future__ import annotations

from kvstow.layout.geometry import NO_BLOCK, BlockId, GroupId, GroupKind
from kvstow.testing.sim.model import SimGroup, SimModel
from kvstow.testing.sim.pool import BlockPool
from kvstow.testing.sim.requests import SimRequest

FrozenTables = tuple[tuple[BlockId, ...], ...]


def frozen(tables: list[list[BlockId]]) -> FrozenTables:
    """Block tables as they are now."""
    return tuple(tuple(table) for table in tables)


class Allocator:
    """Gives blocks to requests, by the kind of each group. Blocks that a kind needs no more go back."""

    def __init__(self, model: SimModel, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.groups = [(GroupId(index), group) for index, group in enumerate(model.groups)]
        self._unit_tokens = model.unit_tokens

    def allocate(self, request: SimRequest, stop: int, loads_from: int | None = None) -> bool:
        """Give the request what it needs to hold ``stop`` tokens; False if there is not enough.

        Args:
            request: whose tables grow.
            stop: tokens.
            loads_from: the floor, if the tokens beyond it are to be loaded: then a window group
                needs only its window at ``stop``.
        """
        if not request.tables:
            request.tables = [[] for _ in self.groups]
        wanted: list[tuple[GroupId, int]] = []
        for group, spec in self.groups:
            wanted += [(group, index) for index in self._missing(request, group, spec, stop, loads_from)]
        blocks = self.pool.take(len(wanted))
        if blocks is None:
            return False
        for group, spec in self.groups:
            table = request.tables[group]
            table.extend([NO_BLOCK] * (-(-stop // spec.block_tokens) - len(table)))
        for (group, index), block in zip(wanted, blocks, strict=True):
            request.tables[group][index] = block
        return True

    def give_back(self, request: SimRequest) -> None:
        """Take all blocks from the request."""
        for table in request.tables:
            self._release(table)
        request.tables = []
        request.computed = 0

    def cut(self, request: SimRequest, floor: int) -> None:
        """Take the blocks that lie wholly beyond ``floor`` tokens."""
        for group, spec in self.groups:
            keep = -(-floor // spec.block_tokens)
            self._release(request.tables[group][keep:])
            del request.tables[group][keep:]
        request.computed = floor

    # ---- the engine's own prefix cache -------------------------------------------------

    def cache(self, request: SimRequest, stop: int) -> None:
        """Offer the request's whole blocks of ``stop`` tokens for reuse."""
        identities = request.reading.identities
        for group, spec in self.groups:
            table = request.tables[group]
            size = spec.block_tokens
            first = 0
            if spec.kind is GroupKind.STATE:
                if stop % size:
                    continue
                first = stop // size - 1
            for index in range(first, stop // size):
                if table[index] != NO_BLOCK:
                    self.pool.cache((group, int(identities[(index + 1) * size - 1])), table[index])

    def find_hit(self, request: SimRequest) -> int:
        """Tokens that the engine's own cache holds for the request, in every group."""
        unit = self._unit_tokens
        best = (len(request.tokens) - 1) // unit * unit
        for hit in range(best, 0, -unit):
            if all(self._hit_table(request, group, spec, hit) is not None for group, spec in self.groups):
                return hit
        return 0

    def take_hit(self, request: SimRequest, hit: int) -> None:
        """Begin the request's tables with what `find_hit` found."""
        request.tables = [[] for _ in self.groups]
        request.computed = hit
        if not hit:
            return
        for group, spec in self.groups:
            table = self._hit_table(request, group, spec, hit)
            assert table is not None
            self.pool.share(block for block in table if block != NO_BLOCK)
            request.tables[group] = table

    def _hit_table(
        self, request: SimRequest, group: GroupId, spec: SimGroup, hit: int
    ) -> list[BlockId] | None:
        """The group's table at ``hit``, from cached blocks, or None."""
        size = spec.block_tokens
        needed_from = 0
        if spec.kind is GroupKind.STATE:
            needed_from = hit // size - 1
        elif spec.kind is GroupKind.WINDOW:
            needed_from = max(0, hit - spec.window_tokens) // size
        table = [NO_BLOCK] * needed_from
        for index in range(needed_from, hit // size):
            block = self.pool.find((group, int(request.reading.identities[(index + 1) * size - 1])))
            if block is None:
                return None
            table.append(block)
        return table

    # ---- inside ------------------------------------------------------------------------

    def _missing(
        self, request: SimRequest, group: GroupId, spec: SimGroup, stop: int, loads_from: int | None
    ) -> list[int]:
        """Places of the group's table that need a block; those that it leaves behind are freed."""
        table = request.tables[group]
        size = spec.block_tokens
        end = -(-stop // size)
        if spec.kind is GroupKind.STATE:
            # The state that the next forward reads stays.
            self._drop(table, -(-request.computed // size) - 1)
            has_one = end <= len(table) and table[end - 1] != NO_BLOCK
            return [] if has_one else [end - 1]
        first = len(table)
        if spec.kind is GroupKind.WINDOW:
            self._drop(table, max(0, request.computed - spec.window_tokens) // size)
            if loads_from is not None:
                first = max(first, max(0, stop - spec.window_tokens) // size)
        return list(range(first, end))

    def _drop(self, table: list[BlockId], stop: int) -> None:
        """Give back the blocks of the first ``stop`` places."""
        stop = max(0, stop)
        self._release(table[:stop])
        table[:stop] = [NO_BLOCK] * len(table[:stop])

    def _release(self, table: list[BlockId]) -> None:
        # Deepest first: the start of a prefix is kept longest.
        self.pool.release(reversed([block for block in table if block != NO_BLOCK]))
