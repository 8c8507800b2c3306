"""What a real engine does with the frames that still wait for a slow disk when it is stopped."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import slow_disk
from engine_child import serve_forked
from frames_on_disk import frames_in, strangers_in
from vllm_children import CHUNK, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm

CHUNKS_EACH = 13
TOKENS = prompt(CHUNKS_EACH * CHUNK + 7, 1)


def serve_on_a_slow_disk(write_s: float, connection: Connection, options: dict[str, Any]) -> None:
    slow_disk.make_slow(write_s)
    serve_forked(connection, options)


def expect_reload(launcher: Launcher, model: Path, root: Path, oracle: Engine, chunks: int) -> None:
    """A new engine on ``root`` loads the first ``chunks`` chunks, and answers right."""
    engine = launcher.fork(model, stow(disk_path=str(root), role="load"))
    answer = engine.ask(TOKENS)
    assert (answer.text, answer.cached) == (oracle.ask(TOKENS).text, chunks * CHUNK)
    engine.stop()
    assert strangers_in(root) == []


def test_what_waits_for_the_disk_has_the_whole_bound(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    # 2.6 s of writes, and nothing else to wait for.
    transfer = stow(disk_path=str(root), shutdown_s_max=4.0)
    engine = launcher.fork(llama, transfer, serve=partial(serve_on_a_slow_disk, 0.2))
    engine.ask(TOKENS)
    assert len(frames_in(root)) < CHUNKS_EACH, "the disk is behind"
    engine.stop()
    assert len(frames_in(root)) == CHUNKS_EACH
    assert engine.lines("still queued") == []
    expect_reload(launcher, llama, root, oracle, CHUNKS_EACH)


def test_what_does_not_fit_in_the_bound_is_dropped_and_told(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    transfer = stow(disk_path=str(root), shutdown_s_max=0.5)
    engine = launcher.fork(llama, transfer, serve=partial(serve_on_a_slow_disk, 0.2))
    engine.ask(TOKENS)
    engine.stop()
    kept = len(frames_in(root))
    assert kept < CHUNKS_EACH
    [told] = engine.lines("still queued")
    assert "raise shutdown_s_max" in told
    expect_reload(launcher, llama, root, oracle, kept)


def test_a_worker_says_what_it_loses_before_vllm_kills_it(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    # 13 s of writes; vLLM kills its workers 5 s after it asked them to end.
    engine = launcher.spawn(llama, stow(disk_path=str(root)), slow_disk.everywhere(1.0))
    [warned] = engine.lines("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=11")
    assert "shutdown_s_max=10" in warned
    engine.ask(TOKENS)
    engine.stop()
    kept = len(frames_in(root))
    assert 0 < kept < CHUNKS_EACH
    assert len(engine.lines("still queued after 4 s")) == 1
    assert all(frame.payload() is not None for frame in frames_in(root))
    expect_reload(launcher, llama, root, oracle, kept)
