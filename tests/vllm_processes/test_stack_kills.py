"""kvstow's own stack, without an engine, is killed twenty times while it saves and evicts."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from frames_on_disk import frames_in, occupied_bytes, rooted, snapshot, strangers_in
from stack_child import (
    CHUNKS_EACH,
    DISK_FRAMES,
    FRAME_BYTES,
    chunk_ids,
    load_all,
    payload_bytes,
    save_forever,
)
from vllm_children import END_S_MAX, Launcher

KILLS = 20
PROMPTS_MAX = 400


def test_twenty_kills_leave_whole_frames_and_nothing_else(launcher: Launcher, tmp_path: Path) -> None:
    root, beside = tmp_path / "root", tmp_path / "root-of-another"
    (beside / "r0" / "g0").mkdir(parents=True)
    (beside / "r0" / "g0" / ".draft-1-0").write_bytes(b"\x00" * 5000)
    (beside / "lock.r0").write_bytes(b"not ours")
    before = snapshot(beside)
    written = 0
    for kill in range(KILLS):
        known = {frame.chunk for frame in frames_in(root)}

        def new_frames(known: set[str] = known) -> int:
            return len({frame.chunk for frame in frames_in(root)} - known)

        child = launcher.forked(save_forever, root, kill)
        # Every kill at another place: in the middle of a prompt, and of the evictions for it.
        child.wait_until(lambda wanted=1 + 3 * (kill % 7): new_frames() >= wanted, "new frames are on disk")
        shared, sockets = child.shared_memory(), child.sockets()
        child.kill()
        written += new_frames()
        assert [path for path in shared | sockets if path.exists()] == []
        assert strangers_in(root) == []
        assert len(frames_in(root)) <= DISK_FRAMES
        assert occupied_bytes(root) <= DISK_FRAMES * FRAME_BYTES + 2 * 4096
        for frame in frames_in(root):
            assert frame.payload() == payload_bytes(bytes.fromhex(frame.chunk))
    assert snapshot(beside) == before
    assert written > 2 * DISK_FRAMES, "evictions were part of it"

    complete = {frame.chunk for frame in rooted(frames_in(root))}
    requests = [f"{kill}/{number}" for kill in range(KILLS) for number in range(PROMPTS_MAX)]
    theirs = [request for request in requests if chunk_ids(request)[0].hex() in complete]
    assert len(theirs) >= len(complete) / CHUNKS_EACH
    ours, other_end = multiprocessing.Pipe()
    launcher.forked(load_all, root, theirs, other_end)
    other_end.close()
    assert ours.poll(END_S_MAX)
    assert int(ours.recv_bytes()) == len(complete) > 0
