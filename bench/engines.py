"""A vLLM engine on the bench's model, in a process of its own that answers one question at a time.

Several can live at once and be asked in turns, so that what disturbs the machine disturbs all of
them alike. An engine that is not asked does nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstow
from kvstow.adapters.vllm.plugin import MODULE, NAME
from kvstow.cli.demo.model import ensure_model
from kvstow.cli.paths import project_cache

Prompt = list[int]

ANSWER_S_MAX = 600.0
STOP_S_MAX = 60.0
FIRST_TOKEN, VOCABULARY = 1000, 45_000
"""Prompts are drawn from here: SmolLM2 has 49,152 tokens, the first of them special."""


@dataclass(frozen=True)
class EngineSpec:
    """How to make an engine.

    Attributes:
        name: for messages and the log's name.
        model: folder of the model.
        log: folder for the engine's output.
        stow: kvstow's settings, or None for an engine without it.
        engine: further arguments of vLLM's ``LLM``.
        environ: set in the engine's process before anything is imported.
    """

    name: str
    model: Path
    log: Path
    stow: Mapping[str, Any] | None
    engine: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)


def engine_options(description: str | None, rounds: int) -> argparse.Namespace:
    """The command line of a bench that runs engines: ``json``, ``root``, ``rounds``, ``threads``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--root", type=Path, default=Path("out/bench"), help="a folder on the disk to use")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", help="cores for each engine, as vLLM's VLLM_CPU_OMP_THREADS_BIND")
    return parser.parse_args()


def bench_model() -> Path:
    """SmolLM2-135M-Instruct in bfloat16; converted on first use (20 s)."""
    package = Path(kvstow.__file__).parent
    return ensure_model(project_cache(os.environ, package))


def random_prompt(rng: random.Random, tokens: int) -> Prompt:
    """A prompt that shares nothing with any other."""
    return [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(tokens)]


class Engine:
    """A handle on the process. One thread; whoever makes it calls `close`, or uses ``with``."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start it, and block until it is ready.

        Raises:
            SystemExit: it did not start; names its log.
        """
        self.name = spec.name
        self._log = spec.log / f"{spec.name}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, self._log, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def ask(self, prompts: Sequence[Prompt], output_tokens: int) -> float:
        """Seconds until all ``prompts``, sent at once, have their ``output_tokens``."""
        return float(self._call("ask", prompts, output_tokens))

    def forget(self) -> None:
        """Have the engine forget its own prefix cache, not kvstow's."""
        self._call("forget")

    def counters(self) -> dict[str, float]:
        """Its counters by name, tiers as ``name_tier``; those that start with ``kvstow_`` or
        ``vllm:prefix_cache``."""
        return dict(self._call("counters"))

    def close(self) -> None:
        """Stop it; killed if it does not within `STOP_S_MAX`."""
        with suppress(OSError):
            self._pipe.send(("stop", ()))
        self._process.join(STOP_S_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _call(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            if self._pipe.poll(ANSWER_S_MAX):
                return self._pipe.recv()
        except EOFError:
            pass
        self._process.kill()
        raise SystemExit(f"engine {self.name} ended or did not answer; see {self._log}")


# ---- in the engine's process -----------------------------------------------------------


def _serve(spec: EngineSpec, log: Path, pipe: Connection) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    os.environ.update(spec.environ)
    answers = _Answers(spec)
    pipe.send("ready")
    while True:
        what, arguments = pipe.recv()
        if what == "stop":
            answers.stop()
            return
        pipe.send(getattr(answers, what)(*arguments))


class _Answers:
    """What a handle may ask for, by the names of its methods."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM

        transfer = None
        if spec.stow is not None:
            transfer = KVTransferConfig(
                kv_connector=NAME,
                kv_connector_module_path=MODULE,
                kv_role="kv_both",
                kv_connector_extra_config=dict(spec.stow),
            )
        self._llm = LLM(
            model=str(spec.model),
            dtype="bfloat16",
            seed=0,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            **spec.engine,
        )

    def ask(self, prompts: Sequence[Prompt], output_tokens: int) -> float:
        from vllm.inputs import TokensPrompt

        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        start = time.perf_counter()
        self._llm.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def counters(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        # vLLM's own snapshot leaves out metrics that are not its own.
        found: dict[str, float] = {}
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            if sample.name.startswith(("kvstow_", "vllm:prefix_cache")) and "tier" in sample.labels:
                found[f"{sample.name.removesuffix('_total')}_{sample.labels['tier']}"] = sample.value
            elif sample.name.startswith(("kvstow_", "vllm:prefix_cache")):
                found[sample.name.removesuffix("_total")] = sample.value
        return found

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
