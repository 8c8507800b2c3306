"""What a test of an engine adapter must be able to do with the engine: the core, and abilities.

`EngineUnderTest` is what `EngineContract` and `bench_engine` ask of every engine with kvstow
attached; each further ability is a type of its own, and tests that need one skip an engine without it.
An adapter's tests implement them around the real engine, in this process or in another.

All calls come from one thread, and block until they have done what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from os import scandir
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from kvstow.stores.disk.names import fans_under, ref_of, shares_under

Tokens = tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """What became of one request.

    Attributes:
        tokens: said, greedily.
        own_hit: tokens of the engine's own prefix cache that the request began with.
        loaded: tokens that kvstow brought beyond them. Both are of the first time that the request
            was computed at all: a load that failed is not counted, nor one after a preemption.
    """

    tokens: Tokens
    own_hit: int
    loaded: int


class EngineUnderTest(Protocol):
    """An engine with kvstow attached: DRAM, and a disk that outlives it.

    It loads and saves all it can (no least size of a load), runs four requests of ``4 * resume_tokens``
    at once or more, and keeps in DRAM and on disk at least ``64 * resume_tokens`` tokens. It says the
    same tokens to the same prompt however the prompt was split into steps and batches: greedily, and in
    a precision with which ties do not happen. Where it reads memory that was neither computed nor loaded,
    it should say something else: `forget_own_cache` best fills the blocks with rubbish.
    """

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        ...

    @property
    def resume_tokens(self) -> int:
        """A prompt that was computed alone can be resumed at every multiple of this: whole chunks.

        A chunk, unless images of state are taken at some boundaries only.
        """
        ...

    @property
    def vocabulary(self) -> range:
        """Tokens that a prompt may have."""
        ...

    @property
    def room_tokens(self) -> int:
        """About how many tokens the engine's blocks hold, over all requests that run."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request and no copy holds; those of the engine's prefix cache included."""
        ...

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        """Queue a request that says exactly ``outputs`` tokens.

        Args:
            name: the id that the engine, and so kvstow, knows it by. One of a request that has ended
                may come again after `settle`.
            prompt: its tokens.
            outputs: how many tokens to say.
            salt: keeps its tenant's cache apart, or "".
        """
        ...

    def abort(self, name: str) -> None:
        """Do what happens when the client of a request that has not ended goes away."""
        ...

    def finish(self, names: Sequence[str]) -> list[Answer]:
        """Run until these requests have come to their end; their answers, in this order."""
        ...

    def recompute(self, prompt: Tokens, outputs: int, salt: str = "") -> Tokens:
        """What the model says if nothing is reused: no cache is read, by the engine or by kvstow.

        It may be computed by another engine, and may leave something in the caches of this one.
        """
        ...

    def settle(self) -> None:
        """Run until nothing is left to do: no request, no copy, no write to disk."""
        ...

    def forget_own_cache(self) -> None:
        """Settle, and make the engine forget every prefix. kvstow forgets nothing."""
        ...

    def restart(self) -> None:
        """Stop the engine in order, and start it anew over the same disk."""
        ...


@runtime_checkable
class HoldsCopies(EngineUnderTest, Protocol):
    """Its copies can be stopped at a door, and the engine goes on meanwhile."""

    def hold_loads(self) -> AbstractContextManager[None]:
        """Inside, no load that is ordered gets as far as writing a block; afterwards all do."""
        ...

    def hold_saves(self) -> AbstractContextManager[None]:
        """Inside, no save that may wait gets as far as reading a block; afterwards all do."""
        ...

    def wait_loading(self, name: str) -> None:
        """Run until a load of this request is ordered. Called inside `hold_loads`."""
        ...


@runtime_checkable
class CanBeKilled(EngineUnderTest, Protocol):
    """It can end without any order."""

    def kill(self) -> None:
        """End every process of the engine as SIGKILL does, and start anew over the same disk."""
        ...


@runtime_checkable
class BreaksItsDisk(EngineUnderTest, Protocol):
    """Its disk can fail."""

    def break_disk(self) -> None:
        """From here on every read and write of a frame fails."""
        ...

    def mend_disk(self) -> None:
        """None fails any more, and as much time has passed as kvstow leaves a disk to come back."""
        ...


@runtime_checkable
class DamagesFrames(EngineUnderTest, Protocol):
    """The bytes of its frames can change on disk."""

    def damage_frames(self) -> int:
        """Change a byte of every frame on disk, and nothing in memory; how many there are.

        `damage_frames_under` does it, where the test can reach the folder.
        """
        ...


@runtime_checkable
class CountsPreemptions(EngineUnderTest, Protocol):
    """It takes blocks away from requests that run, and says how often."""

    @property
    def num_preemptions(self) -> int:
        """How often it did since it was started."""
        ...


def damage_frames_under(root: Path) -> int:
    """Change a byte in the middle of every frame under a disk root; how many there are.

    Args:
        root: the folder that the engine's disk tier was given.
    """
    paths = list(_frames_under(root))
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    return len(paths)


def _frames_under(root: Path) -> Iterator[Path]:
    for share, _ in shares_under(str(root)):
        for fan, group in fans_under(share):
            for entry in scandir(fan):
                if ref_of(entry.name, group) is not None:
                    yield Path(entry.path)
