"""Every model family: a reload from memory and from disk is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from audio_family import QWEN2_AUDIO
from families import LONG, SHORT, Family, cases
from family_check import check_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("family", cases(SHORT, (*LONG, QWEN2_AUDIO)))
def test_a_reload_is_the_engines_own_hit(
    family: Family, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_family(family, tmp_path, record_property)
