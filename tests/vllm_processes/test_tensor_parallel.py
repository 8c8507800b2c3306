"""Two ranks in two processes: each keeps its own half, and both hit or neither does.

The engine that writes and the one that reads have different seeds of Python's hash, so every hit
from disk here also says that keys do not depend on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_on_disk import FrameFile, frames_in, strangers_in
from vllm_children import CHUNK, Answer, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm

CHUNKS_EACH = 7
LENGTH = CHUNKS_EACH * CHUNK + 9
WHOLE, HOLE, ERASED, FLIPPED = range(4)
"""What becomes of each prompt's frames: nothing; one is missing on rank 1 at start; one is deleted
on rank 1, or damaged there, while the engine runs."""


def tensor_parallel(launcher: Launcher, model: Path, root: Path, hash_seed: str) -> Engine:
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONHASHSEED": hash_seed}
    return launcher.spawn(model, stow(disk_path=str(root)), environ, tensor_parallel_size=2)


def evict_own_cache(engine: Engine) -> None:
    """Ask so much that the engine's own blocks are all taken by other prompts."""
    for seed in (900, 901, 902):
        engine.ask(prompt(600, seed))


def frame_of(root: Path, rank: int, chunks: set[str], index: int) -> FrameFile:
    """A rank's frame of the prompt that wrote ``chunks``, at ``index``."""
    [frame] = [found for found in frames_in(root, rank) if found.chunk in chunks and found.index == index]
    return frame


def save_all(engine: Engine, root: Path, prompts: list[list[int]]) -> tuple[list[Answer], list[set[str]]]:
    """Ask each prompt, then again; the second answers are the engine's own prefix hits."""
    own_hits, chunks_of = [], []
    for number, tokens in enumerate(prompts):
        known = {frame.chunk for frame in frames_in(root)}
        assert engine.ask(tokens).cached == 0
        for rank in (0, 1):
            engine.wait_until(
                lambda rank=rank, count=(number + 1) * CHUNKS_EACH: len(frames_in(root, rank)) == count,
                f"the frames of rank {rank} are on disk",
            )
        chunks_of.append({frame.chunk for frame in frames_in(root)} - known)
        own_hits.append(engine.ask(tokens))
        assert own_hits[-1].cached >= CHUNKS_EACH * CHUNK
    return own_hits, chunks_of


def test_both_ranks_load_or_neither(launcher: Launcher, llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    prompts = [prompt(LENGTH, seed) for seed in range(4)]
    engine = tensor_parallel(launcher, llama, root, hash_seed="1")
    # Both ranks' hellos arrived: without them every lookup would be a silent miss.
    assert engine.lines("rank 0 of 2")
    assert engine.lines("rank 1 of 2")
    assert engine.lines("arena holds")
    own_hits, chunks_of = save_all(engine, root, prompts)
    ranks = [{frame.chunk: frame.path.read_bytes() for frame in frames_in(root, rank)} for rank in (0, 1)]
    assert ranks[0].keys() == ranks[1].keys()
    assert all(ranks[0][chunk] != ranks[1][chunk] for chunk in ranks[0]), "each rank has its own half"

    evict_own_cache(engine)
    before = engine.numbers()
    from_arena = engine.ask(prompts[WHOLE])
    assert from_arena.text == own_hits[WHOLE].text
    assert from_arena.cached == CHUNKS_EACH * CHUNK
    loaded = engine.numbers()["loaded_tokens_arena"] - before["loaded_tokens_arena"]
    assert loaded == CHUNKS_EACH * CHUNK
    engine.stop()

    frame_of(root, 1, chunks_of[HOLE], 3).path.unlink()
    engine = tensor_parallel(launcher, llama, root, hash_seed="random")
    expect_right_after_restart(engine, root, prompts, own_hits, chunks_of)
    engine.kill()
    assert strangers_in(root) == []


def expect_right_after_restart(
    engine: Engine, root: Path, prompts: list[list[int]], own_hits: list[Answer], chunks_of: list[set[str]]
) -> None:
    from_disk = engine.ask(prompts[WHOLE])
    assert from_disk.text == own_hits[WHOLE].text
    assert from_disk.cached == CHUNKS_EACH * CHUNK, "keys must not depend on PYTHONHASHSEED"
    numbers = engine.numbers()
    assert numbers["loaded_tokens_disk"] == CHUNKS_EACH * CHUNK
    assert numbers["disk_reads"] == 2 * CHUNKS_EACH, "each rank read its own frames"

    holed = engine.ask(prompts[HOLE])
    assert holed.text == own_hits[HOLE].text
    assert holed.cached == 3 * CHUNK, "the missing chunk is a miss on both ranks, and what follows it"
    assert engine.numbers()["load_failed"] == 0

    frame_of(root, 1, chunks_of[ERASED], 2).path.unlink()
    bad = frame_of(root, 1, chunks_of[FLIPPED], 2).path
    content = bytearray(bad.read_bytes())
    content[5000] ^= 0x10
    bad.write_bytes(content)
    for failures, number in enumerate((ERASED, FLIPPED), start=1):
        recomputed = engine.ask(prompts[number])
        assert recomputed.text == own_hits[number].text
        assert recomputed.cached <= 2 * CHUNK
        assert engine.numbers()["load_failed"] == failures
    assert engine.numbers()["corrupt_frames"] == 1

    # The engine goes on, and what was bad is saved again on both ranks.
    evict_own_cache(engine)
    for number in (ERASED, FLIPPED):
        healed = engine.ask(prompts[number])
        assert healed.text == own_hits[number].text
        assert healed.cached == CHUNKS_EACH * CHUNK
