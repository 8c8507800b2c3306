"""All settings: one frozen struct, each key with its type, range, default and meaning.

The text of each key's ``Meta`` is the only place that says what the key means;
docs/configuration.md is made from it (`kvstow.config.reference`). Reading them from a mapping,
the environment and a file is `kvstow.config.load`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstow.errors import ConfigError

GIB = 1 << 30

ARENA_DEFAULT_MAX_BYTES = 4 * GIB
ARENA_DEFAULT_SHARE = 4
"""Without ``arena_gib`` the arena takes one part in so many of the available memory."""

_Gib = Annotated[float, Meta(gt=0, le=100_000)]
_Seconds = Annotated[float, Meta(gt=0, le=86400)]
_Queue = Annotated[int, Meta(ge=1, le=1 << 20)]
_Threads = Annotated[int, Meta(ge=1, le=256)]
_Path = Annotated[str, Meta(pattern="^/", extra={"wanted": "an absolute path"})]
_Name = Annotated[str, Meta(max_length=256, extra={"wanted": "at most 256 characters"})]
_Given = Annotated[str, Meta(min_length=1, max_length=256, extra={"wanted": "1 to 256 characters"})]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person may choose. Read by `kvstow.config.load.load_settings`.

    The constructor checks no types or ranges: it is for code, `load_settings` is for people.
    """

    arena_gib: Annotated[
        _Gib | None,
        Meta(
            description=(
                "DRAM for saved frames, in GiB, for the whole engine: its ranks share it. None takes a "
                "quarter of the memory that is available at start, at most 4. The budget is hard."
            )
        ),
    ] = None
    disk_path: Annotated[
        _Path | None,
        Meta(
            description=(
                "Folder of the disk tier; each rank makes a folder of its own in it. None: no disk tier. "
                "A folder belongs to one engine at a time and is locked while that runs."
            )
        ),
    ] = None
    disk_gib: Annotated[
        _Gib,
        Meta(
            description=(
                "Disk space for frames, in GiB, for the whole engine: its ranks share it. Enforced before "
                "every write, across restarts; evictions make room."
            )
        ),
    ] = 32.0
    chunk_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20)],
        Meta(
            description=(
                "Tokens per chunk, the unit of keying and storing: a whole number of blocks of every group. "
                "Smaller chunks lose fewer tokens at the end of a prefix, larger ones transfer faster. "
                "Frames saved with another value are not found. 0 takes the smallest that has 256 tokens or "
                "more; for a model with recurrent state the smallest there is, for states are kept only at "
                "the end of a chunk."
            )
        ),
    ] = 0
    image_interval_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 24)],
        Meta(
            description=(
                "Models with recurrent state: how far apart the states are that are kept, besides those at "
                "the end of a prompt and where prompts part. A whole number of chunks. 0 keeps no others: "
                "a prompt that parts from a stored one for the first time is computed from the last state "
                "before that. More states mean longer hits, more memory here and in the engine, and prefill "
                "in shorter steps (docs/vllm.md)."
            )
        ),
    ] = 0
    image_share: Annotated[
        Annotated[float, Meta(gt=0, lt=1, extra={"wanted": "a number above 0, below 1"})],
        Meta(
            description=(
                "Models with recurrent state: the part of the arena and of the disk that is for states; "
                "their frames are few and large."
            )
        ),
    ] = 0.25
    save: Annotated[
        Literal["all", "prompt"],
        Meta(
            description=(
                "Which chunks are saved: `all`, or only those that lie within the `prompt`. Generated "
                "tokens pay when conversations go on for several turns."
            )
        ),
    ] = "all"
    role: Annotated[
        Literal["both", "save", "load"],
        Meta(
            description=(
                "What this engine does: `both`, only `save` (it fills a store for others), or only `load` "
                "(it never writes)."
            )
        ),
    ] = "both"
    min_load_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 24)],
        Meta(
            description=(
                "A hit that would load fewer tokens than this is not promised and is computed instead. 0 "
                "stands for one chunk: every hit is loaded. Raise it where prefill is fast and the disk slow."
            )
        ),
    ] = 0
    load_timeout_s: Annotated[
        _Seconds,
        Meta(
            description=(
                "Bound on the work of one load, in seconds, from the moment its copy is handed to the "
                "device; also the bound on a queue in which nothing moves. Past it the request recomputes."
            )
        ),
    ] = 30.0
    save_timeout_s: Annotated[
        _Seconds,
        Meta(
            description=(
                "How long a save may wait in its queue, in seconds; one that waited longer is dropped, and "
                "its blocks are given back. A copy that has begun always ends: it only touches memory."
            )
        ),
    ] = 30.0
    pending_loads_max: Annotated[
        _Queue,
        Meta(
            description="Loads that may be promised and not yet ended. Beyond it a hit is not promised, and "
            "the request computes its prompt."
        ),
    ] = 64
    pending_saves_max: Annotated[
        _Queue,
        Meta(
            description="Save jobs that may be issued and not yet ended. Beyond it chunks are not saved; a "
            "later request with the same prefix saves them."
        ),
    ] = 256
    pending_writes_max: Annotated[
        _Queue,
        Meta(
            description="Frames that may wait for their copy to disk. Beyond it a frame stays in the arena "
            "only."
        ),
    ] = 1024
    load_threads: Annotated[
        _Threads,
        Meta(description="Threads per rank that run loads. Loads never wait behind saves: these are others."),
    ] = 2
    disk_readers: Annotated[
        _Threads,
        Meta(
            description="Threads per rank that read frames from disk, hence reads in flight. A fast NVMe "
            "disk takes more, a spinning one fewer."
        ),
    ] = 4
    copy_threads: Annotated[
        _Threads,
        Meta(
            description="Threads inside one gather or scatter. More than one pays only where cores are idle "
            "while the engine runs."
        ),
    ] = 1
    codec: Annotated[
        Literal["auto", "native", "torch", "reference"],
        Meta(
            description=(
                "What copies blocks: the C kernel (`native`), `torch`, or the slow `reference`. `auto` takes "
                "the fastest that works here; naming one that does not is an error at start."
            )
        ),
    ] = "auto"
    disk_cooldown_s: Annotated[
        Annotated[float, Meta(ge=0, le=86400)],
        Meta(
            description="After a time-out or an error of the disk, nothing is promised from it for so many "
            "seconds."
        ),
    ] = 30.0
    shutdown_s_max: Annotated[
        Annotated[float, Meta(ge=0, le=86400)],
        Meta(
            description="At shutdown, wait at most so many seconds for copies and writes in flight; what is "
            "left then is dropped."
        ),
    ] = 10.0
    self_test: Annotated[
        bool,
        Meta(
            description=(
                "At start, before the first request: send a pattern through a few unused blocks of every "
                "group, the codec, the arena and the disk, and compare every byte. Wrong bytes refuse the "
                "start. Takes well under a second."
            )
        ),
    ] = True
    weights_digest: Annotated[
        _Given | None,
        Meta(
            description=(
                "Stands in for the digest of the weight files, a draft model's too, where they cannot be "
                "read (remote or dummy weights). Any text; change it whenever the weights change, or wrong "
                "bytes will be shared."
            )
        ),
    ] = None
    namespace: Annotated[
        _Name,
        Meta(
            description=(
                "A free tag that is part of every key. Engines with different tags share nothing, whatever "
                "else is the same; a new tag starts an empty cache."
            )
        ),
    ] = ""

    @property
    def load_tokens_min(self) -> int:
        """Fewest tokens worth a load: ``min_load_tokens``, where 0 stands for one chunk."""
        return self.min_load_tokens or self.chunk_tokens

    @property
    def saves(self) -> bool:
        """Whether this engine saves at all."""
        return self.role != "load"

    @property
    def loads(self) -> bool:
        """Whether this engine loads at all."""
        return self.role != "save"


def resolve_arena_bytes(settings: Settings, available_bytes: int) -> int:
    """Size the arena of the whole engine, over all its ranks.

    Args:
        settings: ``arena_gib`` decides, or None for the default.
        available_bytes: memory that the machine can give now without swapping.

    Returns:
        Bytes: ``arena_gib``, or the smaller of 4 GiB and a quarter of what is available.

    Raises:
        ConfigError: ``arena_gib`` is more than is available.
    """
    if settings.arena_gib is None:
        return min(ARENA_DEFAULT_MAX_BYTES, available_bytes // ARENA_DEFAULT_SHARE)
    arena_bytes = int(settings.arena_gib * GIB)
    if arena_bytes > available_bytes:
        raise ConfigError(
            f"arena_gib={settings.arena_gib:g} is more than the {available_bytes / GIB:.2f} GiB of memory "
            f"available; use at most {math.floor(available_bytes / GIB * 100) / 100:g}, or none "
            f"for {resolve_arena_bytes(Settings(), available_bytes) / GIB:.2f}"
        )
    return arena_bytes


CHUNK_TOKENS_DEFAULT_MIN = 256


def choose_chunk(settings: Settings, block_tokens: Sequence[int], *, keeps_images: bool) -> Settings:
    """The settings with a chunk that suits the engine, where they leave it open.

    Args:
        settings: ``chunk_tokens`` may be 0.
        block_tokens: tokens that a chunk must be a whole number of, by group or whatever else counts.
        keeps_images: whether the model has recurrent state.
    """
    if settings.chunk_tokens:
        return settings
    unit = math.lcm(*block_tokens)
    chunks = 1 if keeps_images else -(-CHUNK_TOKENS_DEFAULT_MIN // unit)
    return msgspec.structs.replace(settings, chunk_tokens=chunks * unit)


def check_chunk(chunk_tokens: int, block_tokens: Sequence[int]) -> None:
    """Check that a chunk is a whole number of blocks of every group.

    Args:
        chunk_tokens: tokens per chunk.
        block_tokens: tokens per block, by group; at least one.

    Raises:
        ConfigError: it is not; names the values that would do.
    """
    unit = math.lcm(*block_tokens)
    if chunk_tokens > 0 and chunk_tokens % unit == 0:
        return
    first_bad = next((size for size in block_tokens if chunk_tokens % size), unit)
    below = chunk_tokens // unit * unit
    use = f"{below} or {below + unit}" if below > 0 else f"{unit}"
    others = sorted(set(block_tokens))
    groups = f" (groups have {', '.join(map(str, others))})" if len(others) > 1 else ""
    raise ConfigError(
        f"chunk_tokens={chunk_tokens} is not a multiple of block_tokens={first_bad}{groups}; use {use}"
    )
