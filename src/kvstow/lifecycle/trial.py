"""One group's blocks in a self-test: which are used, what is put into them, what must be found there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstow.errors import ConfigError
from kvstow.keys.digest import digest
from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import BlockId, Group, GroupId, Layout, RegionId
from kvstow.lifecycle.messages import Tier

_NEIGHBOURS_MAX = 4
_GUARD_BYTES = 64
"""Looked at on either side of a block's share, whatever lies there."""

_CHUNK = ChunkId(digest(b"kvstow.self_test.v1"))

Bytes = npt.NDArray[np.uint8]


class EngineBlocks(Protocol):
    """Blocks as the engine itself addresses them. For the thread that runs the self-test."""

    def names(self, group: GroupId) -> Sequence[str]:
        """The group's tensors, each memory once."""
        ...

    def read(self, group: GroupId, tensor: int, block: BlockId) -> Bytes:
        """A copy of what a tensor shows of one block: uint8, flat, in the tensor's own order."""
        ...

    def write(self, group: GroupId, tensor: int, block: BlockId, content: Bytes) -> None:
        """Put back what `read` gave."""
        ...

    def peek(self, region: RegionId, start: int, stop: int) -> bytes:
        """A copy of some bytes of a region."""
        ...


class Trial:
    """One group's blocks: which are used, what is put into them, and what must be found there.

    Attributes:
        group: whose.
        targets: the blocks of one frame, in its order; none where the engine has fewer.
        neighbours: blocks next to some of them, which nothing may touch.
        ref: the frame. A chunk that is its own parent is at the end of no chain of hashes.
        told: the group, for messages.
    """

    def __init__(self, group: Group, layout: Layout, blocks: EngineBlocks, codec: str) -> None:
        self.group = group
        self.ref = ChunkRef(group.group, 0, _CHUNK, _CHUNK)
        self._blocks = blocks
        self.told = (
            f"KV cache group {group.group} ({group.kind}, {len(group.segments)} segments), codec {codec}"
        )
        self._names = blocks.names(group.group)
        count = layout.rule(group.group).frame_blocks
        self.targets = _spread(group.num_blocks, count)
        self.neighbours = _neighbours(self.targets, group.num_blocks)
        self._patterns = [
            self._make_patterns(tensor, self._read(tensor, self.targets[0]).size)
            for tensor in range(len(self._names) if self.targets else 0)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards the blocks hold what they hold now."""
        kept = {place: self._read(*place) for place in self._places()}
        try:
            yield
        finally:
            for (tensor, block), content in kept.items():
                self._blocks.write(self.group.group, tensor, block, content)

    def fill(self) -> None:
        """Give every byte of every block a value that depends on where it is."""
        for (tensor, block), content in self._expected(self.filled()):
            self._blocks.write(self.group.group, tensor, block, content)

    def overwrite(self) -> None:
        """Change every byte of the frame's blocks."""
        for tensor in range(len(self._names)):
            for place, block in enumerate(self.targets):
                self._blocks.write(self.group.group, tensor, block, ~self._patterns[tensor][place])

    def filled(self) -> dict[BlockId, int]:
        """Which pattern each block holds after `fill`."""
        return {block: place for place, block in enumerate((*self.targets, *self.neighbours))}

    def loaded(self, *, targets: Sequence[BlockId] = (), skip: int = 0) -> dict[BlockId, int]:
        """Which pattern each block holds after `overwrite` and a load; -1 - p is p overwritten."""
        expected = self.filled()
        expected |= {block: place for place, block in enumerate(targets)}
        return expected | {block: -1 - place for place, block in enumerate(self.targets[:skip])}

    def check(self, after: str, expected: Mapping[BlockId, int], tier: Tier) -> None:
        """Compare every byte of every block."""
        for (tensor, block), content in self._expected(expected):
            found = self._read(tensor, block)
            if not np.array_equal(found, content):
                named = "" if block in self.targets else "which it does not name, "
                where = f"after {after}, {self._names[tensor]}: block {block}"
                raise self.failed(f"{where}, {named}{_difference(found, content)}", tier)

    def check_payload(self, payload: memoryview) -> None:
        """Compare a saved frame with the bytes that lie where the layout says."""
        found = np.frombuffer(payload, np.uint8)
        at = 0
        for segment in self.group.segments:
            for block in self.targets:
                start = segment.offset_bytes + block * segment.block_stride_bytes
                content = self._blocks.peek(segment.region, start, start + segment.block_bytes)
                part = found[at : at + segment.block_bytes]
                at += segment.block_bytes
                if part.tobytes() != content:
                    raise self.failed(
                        f"after a save, {segment.name}: block {block}, "
                        f"{_difference(part, np.frombuffer(content, np.uint8))}",
                        Tier.ARENA,
                    )

    def around(self) -> list[tuple[str, BlockId, bytes]]:
        """What lies on either side of each share of the frame's blocks: padding, or anything."""
        found = []
        for segment in self.group.segments:
            for block in self.targets:
                start = segment.offset_bytes + block * segment.block_stride_bytes
                stop = start + segment.block_bytes
                before = self._blocks.peek(segment.region, max(0, start - _GUARD_BYTES), start)
                behind = self._blocks.peek(segment.region, stop, stop + _GUARD_BYTES)
                found.append((segment.name, block, before + behind))
        return found

    def check_around(self, before: list[tuple[str, BlockId, bytes]]) -> None:
        """Compare with what lay there when the blocks held the same."""
        for (name, block, content), (_, _, found) in zip(before, self.around(), strict=True):
            if found != content:
                raise self.failed(
                    f"after save and load, {name}: bytes next to block {block} were changed", Tier.ARENA
                )

    def failed(self, what: str, tier: Tier) -> ConfigError:
        """The error that refuses the start."""
        return ConfigError(
            f"self-test: {self.told}, tier {tier}: {what}. Requests would get wrong bytes, so the start is "
            f"refused; run without the connector, and report this with the layout from the log"
        )

    def _places(self) -> Iterator[tuple[int, BlockId]]:
        for tensor in range(len(self._names)):
            for block in (*self.targets, *self.neighbours):
                yield tensor, block

    def _expected(self, patterns: Mapping[BlockId, int]) -> Iterator[tuple[tuple[int, BlockId], Bytes]]:
        for tensor, block in self._places():
            place = patterns[block]
            content = self._patterns[tensor][place if place >= 0 else -1 - place]
            yield (tensor, block), content if place >= 0 else ~content

    def _make_patterns(self, tensor: int, size: int) -> npt.NDArray[np.uint8]:
        """A tensor's share of every block that is used: [blocks, bytes], no two alike."""
        seed = (self.group.group, tensor)
        shape = (len(self.targets) + len(self.neighbours), size)
        return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def _read(self, tensor: int, block: BlockId) -> Bytes:
        return self._blocks.read(self.group.group, tensor, block)


def _spread(num_blocks: int, count: int) -> tuple[BlockId, ...]:
    """So many blocks from the last down to the first, or none if there are fewer."""
    if count > num_blocks:
        return ()
    if count == 1:
        return (BlockId(num_blocks // 2),)
    return tuple(BlockId(index * (num_blocks - 1) // (count - 1)) for index in reversed(range(count)))


def _neighbours(targets: Sequence[BlockId], num_blocks: int) -> tuple[BlockId, ...]:
    """Blocks next to the last and the first of ``targets``, then to the others, up to a bound."""
    if not targets:
        return ()
    found: dict[BlockId, None] = {}
    for target in (targets[-1], *targets[:-1]):
        for block in (BlockId(target + 1), BlockId(target - 1)):
            if 0 <= block < num_blocks and block not in targets:
                found[block] = None
    return tuple(found)[:_NEIGHBOURS_MAX]


def _difference(found: Bytes, wanted: Bytes) -> str:
    """The first byte that is another one."""
    different = np.flatnonzero(found != wanted)
    first = int(different[0])
    return (
        f"byte {first} of {wanted.size} is {found[first]:#04x} and must be {wanted[first]:#04x} "
        f"({different.size} bytes differ)"
    )
