"""A request as the planner knows it: one phase, one generation, its chunks and its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef, Rank
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.messages import Fault, JobId, LoadItem, PlaceInArena, RequestId, SaveItem


class Phase(Enum):
    """Where a request is in its life; see docs/design, section 5."""

    NEW = "new"
    MISSED = "missed"
    PROMISED = "promised"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


class Lookup(Enum):
    """What the planner answers to a match."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class Match(msgspec.Struct, frozen=True):
    """The answer to a match: how many tokens beyond ``computed`` would be loaded."""

    lookup: Lookup
    tokens: int = 0


MISS = Match(Lookup.MISS)
PENDING = Match(Lookup.PENDING)


class TrackedRequest:
    """One use of a request id."""

    __slots__ = (
        "boundary",
        "chunks",
        "denied",
        "floor",
        "generation",
        "next_save",
        "next_window",
        "phase",
        "request_id",
        "save_jobs",
    )

    def __init__(self, request_id: RequestId, generation: int) -> None:
        self.request_id = request_id
        self.generation = generation
        self.phase = Phase.NEW
        self.chunks: Sequence[ChunkId] = ()
        self.floor = 0
        self.boundary = 0
        # By group: an image that is bad says nothing about the chunk of the same id.
        self.denied: dict[GroupId, set[ChunkId]] = {}
        self.next_save = 0
        self.next_window: dict[GroupId, int] = {}
        self.save_jobs: set[JobId] = set()

    def ref(self, group: GroupId, index: int) -> ChunkRef:
        """One of its chunks, in one group."""
        parent = self.chunks[index - 1] if index else ROOT_CHUNK
        return ChunkRef(group, index, self.chunks[index], parent)

    def deny(self, group: GroupId, chunk: ChunkId) -> None:
        """Never promise this frame to the request again."""
        self.denied.setdefault(group, set()).add(chunk)


# A rank that was told to stop knows nothing of the frame; a slow one less than one that has read it.
_GRAVITY = (Fault.CANCELLED, Fault.UNAVAILABLE, Fault.TIMEOUT, Fault.ABSENT, Fault.CORRUPT)


class LoadRun:
    """A load that some rank has not reported yet, of the tokens from ``floor`` to ``boundary``."""

    __slots__ = (
        "boundary",
        "busy",
        "faults",
        "floor",
        "items",
        "ordered",
        "pinned",
        "refused",
        "request",
        "waiting",
    )

    def __init__(
        self, request: TrackedRequest, items: tuple[LoadItem, ...], pinned: list[ChunkRef], ranks: int
    ) -> None:
        self.request = request
        self.floor = request.floor
        self.boundary = request.boundary
        self.items = items
        self.pinned = pinned
        self.waiting = {Rank(rank) for rank in range(ranks)}
        self.faults: dict[int, Fault] = {}
        self.busy: dict[PlaceInArena, int] = {}
        self.refused = False
        self.ordered = (0.0, 0)  # seconds and steps

    def note_fault(self, item: int, fault: Fault) -> None:
        """One rank says what went wrong with ``item``: of all ranks' words the gravest counts."""
        known = self.faults.get(item, fault)
        self.faults[item] = max(known, fault, key=_GRAVITY.index)

    @property
    def tokens(self) -> int:
        """Tokens promised."""
        return self.boundary - self.floor


class SaveRun:
    """A save that some rank has not reported yet."""

    __slots__ = ("failed", "items", "pinned", "request", "stop", "waiting")

    def __init__(
        self,
        request: TrackedRequest,
        items: tuple[SaveItem, ...],
        pinned: list[ChunkRef],
        stop: int,
        ranks: int,
    ) -> None:
        self.request = request
        self.items = items
        self.pinned = pinned
        self.stop = stop
        self.waiting = {Rank(rank) for rank in range(ranks)}
        self.failed: set[int] = set()

    @property
    def chunks(self) -> int:
        """How many chunks it saves, in whatever groups."""
        return len({item.ref.chunk for item in self.items})


class WriteRun:
    """A copy to disk that some rank has not reported yet."""

    __slots__ = ("chunks", "ref", "stored", "waiting")

    def __init__(self, ref: ChunkRef, chunks: Sequence[ChunkId], ranks: int) -> None:
        self.ref = ref
        self.chunks = chunks
        self.waiting = {Rank(rank) for rank in range(ranks)}
        self.stored = True
