"""Servers, as an operator runs them: two on one folder, one after the other, and ``kvstow serve``."""

from __future__ import annotations

from pathlib import Path

import pytest
import slow_disk
from frames_on_disk import frames_in, snapshot, strangers_in
from vllm_children import PYTHON, Launcher, Server, prompt, server_of, wait_until

pytestmark = pytest.mark.vllm

CHUNK = 256
"""The default."""

SHORT, LONG = prompt(600, 1), prompt(900, 2)
ARENA_GIB = 0.05
FEWER_PROCESSES = ("--distributed-executor-backend", "uni")
"""Engine core and worker in one process, where the test is about something else: starts sooner."""


def kvstow_serve(model: Path, root: Path, *options: str) -> list[str]:
    command = [PYTHON, "-m", "kvstow.cli", "serve", str(model), "--disk", str(root)]
    return [*command, "--arena-gib", str(ARENA_GIB), *options]


def refusals(server: Server) -> list[str]:
    return server.lines("runs without a disk tier")


def holder_and_other(first: Server, second: Server) -> tuple[Server, Server]:
    """Which of two servers that started at once has the folder."""
    wait_until(
        lambda: bool(refusals(first) or refusals(second)), 240.0, "one of them is refused the folder", 0.5
    )
    first.wait_ready()
    second.wait_ready()
    assert bool(refusals(first)) != bool(refusals(second))
    return (second, first) if refusals(first) else (first, second)


def test_two_servers_on_one_folder_and_a_third_when_the_holder_stopped(
    launcher: Launcher, llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    command = kvstow_serve(llama, root)
    # So slow that something still waits for the disk when the holder is stopped.
    slow = slow_disk.everywhere(0.5)
    holder, other = holder_and_other(launcher.server(command, slow), launcher.server(command, slow))
    [refusal] = refusals(other)
    assert "is held by engine instance" in refusal
    assert any(f"pid {member.pid} on host" in refusal for member in holder.session())
    assert [line for line in other.lines("ERROR") if "kvstow" in line] == [refusal]

    cold = holder.ask(SHORT)
    assert cold.cached == 0
    holder.wait_until(lambda: len(frames_in(root)) == 2, "both whole chunks are on disk")
    own_hit = holder.ask(SHORT)
    assert own_hit.cached >= 2 * CHUNK
    files = snapshot(root)
    assert other.ask(SHORT).text == cold.text
    without_disk = other.ask(LONG)
    assert snapshot(root) == files, "the other touched nothing of the holder's"

    # A long prompt, and SIGTERM at once: what waits for the disk is still written.
    long_answer = holder.ask(LONG)
    assert len(frames_in(root)) < 2 + 3
    holder.stop()
    assert long_answer.text == without_disk.text
    assert len(frames_in(root)) == 2 + 3
    assert all(frame.payload() is not None for frame in frames_in(root))

    # Without the command, as README says: the same engine to kvstow.
    third = launcher.server(server_of(llama, disk_path=str(root), chunk_tokens=CHUNK, arena_gib=ARENA_GIB))
    third.wait_ready()
    assert refusals(third) == []
    reload = third.ask(LONG)
    assert (reload.text, reload.cached) == (long_answer.text, 3 * CHUNK)
    assert third.ask(SHORT).text == own_hit.text
    metrics = third.metrics()
    assert metrics["kvstow_loaded_tokens_total_disk"] == 5 * CHUNK
    assert metrics["kvstow_lookups_total"] >= 2
    third.stop()
    assert other.ask(SHORT).text == cold.text, "the one without a disk goes on"
    other.kill()
    assert strangers_in(root) == []


def test_replicas_of_one_server_keep_folders_of_their_own(
    launcher: Launcher, llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    server = launcher.server(kvstow_serve(llama, root, "--data-parallel-size", "2", *FEWER_PROCESSES))
    server.wait_ready()
    assert refusals(server) == []
    prompts = [prompt(600, seed) for seed in range(6)]
    answers = [server.ask(tokens) for tokens in prompts]
    replicas = [root, root / "dp1"]

    def frames_of(replica: Path) -> int:
        return sum(frame.path.is_relative_to(replica) for frame in frames_in(replica))

    server.wait_until(lambda: sum(map(frames_of, replicas)) == 12, "all frames are on disk")
    assert all(frames_of(replica) for replica in replicas), "both replicas answered and saved"
    again = [server.ask(tokens) for tokens in prompts]
    assert [answer.text for answer in again] == [answer.text for answer in answers]
    server.stop()
