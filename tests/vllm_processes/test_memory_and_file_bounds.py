"""Arena and disk stay within their budgets under a workload that is far larger than both."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_on_disk import frames_in, occupied_bytes, strangers_in
from vllm_children import CHUNK, CHUNK_FRAME_BYTES, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm

ARENA_BYTES = 40 * CHUNK_FRAME_BYTES
DISK_BYTES = 64 * CHUNK_FRAME_BYTES
GIB = 1 << 30
PROMPTS = 24
CHUNKS_EACH = 9


def test_budgets_hold_and_what_was_asked_last_still_hits(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    prompts = [prompt(CHUNKS_EACH * CHUNK + 5, seed) for seed in range(PROMPTS)]
    engine = launcher.fork(
        llama,
        stow(arena_gib=ARENA_BYTES / GIB, disk_path=str(root), disk_gib=DISK_BYTES / GIB, disk_readers=2),
    )
    assert PROMPTS * CHUNKS_EACH * CHUNK_FRAME_BYTES > 3 * DISK_BYTES
    arena_peak = 0.0
    for tokens in prompts:
        assert engine.ask(tokens).text == oracle.ask(tokens).text
        assert occupied_bytes(root) <= DISK_BYTES + 2 * 4096  # and two locks
        arena_peak = max(arena_peak, engine.numbers()["arena_used_bytes"])
    # 2 of the 40 frames are for the readers.
    assert 30 * CHUNK_FRAME_BYTES < arena_peak <= 38 * CHUNK_FRAME_BYTES
    numbers = engine.numbers()
    assert numbers["evicted_arena"] > 0
    assert numbers["evicted_disk"] > 0

    # Two prompts fit in the engine's own cache; the third last does not.
    recent = prompts[-3]
    warm = engine.ask(recent)
    assert warm.cached == CHUNKS_EACH * CHUNK
    assert warm.text == oracle.ask(recent).text
    engine.stop()
    assert strangers_in(root) == []
    assert occupied_bytes(root) <= DISK_BYTES + 2 * 4096
    assert 32 < len(frames_in(root)) <= 64

    again = launcher.fork(llama, stow(disk_path=str(root), disk_gib=DISK_BYTES / GIB, role="load"))
    reloaded = again.ask(recent)
    assert reloaded.cached > 0
    assert reloaded.text == oracle.ask(recent).text
    again.stop()


def test_a_smaller_budget_after_a_restart_is_kept_from_the_start(
    launcher: Launcher, llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    engine = launcher.fork(llama, stow(disk_path=str(root)))
    first, last = prompt(600, 1), prompt(600, 2)
    engine.ask(first)
    engine.ask(last)
    engine.wait_until(lambda: len(frames_in(root)) == 18, "all frames are on disk")
    engine.stop()
    few_bytes = 10 * CHUNK_FRAME_BYTES
    again = launcher.fork(llama, stow(disk_path=str(root), disk_gib=few_bytes / GIB, role="load"))
    again.ask(prompt(20, 3))
    again.wait_until(lambda: len(frames_in(root)) <= 10, "the disk is within the new budget")
    assert again.ask(last).cached == 9 * CHUNK
    again.stop()
