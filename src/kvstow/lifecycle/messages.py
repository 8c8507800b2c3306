"""What crosses between the scheduler's process and the workers: frozen, plain, picklable.

`Hello` goes up once, at start. `WorkOrder` goes down every step, the same to every rank;
`Report` comes back from each rank. Nothing else crosses.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

from kvstow.keys.ids import ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, GroupId
from kvstow.layout.resume import ResumeRule

RequestId = NewType("RequestId", str)
JobId = NewType("JobId", int)
Slot = NewType("Slot", int)
"""Index of a frame's place in a rank's arena, per group; each rank maps it to its own memory."""

PlaceInArena = tuple[GroupId, Slot]
"""A slot of one group."""

NO_SLOT = Slot(-1)
NO_JOB = JobId(0)


class Tier(StrEnum):
    """Where a node-local frame is kept."""

    ARENA = "arena"
    DISK = "disk"


class Held(msgspec.Struct, frozen=True):
    """One frame found on a rank's disk at start."""

    ref: ChunkRef
    touched_s: float


class Hello(msgspec.Struct, frozen=True):
    """What a rank tells the directory before the first request.

    Attributes:
        rank: who speaks.
        world_size: how many ranks the engine has.
        namespace: digest of all that must agree, without the rank.
        chunk_tokens: tokens per chunk.
        rules: what a resume needs, by group.
        arena_frame_bytes: what one frame takes in this rank's arena, by group; 0 where another rank
            keeps it for all.
        disk_frame_bytes: the same on this rank's disk.
        arena_slots: frames that this rank's arena holds, by group.
        disk_frames: frames that this rank's disk budget holds, by group; 0 without a disk.
        inventory: frames on this rank's disk that belong to the namespace.
        version: kvstow's version.
    """

    rank: Rank
    world_size: int
    namespace: NamespaceDigest
    chunk_tokens: int
    rules: tuple[ResumeRule, ...]
    arena_frame_bytes: tuple[int, ...]
    disk_frame_bytes: tuple[int, ...]
    arena_slots: tuple[int, ...]
    disk_frames: tuple[int, ...]
    inventory: tuple[Held, ...]
    version: str


class ImageOffer(msgspec.Struct, frozen=True):
    """The engine's word that a block is about to hold an image.

    Attributes:
        group: a STATE group.
        boundary: in tokens.
        block: holds the group's state exactly at ``boundary`` once the forward of this step has
            run; the engine may change it in any later step.
    """

    group: GroupId
    boundary: int
    block: BlockId


class LoadItem(msgspec.Struct, frozen=True):
    """One frame to bring into blocks.

    Attributes:
        ref: which chunk.
        source: the tier to read.
        slot: ARENA: the slot that holds it. DISK: the slot to fill on the way, or `NO_SLOT`
            to read through a buffer of the worker's own.
        blocks: the frame's blocks, in order.
        skip_blocks: so many of them, the first ones, stay untouched: they lie under the engine's
            floor, or are `NO_BLOCK` because they lie before its window.
    """

    ref: ChunkRef
    source: Tier
    slot: Slot
    blocks: tuple[BlockId, ...]
    skip_blocks: int = 0


class LoadJob(msgspec.Struct, frozen=True):
    """A promise to be kept. ``items`` is empty when it cannot be: report it failed at once."""

    job: JobId
    request: RequestId
    items: tuple[LoadItem, ...]


class SaveItem(msgspec.Struct, frozen=True):
    """One frame to copy out of blocks into an arena slot.

    Attributes:
        write: the job of its copy to disk, which follows, or `NO_JOB`.
    """

    ref: ChunkRef
    slot: Slot
    blocks: tuple[BlockId, ...]
    write: JobId = NO_JOB


class SaveJob(msgspec.Struct, frozen=True):
    """Frames of one request to save, in prefix order."""

    job: JobId
    request: RequestId
    items: tuple[SaveItem, ...]


class WriteItem(msgspec.Struct, frozen=True):
    """A READY arena frame to copy to disk."""

    job: JobId
    ref: ChunkRef
    slot: Slot


class Hold(msgspec.Struct, frozen=True):
    """A finished request whose blocks stay until ``jobs`` have ended on this rank."""

    request: RequestId
    jobs: tuple[JobId, ...]


class WorkOrder(msgspec.Struct, frozen=True):
    """What every rank does after this step.

    Attributes:
        removes: frames to delete from disk, before anything else.
        saves, loads, writes: new jobs.
        snapshots: saves whose blocks the engine may drop or change after this step: they are
            copied before the worker gives the step back, so they hold no block.
        fences: save jobs whose source blocks the engine is about to reuse: cancel what has
            not begun and wait for the copy that has, before the step's forward.
        holds: finished requests to report once their saves have ended.
        acknowledged: the number of the last report that was taken in, by rank.
    """

    removes: tuple[ChunkRef, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    snapshots: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    writes: tuple[WriteItem, ...] = ()
    fences: tuple[JobId, ...] = ()
    holds: tuple[Hold, ...] = ()
    acknowledged: tuple[int, ...] = ()


class Fault(StrEnum):
    """Why an item did not make it."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class FailedItem(msgspec.Struct, frozen=True):
    """An item of a job, by its index, and what went wrong with it."""

    item: int
    fault: Fault


class LoadReport(msgspec.Struct, frozen=True):
    """The end of a load on one rank; it succeeded if ``failed`` is empty and not ``refused``.

    Attributes:
        busy: slots that a reader which did not come back may still write; never reuse them
            until a report frees them.
    """

    job: JobId
    failed: tuple[FailedItem, ...] = ()
    refused: bool = False
    busy: tuple[PlaceInArena, ...] = ()


class SaveReport(msgspec.Struct, frozen=True):
    """The end of a save on one rank: the items named in ``failed`` hold nothing."""

    job: JobId
    failed: tuple[FailedItem, ...] = ()


class WriteReport(msgspec.Struct, frozen=True):
    """The end of one copy to disk on one rank."""

    job: JobId
    stored: bool


class Report(msgspec.Struct, frozen=True):
    """What ended on one rank since its last report.

    Attributes:
        number: 1 for the rank's first; see `kvstow.lifecycle.delivery`.
        freed: slots that were reported busy and are not any more.
    """

    rank: Rank
    number: int
    loads: tuple[LoadReport, ...] = ()
    saves: tuple[SaveReport, ...] = ()
    writes: tuple[WriteReport, ...] = ()
    freed: tuple[PlaceInArena, ...] = ()
