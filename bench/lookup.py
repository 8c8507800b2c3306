"""Lookup of a long prompt: ``python bench/lookup.py [--json FILE] [--entries 10000 1000000]``.

`Planner.match` of a new request of 128k tokens (512 chunks), with every chunk held in the arena, every
chunk held on disk only, or the first one missing; against a bare walk of a dictionary of as many
entries over the same chunk ids. Every timing takes another prompt, so that a large directory is
read from DRAM, as it would be. Sizes and cases take turns; medians.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from kvstow.clock import SystemClock
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.limits import PlannerLimits
from kvstow.lifecycle.messages import Held, Hello, RequestId, Tier
from kvstow.lifecycle.planner import Planner
from kvstow.lifecycle.requests import Lookup
from kvstow.metrics import Recorder
from report import emit
from rounds import NO_TARGET, at_most, interleave, spread

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 128 * 1024
TARGET_MS = 0.3
GROUP = GroupId(0)
RULE = ResumeRule(GroupKind.PAGED, BLOCK_TOKENS, CHUNK_TOKENS)

Prompt = list[ChunkId]


class Subject:
    """A planner whose directory holds ``entries`` chunks of prompts of ``prompt_chunks`` chunks each.

    Attributes:
        prompts: the chunk ids of every prompt.
        build_bytes: by how much the process grew for it, ids included.
    """

    def __init__(self, tier: Tier, entries: int, prompt_chunks: int) -> None:
        gc.collect()
        before = psutil.Process().memory_info().rss
        self.tier = tier
        self.entries = entries
        self.prompts = [
            [_chunk(f"{tier} {entries} {first} {index}") for index in range(prompt_chunks)]
            for first in range(0, entries, prompt_chunks)
        ]
        self.planner = _planner(tier, self.prompts)
        gc.collect()
        self.build_bytes = psutil.Process().memory_info().rss - before
        self.walked = {chunk: index for index, chunk in enumerate(chunk for p in self.prompts for chunk in p)}
        self._asked = 0

    def match(self, chunks: Prompt, wanted: Lookup) -> None:
        """Ask for a new request, and end it."""
        self._asked += 1
        request = RequestId(f"request {self._asked}")
        found = self.planner.match(request, chunks, len(chunks) * CHUNK_TOKENS + 1, 0)
        self.planner.finished(request)
        tokens = len(chunks) * CHUNK_TOKENS if wanted is Lookup.HIT else 0
        if found.lookup is not wanted or found.tokens != tokens:
            raise SystemExit(
                f"{found.tokens} tokens {found.lookup} of {tokens} tokens {wanted}: a wrong lookup"
            )

    def walk(self, chunks: Prompt) -> int:
        """The least that a lookup can do: find every chunk."""
        walked = self.walked
        found = 0
        for chunk in chunks:
            if chunk in walked:
                found += 1
        return found


def measure(entries: list[int], prompt_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of every tier, size and case; sizes in ascending order, the first is compared with."""
    rng = random.Random(0)
    prompt_chunks = prompt_tokens // CHUNK_TOKENS
    subjects = [Subject(tier, size, prompt_chunks) for tier in Tier for size in entries]
    # They do not change any more; a collection that walks millions of them is not a lookup.
    gc.freeze()
    absent = _chunk("absent")
    contenders: dict[str, Callable[[], object]] = {}
    for subject in subjects:
        name = f"{subject.tier} {subject.entries}"
        contenders[f"{name} hit"] = lambda s=subject: s.match(rng.choice(s.prompts), Lookup.HIT)  # type: ignore[misc]
        contenders[f"{name} miss"] = (
            lambda s=subject: s.match(  # type: ignore[misc]
                [absent, *rng.choice(s.prompts)[1:]], Lookup.MISS
            )
        )
        contenders[f"{name} walk"] = lambda s=subject: s.walk(rng.choice(s.prompts))  # type: ignore[misc]
    seen = interleave(contenders, rounds, rng)
    gc.unfreeze()

    rows: list[dict[str, Any]] = []
    for case in ("hit", "miss"):
        for subject in subjects:
            times = seen[f"{subject.tier} {subject.entries} {case}"]
            median_ms = statistics.median(times) * 1e3
            first_ms = statistics.median(seen[f"{subject.tier} {entries[0]} {case}"]) * 1e3
            rows.append(
                {
                    "tier": str(subject.tier),
                    "case": case,
                    "entries": subject.entries,
                    "median_ms": median_ms,
                    "spread": spread(times),
                    "dict_walk_ms": statistics.median(seen[f"{subject.tier} {subject.entries} walk"]) * 1e3,
                    "ratio_to_fewest": median_ms / first_ms,
                    "bytes_per_entry": subject.build_bytes // subject.entries,
                    **(at_most(median_ms, TARGET_MS) if prompt_tokens == PROMPT_TOKENS else NO_TARGET),
                }
            )
    return rows


def _planner(tier: Tier, prompts: list[Prompt]) -> Planner:
    refs = [
        ChunkRef(GROUP, index, chunk, prompt[index - 1] if index else ROOT_CHUNK)
        for prompt in prompts
        for index, chunk in enumerate(prompt)
    ]
    # A prompt's chunks were in use together, so the directory takes them over together.
    touched_s = {chunk: float(number) for number, prompt in enumerate(prompts) for chunk in prompt}
    limits = PlannerLimits(
        chunk_tokens=CHUNK_TOKENS,
        rules=(RULE,),
        loads=True,
        saves=True,
        min_load_tokens=CHUNK_TOKENS,
        load_timeout_s=30.0,
        pending_loads_max=64,
        pending_saves_max=256,
        pending_writes_max=1024,
        disk_cooldown_s=30.0,
    )
    planner = Planner(limits, SystemClock(), Recorder())
    on_disk = tier is Tier.DISK
    hello = Hello(
        rank=Rank(0),
        world_size=1,
        namespace=NamespaceDigest(bytes(32)),
        chunk_tokens=CHUNK_TOKENS,
        rules=(RULE,),
        arena_frame_bytes=(1 << 20,),
        disk_frame_bytes=(1 << 20,),
        arena_slots=(1 if on_disk else len(refs),),
        disk_frames=(len(refs) if on_disk else 0,),
        inventory=tuple(Held(ref, touched_s[ref.chunk]) for ref in refs) if on_disk else (),
        version="bench",
    )
    planner.open([hello])
    if not on_disk:
        for ref in refs:
            planner.directory.reserve_arena(ref)
            planner.directory.arena_filled(ref)
    return planner


def _chunk(name: str) -> ChunkId:
    return ChunkId(hashlib.sha256(name.encode()).digest())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    rows = measure(sorted(options.entries), PROMPT_TOKENS, options.rounds)
    emit("lookup of a prompt of 128k tokens", rows, options.json)


if __name__ == "__main__":
    main()
