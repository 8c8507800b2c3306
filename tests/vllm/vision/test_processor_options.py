"""What the engine was told of image processing is in no image's hash: two of it share no bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inprocess import Answer, prompt, running
from vision_families import IMAGE, OPTIONS, VISION_END, VISION_START, asked, make_qwen2_vl, picture

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_same_image_processed_otherwise_is_a_miss(tmp_path: Path) -> None:
    model = make_qwen2_vl(tmp_path / "model")
    stow = {"disk_path": str(tmp_path / "disk")}

    def ask(options: dict[str, Any] | None) -> Answer:
        with running(model, stow, **OPTIONS, mm_processor_kwargs=options) as engine:
            # Not a whole number of patches: it is resized.
            tokens = [VISION_START, IMAGE, VISION_END, *prompt(440, seed=1)]
            answer = engine.ask([], content=asked(tokens, [picture(1, 120)]), logprobs=True)
            engine.expect_baseline()
            return answer

    smooth, coarse = ask(None), ask({"resample": 0})
    assert (smooth.cached, coarse.cached) == (0, 0)
    assert smooth.logprobs != coarse.logprobs
    assert ask(None).cached == 448
