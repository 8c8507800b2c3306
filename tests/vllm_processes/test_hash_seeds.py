"""Keys do not depend on Python's hash seed: engines with different ones share a folder's frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_on_disk import frames_in
from vllm_children import CHUNK, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm

ONE_PROCESS = "0"


def test_engines_with_different_hash_seeds_hit_each_others_frames(
    launcher: Launcher, llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    tokens = prompt(500, 1)
    writer = launcher.spawn(
        llama,
        stow(disk_path=str(root)),
        {"PYTHONHASHSEED": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": ONE_PROCESS},
    )
    writer.ask(tokens)
    writer.wait_until(lambda: len(frames_in(root)) == 7, "the frames are on disk")
    writer.stop()
    names = {frame.path.name for frame in frames_in(root)}

    reader = launcher.spawn(
        llama,
        stow(disk_path=str(root)),
        {"PYTHONHASHSEED": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": ONE_PROCESS},
    )
    answer = reader.ask(tokens)
    assert answer.cached == 7 * CHUNK
    assert answer.text == oracle.ask(tokens).text
    reader.stop()
    assert {frame.path.name for frame in frames_in(root)} == names
