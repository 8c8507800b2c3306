"""Which sounds a prompt has, and where, decides its bytes: same text is not same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from audio_family import AUDIO, END, OPTIONS, START, asked, make_qwen2_audio, sound
from family_check import Seen, together
from inprocess import CHUNK, Engine, prompt, running

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HIT = 448


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(make_qwen2_audio(tmp_path_factory.mktemp("qwen2-audio")), **OPTIONS) as engine:
        yield engine


def ask(engine: Engine, content: dict[str, Any]) -> Seen:
    """One request; the engine forgets it, kvstow does not."""
    [seen] = together(engine, [content], CHUNK)
    engine.clear_own_cache()
    return seen


def test_two_sounds_with_the_same_text_never_meet(engine: Engine) -> None:
    tokens = [START, AUDIO, END, *prompt(440, seed=1)]
    first, second = ask(engine, asked(tokens, [sound(1)])), ask(engine, asked(tokens, [sound(2)]))
    assert (first.answer.cached, second.answer.cached) == (0, 0)
    # The sounds say something, so sharing would have been wrong.
    assert first.answer.logprobs != second.answer.logprobs
    for number, computed in ((1, first), (2, second)):
        again = ask(engine, asked(tokens, [sound(number)]))
        assert (again.answer.cached, again.held) == (HIT, computed.held)
        assert again.answer.logprobs == computed.answer.logprobs
    engine.expect_baseline()


def test_where_a_sound_begins_matters(engine: Engine) -> None:
    """The same tokens and the same two sounds, the other way round."""
    short, long = sound(3, length_s=1.0), sound(4, length_s=4.0)
    tokens = [START, AUDIO, AUDIO, END, *prompt(330, seed=2)]
    for cached in (0, HIT):
        for sounds in ([short, long], [long, short]):
            assert ask(engine, asked(tokens, sounds)).answer.cached == cached
