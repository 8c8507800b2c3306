"""First token of a long prompt, by where its keys and values are: ``python bench/reload.py [--json FILE]``.

SmolLM2-135M-Instruct in bfloat16 on vLLM for CPU, 7,500 random tokens, blocks of 32 tokens, 300
of them, eager, one output token; each row is the time of the same call. A round:

    cold      a prompt that nobody has seen (every prompt is new to the engine and to kvstow)
    hit       the same again: the engine's own prefix hit
    arena     after the engine forgot its prefix cache
    hit, cut  the same chunks from the engine's cache, and other tokens after them: the engine's own
              hit with as many tokens left to compute as after a reload
    disk      the prompt of the round before, which this round's has pushed out of the arena

An engine for each chunk size, asked in turns: a reload ends on a whole chunk, the engine's own hit on
a whole block, so with large chunks more tokens are left to compute. Between them an engine gets
short prompts until all saves and writes are reported. Where a prompt came from is checked by the
engine's and kvstow's counters. Reads of disk go past the page cache (O_DIRECT), and what it might
hold of the files is dropped before.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engines import Engine, EngineSpec, Prompt, bench_model, engine_options, random_prompt
from kvstow.stores.framing import frame_bytes
from report import emit
from rounds import NO_TARGET, at_least, at_most, spread

GIB = 1 << 30
PROMPT_TOKENS = 7500
CHUNK_TOKENS = (256, 64)
BLOCK_TOKENS = 32
ENGINE_BLOCKS = 300
DISK_READERS = 4
TOKEN_BYTES = 30 * 3 * 64 * 2 * 2
"""SmolLM2: 30 layers, 3 heads of 64, K and V, two bytes each."""
SETTLE_S_MAX = 30.0
PLACES = ("cold", "hit", "hit, cut", "arena", "disk")
QUERIES, HITS = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
ARENA, DISK = "kvstow_loaded_tokens_arena", "kvstow_loaded_tokens_disk"


class Subject:
    """An engine with an arena for one prompt and little more, and what it was asked."""

    def __init__(self, engine: Engine, disk: Path, prompt_tokens: int, chunk_tokens: int) -> None:
        self._engine = engine
        self._disk = disk
        self._rng = random.Random(chunk_tokens)
        self._tokens = prompt_tokens
        self.chunk_tokens = chunk_tokens
        # One token at least is left to compute.
        self._stored = (prompt_tokens - 1) // chunk_tokens * chunk_tokens
        self.seen: dict[str, list[float]] = {place: [] for place in PLACES}
        self._before = self._cold()

    @property
    def tokens_left(self) -> dict[str, int]:
        """Tokens that are left to compute, by place."""
        after_reload = self._tokens - self._stored
        after_hit = (self._tokens - 1) % BLOCK_TOKENS + 1
        return dict.fromkeys(PLACES, after_reload) | {"cold": self._tokens, "hit": after_hit}

    def round(self) -> None:
        """One of each place."""
        prompt = self._cold()
        self._time("hit", prompt, hits=(self._tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        self._engine.forget()
        self._time("arena", prompt, arena=self._stored)
        rest = random_prompt(self._rng, self._tokens - self._stored)
        self._time("hit, cut", prompt[: self._stored] + rest, hits=self._stored)
        self._engine.forget()
        drop_pages(self._disk)
        self._time("disk", self._before, disk=self._stored)
        self._before = prompt

    def _cold(self) -> Prompt:
        prompt = random_prompt(self._rng, self._tokens)
        self._time("cold", prompt)
        return prompt

    def _time(self, place: str, prompt: Prompt, hits: int = 0, arena: int = 0, disk: int = 0) -> None:
        before = self._engine.counters()
        seconds = self._engine.ask([prompt], output_tokens=1)
        after = self._settle()
        moved = {name: after.get(name, 0) - before.get(name, 0) for name in (HITS, ARENA, DISK)}
        if moved != {HITS: hits, ARENA: arena, DISK: disk}:
            raise SystemExit(f"{place}: wanted hits={hits} arena={arena} disk={disk} tokens, got {moved}")
        self.seen[place].append(seconds)

    def _settle(self) -> dict[str, float]:
        """Keep the engine stepping until every frame is on disk; its counters then."""
        give_up_s = time.monotonic() + SETTLE_S_MAX
        while time.monotonic() < give_up_s:
            self._engine.ask([random_prompt(self._rng, BLOCK_TOKENS // 2)], output_tokens=2)
            counters = self._engine.counters()
            if counters.get("kvstow_saves", 0) == counters.get("kvstow_disk_writes", 0):
                return counters
        raise SystemExit(f"saves and writes did not end within {SETTLE_S_MAX:g} s: {counters}")


def drop_pages(folder: Path) -> None:
    """Drop what the page cache holds of the files under ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def spec(folder: Path, log: Path, prompt_tokens: int, chunk_tokens: int, threads: str | None) -> EngineSpec:
    """The engine; ``folder`` is for the disk tier."""
    frames = prompt_tokens // chunk_tokens + DISK_READERS
    return EngineSpec(
        name=f"reload-{chunk_tokens}",
        model=bench_model(),
        log=log,
        stow={
            # One byte more: GiB are a float, and a slot less would be a wrong bench.
            "arena_gib": (frames * frame_bytes(chunk_tokens * TOKEN_BYTES) + 1) / GIB,
            "disk_path": str(folder),
            "disk_gib": 4.0,
            "disk_readers": DISK_READERS,
            "chunk_tokens": chunk_tokens,
        },
        engine={
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": ENGINE_BLOCKS,
            "max_model_len": 8192,
            "max_num_seqs": 1,
        },
        environ={} if threads is None else {"VLLM_CPU_OMP_THREADS_BIND": threads},
    )


def measure(
    disk_root: Path,
    log: Path,
    rounds: int,
    prompt_tokens: int = PROMPT_TOKENS,
    chunk_tokens: Sequence[int] = CHUNK_TOKENS,
    threads: str | None = None,
) -> list[dict[str, Any]]:
    """A row for each chunk size and place; ``disk_root`` is a folder on the disk to measure."""
    disk_root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvstow-bench-", dir=disk_root))
    try:
        with ExitStack() as stack:
            subjects = []
            for chunk in chunk_tokens:
                disk = folder / str(chunk)
                engine = Engine(spec(disk, log, prompt_tokens, chunk, threads))
                subjects.append(Subject(stack.enter_context(engine), disk, prompt_tokens, chunk))
            for _ in range(rounds):
                for subject in subjects:
                    subject.round()
    finally:
        shutil.rmtree(folder)
    return [row for subject in subjects for row in _rows(subject, prompt_tokens)]


def _rows(subject: Subject, prompt_tokens: int) -> list[dict[str, Any]]:
    # The first cold prompt of an engine pays for warming up.
    times = {place: seconds[1:] if place == "cold" else seconds for place, seconds in subject.seen.items()}
    medians = {place: statistics.median(seconds) for place, seconds in times.items()}
    return [
        {
            "chunk_tokens": subject.chunk_tokens,
            "place": place,
            "prompt_tokens": prompt_tokens,
            "tokens_left": subject.tokens_left[place],
            "first_token_s": medians[place],
            "spread": spread(times[place]),
            "rounds": len(times[place]),
            "to_hit": medians[place] / medians["hit"],
            "to_hit_cut": medians[place] / medians["hit, cut"],
            "faster_than_cold": medians["cold"] / medians[place],
            **_verdict(place, medians),
        }
        for place in PLACES
    ]


def _verdict(place: str, medians: dict[str, float]) -> dict[str, Any]:
    if place != "arena":
        return {**NO_TARGET, "target_cold": "-", "reached_cold": "-"}
    cold = at_least(medians["cold"] / medians["arena"], 50)
    return {
        **at_most(medians["arena"] / medians["hit"], 1.5),
        "target_cold": cold["target"],
        "reached_cold": cold["reached"],
    }


def main() -> None:
    """Measure and report."""
    options = engine_options(__doc__, rounds=5)
    root = options.root.absolute()
    rows = measure(root, root, options.rounds, threads=options.threads)
    emit(f"first token of {PROMPT_TOKENS} tokens, SmolLM2-135M, vLLM on CPU", rows, options.json)


if __name__ == "__main__":
    main()
