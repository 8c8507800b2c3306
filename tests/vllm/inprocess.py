"""One real vLLM engine in this process, stepped by the test.

The test sees what a client sees (tokens, log-probabilities, cached tokens), and what no client
does: the bytes of a request's blocks, free blocks, and kvstow's counters.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import VOCABULARY
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from vllm import LLM, SamplingParams

BLOCK = 32
CHUNK = 64
GARBAGE = 7.0
STEPS_S_MAX = 30.0
"""A test that waits for the engine gives up after so long; nothing here takes a tenth of it."""


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; the special ones are left out."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


@dataclass
class Answer:
    """What became of one request.

    Attributes:
        tokens: generated.
        cached: prompt tokens that were not computed, from the engine's cache or kvstow's.
        logprobs: of the whole vocabulary, for each generated token.
        prompt_logprobs: of each token of the prompt after the first, if asked for.
        blocks: ids of the first group's blocks that the request had before its last step; they hold
            what it computed until another request takes them. None after a single step.
        finish: why it ended, or None if it has not.
    """

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    finish: str | None = None


class Engine:
    """An engine that runs only while the test steps it. Made by `running`.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.answers: dict[str, Answer] = {}
        self._names: dict[str, str] = {}
        self._serial = 0
        self.free_at_start = self.free_blocks

    # ---- what a client does ------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        *,
        name: str | None = None,
        max_tokens: int = 4,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        content: Any = None,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
        uses_caches: bool | None = None,
    ) -> str:
        """Queue a request; returns the name that `answers` has it under.

        Args:
            content: a prompt of another kind than ``tokens``.
            uses_caches: whether anything may be reused, of the engine's own or of kvstow's; None leaves
                it to vLLM, which looks at what else is asked.
        """
        self._serial += 1
        name = name or f"request-{self._serial}"
        asked = content or TokensPrompt(prompt_token_ids=list(tokens))
        if salt is not None:
            asked["cache_salt"] = salt
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            logprobs=VOCABULARY if logprobs else None,
            prompt_logprobs=0 if prompt_logprobs else None,
            skip_reading_prefix_cache=None if uses_caches is None else not uses_caches,
        )
        self.answers[name] = Answer()
        self._names[name] = self.llm.llm_engine.add_request(name, asked, params, lora_request=lora)
        return name

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Queue a request and step until it has ended."""
        name = self.submit(tokens, **options)
        self.step_until(lambda: self.answers[name].finish is not None)
        return self.answers[name]

    def abort(self, name: str) -> None:
        """What happens when a client hangs up."""
        self.llm.llm_engine.abort_request([self._names[name]], internal=True)

    # ---- what the engine does ----------------------------------------------------------

    def step(self) -> None:
        """One step; note what it brought."""
        for name, internal in self._names.items():
            if internal in self.scheduler.requests:
                self.answers[name].blocks = self.block_ids(name) or self.answers[name].blocks
        for output in self.llm.llm_engine.step():
            answer = self.answers[output.request_id]
            completion = output.outputs[0]
            answer.tokens = list(completion.token_ids)
            answer.cached = output.num_cached_tokens or 0
            answer.finish = completion.finish_reason
            if output.prompt_logprobs:
                said = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                answer.prompt_logprobs = [row[token].logprob for token, row in said]
            if completion.logprobs is not None:
                answer.logprobs = [
                    {token: entry.logprob for token, entry in row.items()} for row in completion.logprobs
                ]

    def step_until(self, done: Callable[[], bool], step: Callable[[], None] | None = None) -> None:
        """Step until ``done()``, by ``step`` if that is given; fails if it takes absurdly long."""
        give_up_s = time.monotonic() + STEPS_S_MAX
        while not done():
            assert time.monotonic() < give_up_s, "the engine does not get there"
            (step or self.step)()

    def settle(self) -> None:
        """Step until no save, write or hold is in flight; a step needs a request to serve."""

        def is_quiet() -> bool:
            if self.scheduler.has_requests():
                return False
            if self.planner.saves_in_flight or self.planner.directory.pins():
                # Too short for a chunk: it leaves nothing behind.
                self.submit([7, 7, 7], max_tokens=1)
                return False
            return True

        self.step_until(is_quiet)

    def clear_own_cache(self) -> None:
        """Make the engine forget every prefix and overwrite its blocks; kvstow forgets nothing."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()
        for cache in self.kv_caches:
            # What lies in the blocks now must come from a forward or a load.
            cache.fill_(GARBAGE)

    def expect_baseline(self) -> None:
        """Everything that was taken has been given back."""
        self.settle()
        assert self.free_blocks == self.free_at_start
        assert self.planner.directory.pins() == 0
        assert not self.planner.saves_in_flight
        assert not self.scheduler.requests

    # ---- what only a test may look at --------------------------------------------------

    @property
    def planner(self) -> Any:
        # The halves have no public name: nobody but these tests looks inside a connector.
        return self.connector._scheduler.planner

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def block_tokens(self) -> int:
        return int(self.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    def counters(self) -> dict[str, float]:
        """kvstow's numbers of scheduler and worker together."""
        ours = self.connector._scheduler.recorder.snapshot()
        theirs = get_kv_transfer_group()._worker.recorder.snapshot()
        return {str(name): ours[name] + theirs[name] for name in ours}

    def counted_since(self, before: dict[str, float]) -> dict[str, float]:
        """What changed since ``before``."""
        now = self.counters()
        return {name: now[name] - before[name] for name in now if now[name] != before[name]}

    def block_ids(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(self._names[name])[0])

    def tables(self, name: str) -> list[list[int]]:
        """Block ids of the request by group, while the engine has it; 0 where it keeps nothing."""
        return [list(blocks) for blocks in self.scheduler.kv_cache_manager.get_block_ids(self._names[name])]

    def group_bytes(self, group: int, block: int) -> bytes:
        """What lies in a block of a group: the tensors of its layers, one after the other."""
        layers = self.core.vllm_config.compilation_config.static_forward_context
        pages = []
        for layer in self.scheduler.kv_cache_config.kv_cache_groups[group].layer_names:
            caches = layers[layer].kv_cache
            # A recurrent layer has several: one for each part of its state.
            for cache in caches if isinstance(caches, list | tuple) else [caches]:
                pages.append(cache[block].contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(pages)

    def request(self, name: str) -> Any:
        """The scheduler's request, while it has it."""
        return self.scheduler.requests[self._names[name]]

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """The tensors of all layers, in the order of the layers; block first."""
        return list(self.core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def kv_bytes(self, blocks: Sequence[int]) -> list[bytes]:
        """What lies in ``blocks``, over all layers: one run of bytes for each block."""
        return [
            b"".join(
                cache[block].contiguous().view(torch.uint8).numpy().tobytes() for cache in self.kv_caches
            )
            for block in blocks
        ]


@contextmanager
def running(model: Path, stow: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine with kvstow; afterwards its threads are gone.

    Args:
        model: folder.
        stow: kvstow's settings on top of a small arena and chunks of `CHUNK` tokens.
        options: vLLM's, on top of those under which its results are the same every time.
    """
    assert not has_kv_transfer_group(), "one engine at a time: vLLM keeps one worker's connector per process"
    try:
        llm = start(model, stow, **options)
    except BaseException:
        # Half a start leaves a connector, and the next engine would find it.
        ensure_kv_transfer_shutdown()
        raise
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow-")]
    assert not left, f"threads outlive the engine: {left}"


def start(model: Path, stow: dict[str, Any] | None = None, **options: Any) -> LLM:
    """Start vLLM; raises what it raises."""
    transfer = {
        "kv_connector": "StowConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"chunk_tokens": CHUNK, "arena_gib": 0.1} | (stow or {}),
    }
    transfer |= options.pop("transfer", {})
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 60,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "max_logprobs": VOCABULARY,
        "seed": 0,
        "skip_tokenizer_init": True,
    }
    return LLM(str(model), kv_transfer_config=transfer, **(defaults | options))


def ask_twice(engine: Engine, seed: int) -> int:
    """Tokens of a prompt that are cached the second time; both answers must be the same."""
    tokens = prompt(500, seed)
    first = engine.ask(tokens)
    engine.clear_own_cache()
    again = engine.ask(tokens)
    assert (first.cached, again.tokens) == (0, first.tokens)
    return again.cached


def second_turn(engine: Engine, seed: int) -> Answer:
    """A conversation: a prompt of 200 tokens and an answer of 150, then both with 20 more behind."""
    first = engine.ask(prompt(200, seed), max_tokens=150)
    engine.clear_own_cache()
    return engine.ask(prompt(200, seed) + first.tokens + prompt(20, seed + 1000))
