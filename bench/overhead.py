"""What kvstow costs where nothing is reused: ``python bench/overhead.py [--json FILE]``.

SmolLM2-135M-Instruct in bfloat16 on vLLM for CPU. Three engines live at once in processes of their
own: without kvstow, with an arena, with arena and disk. They are asked one at a time, in an order
drawn anew each round, the same prompts: random tokens, no two alike, all sent at once, some tokens
generated for each. Throughput counts prompt and generated tokens; the ratio is of medians, with a
95% bootstrap interval over rounds.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Engine, EngineSpec, Prompt, bench_model, engine_options, random_prompt
from report import emit
from rounds import NO_TARGET, at_least, ratio_interval, spread

TARGET = 0.99
BLOCK_TOKENS = 32
ENGINE_BLOCKS = 300
WARM_UP_ROUNDS = 2
BARE = "without kvstow"
REST_S = 0.3
"""OpenMP threads of the engine asked before spin for up to 0.2 s after their last work."""


@dataclass(frozen=True)
class Workload:
    """What every round asks for."""

    prompts: int = 8
    prompt_tokens: int = 520
    output_tokens: int = 24

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens of a round."""
        return self.prompts * (self.prompt_tokens + self.output_tokens)


def specs(folder: Path, log: Path, threads: str | None) -> list[EngineSpec]:
    """The engines; ``folder`` is for the disk tier."""
    settings: Mapping[str, Mapping[str, Any] | None] = {
        BARE: None,
        "arena": {"arena_gib": 0.5},
        "arena and disk": {"arena_gib": 0.5, "disk_path": str(folder), "disk_gib": 2.0},
    }
    model = bench_model()
    return [
        EngineSpec(
            name=name,
            model=model,
            log=log,
            stow=stow,
            engine={
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks_override": ENGINE_BLOCKS,
                "max_model_len": 4096,
                "max_num_seqs": 8,
            },
            environ={} if threads is None else {"VLLM_CPU_OMP_THREADS_BIND": threads},
        )
        for name, stow in settings.items()
    ]


def measure(
    disk_root: Path, log: Path, rounds: int, workload: Workload = Workload(), threads: str | None = None
) -> list[dict[str, Any]]:
    """A row for each engine; ``disk_root`` is a folder on the disk that the last one uses."""
    disk_root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="kvstow-bench-", dir=disk_root))
    rng = random.Random(0)
    try:
        with ExitStack() as stack:
            engines = [stack.enter_context(Engine(spec)) for spec in specs(folder, log, threads)]
            _ask_in_turn(engines, WARM_UP_ROUNDS, workload, rng)
            seen = _ask_in_turn(engines, rounds, workload, rng)
            counters = {engine.name: engine.counters() for engine in engines}
    finally:
        shutil.rmtree(folder)
    rows = []
    for name, seconds in seen.items():
        value = statistics.median(seen[BARE]) / statistics.median(seconds)
        low, high = ratio_interval(seen[BARE], seconds, random.Random(0))
        rows.append(
            {
                "engine": name,
                "tokens_per_s": workload.tokens / statistics.median(seconds),
                "spread": spread(seconds),
                "rounds": len(seconds),
                "saved_chunks": int(counters[name].get("kvstow_saves", 0)),
                "written_chunks": int(counters[name].get("kvstow_disk_writes", 0)),
                "ratio": value,
                "ratio_95_low": low,
                "ratio_95_high": high,
                **(NO_TARGET if name == BARE else at_least(value, TARGET)),
            }
        )
    return rows


def _ask_in_turn(
    engines: Sequence[Engine], rounds: int, workload: Workload, rng: random.Random
) -> dict[str, list[float]]:
    """Seconds of every round, by engine."""
    seen: dict[str, list[float]] = {engine.name: [] for engine in engines}
    order = list(engines)
    for _ in range(rounds):
        prompts: list[Prompt] = [random_prompt(rng, workload.prompt_tokens) for _ in range(workload.prompts)]
        rng.shuffle(order)
        for engine in order:
            time.sleep(REST_S)
            seen[engine.name].append(engine.ask(prompts, workload.output_tokens))
    return seen


def main() -> None:
    """Measure and report."""
    options = engine_options(__doc__, rounds=30)
    root = options.root.absolute()
    rows = measure(root, root, options.rounds, threads=options.threads)
    emit("throughput without reuse, SmolLM2-135M, vLLM on CPU", rows, options.json)


if __name__ == "__main__":
    main()
