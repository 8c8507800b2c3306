"""What a real engine does with the frames that still wait for a slow disk when it is stopped."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from engine_child import serve_forked
from frames_on_disk import frames_in, strangers_in
from vllm_children import CHUNK, Engine, Launcher, prompt, stow

from kvstow.stores.base import FrameName
from kvstow.stores.disk.store import DiskStore

pytestmark = pytest.mark.vllm

CHUNKS_EACH = 13
TOKENS = prompt(CHUNKS_EACH * CHUNK + 7, 1)
WRITE_S = 0.2


def serve_on_a_slow_disk(connection: Connection, options: dict[str, Any]) -> None:
    """An engine whose disk takes `WRITE_S` for each frame."""
    put = DiskStore.put

    def slow_put(store: DiskStore, name: FrameName, frame: memoryview) -> None:
        threading.Event().wait(WRITE_S)
        put(store, name, frame)

    DiskStore.put = slow_put  # type: ignore[method-assign]
    serve_forked(connection, options)


def test_what_waits_for_the_disk_is_written_within_the_bound(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    transfer = stow(disk_path=str(root), shutdown_s_max=60.0)
    engine = launcher.fork(llama, transfer, serve=serve_on_a_slow_disk)
    engine.ask(TOKENS)
    assert len(frames_in(root)) < CHUNKS_EACH, "the disk is behind"
    engine.stop()
    assert len(frames_in(root)) == CHUNKS_EACH
    assert engine.lines("still queued") == []
    again = launcher.fork(llama, stow(disk_path=str(root)))
    answer = again.ask(TOKENS)
    assert (answer.text, answer.cached) == (oracle.ask(TOKENS).text, CHUNKS_EACH * CHUNK)
    again.stop()


def test_what_does_not_fit_in_the_bound_is_dropped_and_told(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    transfer = stow(disk_path=str(root), shutdown_s_max=0.5)
    engine = launcher.fork(llama, transfer, serve=serve_on_a_slow_disk)
    engine.ask(TOKENS)
    engine.stop()
    kept = len(frames_in(root))
    assert kept < CHUNKS_EACH
    [told] = engine.lines("still queued")
    assert "raise shutdown_s_max" in told
    assert strangers_in(root) == []
    again = launcher.fork(llama, stow(disk_path=str(root)))
    answer = again.ask(TOKENS)
    assert (answer.text, answer.cached) == (oracle.ask(TOKENS).text, kept * CHUNK)
    again.stop()
