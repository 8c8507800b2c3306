"""Which images a prompt has, and where, decides its bytes: same text is not same prompt.

Both ways in which kvstow names a chunk: from the engine's block hashes, and by itself where the
engine's differ from process to process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family_check import Seen, together
from inprocess import CHUNK, Engine, prompt, running
from PIL import Image
from vision_families import IMAGE, OPTIONS, VISION_END, VISION_START, asked, make_qwen2_vl, picture

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL, LARGE = 112, 392
"""Pixels of a side: 16 and 196 tokens."""
HIT = 448


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_vl(tmp_path_factory.mktemp("qwen2-vl"))


@pytest.fixture(scope="module", params=[None, "7"], ids=["the engine's hashes", "hashes of our own"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            # The engine's block hashes start from it.
            patch.setenv("PYTHONHASHSEED", request.param)
        with running(model, **OPTIONS) as engine:
            yield engine


def ask(engine: Engine, content: dict[str, Any], **options: Any) -> Seen:
    """One request that the engine has forgotten before and forgets afterwards."""
    before = engine.counters()
    [seen] = together(engine, [content], CHUNK, **options)
    engine.clear_own_cache()
    assert engine.counted_since(before).get("loaded_tokens_arena", 0) == seen.answer.cached
    return seen


def cached(engine: Engine, content: dict[str, Any], **options: Any) -> int:
    return ask(engine, content, **options).answer.cached


def about(image: Image.Image, seed: int, before: int = 0, length: int = 460) -> dict[str, Any]:
    """``before`` tokens, an image, and text up to about ``length`` tokens."""
    head, tail = prompt(before, seed), prompt(length - before - 18, seed + 500)
    return asked([*head, VISION_START, IMAGE, VISION_END, *tail], [image])


def test_two_images_with_the_same_text_never_meet(engine: Engine) -> None:
    one, two = picture(1, SMALL), picture(2, SMALL)
    first, second = ask(engine, about(one, seed=10)), ask(engine, about(two, seed=10))
    assert (first.answer.cached, second.answer.cached) == (0, 0)
    # The images say something, so sharing would have been wrong.
    assert first.held != second.held
    assert first.answer.logprobs != second.answer.logprobs
    for image, computed in ((one, first), (two, second)):
        again = ask(engine, about(image, seed=10))
        assert again.answer.cached == HIT
        assert again.held == computed.held
        assert (again.answer.tokens, again.answer.logprobs) == (
            computed.answer.tokens,
            computed.answer.logprobs,
        )
    assert cached(engine, about(picture(3, SMALL), seed=10)) == 0
    engine.expect_baseline()


def test_text_before_an_image_is_shared_and_the_image_is_not(engine: Engine) -> None:
    assert cached(engine, about(picture(1, SMALL), seed=20, before=200)) == 0
    assert cached(engine, about(picture(2, SMALL), seed=20, before=200)) == 3 * CHUNK
    assert cached(engine, about(picture(1, SMALL), seed=20, before=200)) == HIT


def test_the_same_pixels_are_the_same_image(engine: Engine) -> None:
    """Content decides, not the object or the file it came from."""
    assert cached(engine, about(picture(4, SMALL), seed=30)) == 0
    assert cached(engine, about(picture(4, SMALL), seed=30)) == HIT
    changed = picture(4, SMALL)
    changed.putpixel((SMALL - 1, SMALL - 1), (0, 0, 0))
    assert cached(engine, about(changed, seed=30)) == 0


def test_where_an_image_begins_matters(engine: Engine) -> None:
    """The same tokens and the same two images, the other way round."""
    small, large = picture(5, SMALL), picture(6, LARGE)
    tokens = [VISION_START, IMAGE, IMAGE, VISION_END, *prompt(250, seed=40)]
    assert cached(engine, asked(tokens, [small, large])) == 0
    assert cached(engine, asked(tokens, [large, small])) == 0
    for images in ([small, large], [large, small]):
        assert cached(engine, asked(tokens, images)) == HIT


def test_a_hit_that_ends_inside_an_image(engine: Engine) -> None:
    """Its encoder runs again for the rest: the answer is that of the cold run."""
    image = picture(7, LARGE)
    assert cached(engine, about(image, seed=50, before=20)) == 0
    tokens = [*prompt(20, seed=50), VISION_START, IMAGE, VISION_END, *prompt(230, seed=51)]
    parted = ask(engine, asked(tokens, [image]))
    cold = ask(engine, asked(tokens, [image]), uses_caches=False)
    # The image's tokens are 21 to 216.
    assert (parted.answer.cached, cold.answer.cached) == (3 * CHUNK, 0)
    assert parted.answer.tokens == cold.answer.tokens
    assert parted.held == cold.held


def test_a_salt_keeps_the_same_image_apart(engine: Engine) -> None:
    content = about(picture(8, SMALL), seed=60)
    assert cached(engine, dict(content), salt="one") == 0
    assert cached(engine, dict(content), salt="two") == 0
    assert cached(engine, dict(content), salt="one") == HIT
