"""Engines with different models take turns on one folder: neither sees the other's frames."""

from __future__ import annotations

from pathlib import Path

import pytest
from frames_on_disk import frames_in
from vllm_children import CHUNK, Engine, Launcher, prompt, stow

pytestmark = pytest.mark.vllm


def test_no_cross_hits_and_the_old_model_still_hits(
    launcher: Launcher, llama: Path, other_llama: Path, tmp_path: Path, oracle: Engine
) -> None:
    root = tmp_path / "root"
    tokens = prompt(500, 1)
    first = launcher.fork(llama, stow(disk_path=str(root)))
    first.ask(tokens)
    first.wait_until(lambda: len(frames_in(root)) == 7, "the first model's frames are on disk")
    first.stop()

    plain = launcher.fork(other_llama)
    right = plain.ask(tokens)
    plain.stop()
    assert right.text != oracle.ask(tokens).text
    second = launcher.fork(other_llama, stow(disk_path=str(root)))
    answer = second.ask(tokens)
    assert (answer.text, answer.cached) == (right.text, 0)
    second.wait_until(lambda: len(frames_in(root)) == 14, "the second model's frames are on disk too")
    second.stop()
    assert len({frame.namespace for frame in frames_in(root)}) == 2

    for model, text in ((llama, oracle.ask(tokens).text), (other_llama, right.text)):
        again = launcher.fork(model, stow(disk_path=str(root)))
        hit = again.ask(tokens)
        assert (hit.text, hit.cached) == (text, 7 * CHUNK)
        again.stop()
