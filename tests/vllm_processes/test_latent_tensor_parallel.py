"""Latents are the same on every rank: one copy is stored, and serves all."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import DEEPSEEK_V2
from frames_on_disk import frames_in
from vllm_children import Engine, Launcher, stow

pytestmark = pytest.mark.vllm


def test_one_stored_copy_serves_both_ranks(launcher: Launcher, tmp_path: Path) -> None:
    model, root = DEEPSEEK_V2.make(tmp_path / "model"), tmp_path / "disk"
    transfer = stow(chunk_tokens=DEEPSEEK_V2.chunk_tokens, disk_path=str(root))
    tokens = DEEPSEEK_V2.prompt(1)["prompt_token_ids"]
    chunks = (len(tokens) - 1) // DEEPSEEK_V2.chunk_tokens

    def start() -> Engine:
        environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        return launcher.spawn(model, transfer, environ, tensor_parallel_size=2, **DEEPSEEK_V2.options)

    engine = start()
    # Told once by each rank: in memory there is one copy too.
    assert len(engine.lines("of slots that all 2 ranks share")) == 2
    assert engine.ask(tokens).cached == 0
    engine.wait_until(lambda: len(frames_in(root, 0)) == chunks, "the frames are on disk")
    assert frames_in(root, 1) == []
    engine.forget()
    arena = engine.ask(tokens)
    numbers = engine.numbers()
    assert arena.cached == numbers["loaded_tokens_arena"] == chunks * DEEPSEEK_V2.chunk_tokens
    kept_bytes = sum(frame.path.stat().st_size for frame in frames_in(root))
    assert numbers["disk_used_bytes"] == numbers["arena_used_bytes"] == kept_bytes
    engine.stop()

    engine = start()
    disk = engine.ask(tokens)
    assert disk.cached == engine.numbers()["loaded_tokens_disk"] == arena.cached
    assert disk.text == arena.text
    engine.stop()
