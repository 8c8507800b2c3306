"""A real engine is killed while it saves: nothing is left behind, and nothing wrong is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_on_disk import FrameFile, frames_in, rooted, snapshot, strangers_in
from vllm_children import CHUNK, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm

KILLS = 3
PROMPTS_EACH = 6
CHUNKS_EACH = 13
LENGTH = CHUNKS_EACH * CHUNK + 7


def neighbours(root: Path) -> list[Path]:
    """Folders of others, beside the root and in it, with names like ours."""
    beside, inside = root.parent / "neighbour", root / "neighbour"
    for folder in (beside, inside):
        (folder / "r0" / "g0").mkdir(parents=True)
        (folder / "lock.r0").write_bytes(b"not ours")
        (folder / "r0" / "g0" / ".draft-1-0").write_bytes(b"\x00" * 5000)
    return [beside, inside]


@pytest.mark.parametrize("after_frames", [(1, 9, 20)])
def test_killed_while_it_writes_behind(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine, after_frames: tuple[int, ...]
) -> None:
    root = tmp_path / "root"
    others = neighbours(root)
    before = [snapshot(folder) for folder in others]
    foreign = set(strangers_in(root))
    asked: list[list[int]] = []
    for kill, more in enumerate(after_frames):
        known = len(frames_in(root))
        engine = launcher.fork(llama, stow(disk_path=str(root)))
        batch = [prompt(LENGTH, 100 * kill + number) for number in range(PROMPTS_EACH)]
        for tokens in batch:
            engine.say({"ask": tokens})
        asked += batch
        engine.wait_until(
            lambda known=known, more=more: len(frames_in(root)) >= known + more, "frames appear on disk"
        )
        shared, sockets = engine.shared_memory(), engine.sockets()
        engine.kill()
        assert len(frames_in(root)) < known + PROMPTS_EACH * CHUNKS_EACH, "it was killed too late to matter"
        assert [path for path in shared | sockets if path.exists()] == []
        assert set(strangers_in(root)) == foreign
        assert all(frame.payload() is not None for frame in frames_in(root))
    assert [snapshot(folder) for folder in others] == before

    complete = rooted(frames_in(root))
    again = launcher.fork(llama, stow(disk_path=str(root), role="load"))
    answers = [again.ask(tokens) for tokens in asked]
    assert sum(answer.cached for answer in answers) == CHUNK * len(complete) > 0
    assert [answer.text for answer in answers] == [oracle.ask(tokens).text for tokens in asked]
    again.stop()


def damage(frame: FrameFile) -> None:
    """Flip one bit in the middle of the payload."""
    content = bytearray(frame.path.read_bytes())
    content[len(content) // 2] ^= 1
    frame.path.write_bytes(content)


def test_a_file_that_a_crash_of_the_machine_left_short_or_flipped_is_a_miss(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    tokens = [prompt(LENGTH, seed) for seed in range(2)]
    engine = launcher.fork(llama, stow(disk_path=str(root)))
    chunks: list[set[str]] = []
    for number, asked in enumerate(tokens, start=1):
        engine.ask(asked)
        engine.wait_until(
            lambda number=number: len(frames_in(root)) == number * CHUNKS_EACH, "frames on disk"
        )
        chunks.append({frame.chunk for frame in frames_in(root)}.difference(*chunks))
    engine.kill()
    # One bad frame for each prompt: a load that failed at one need not look at the next.
    for frame in frames_in(root):
        if frame.index == 4 and frame.chunk in chunks[0]:
            damage(frame)
        if frame.index == 6 and frame.chunk in chunks[1]:
            frame.path.write_bytes(frame.path.read_bytes()[:5000])
    again = launcher.fork(llama, stow(disk_path=str(root)))
    for asked, good in zip(tokens, (4, 6), strict=True):
        answer = again.ask(asked)
        assert answer.text == oracle.ask(asked).text
        assert answer.cached <= good * CHUNK
    numbers = again.numbers()
    assert numbers["load_failed"] == 2
    assert numbers["corrupt_frames"] == 2
    again.wait_until(
        lambda: (
            len(frames_in(root)) == 2 * CHUNKS_EACH
            and all(frame.payload() is not None for frame in frames_in(root))
        ),
        "the bad frames are written anew",
    )
    again.stop()
