"""Every model family on two ranks: a reload is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from audio_family import QWEN2_AUDIO
from families import LONG, SHORT, Family, cases
from tensor_parallel_check import check_on_two_ranks
from vllm_children import Launcher

pytestmark = [pytest.mark.vllm, pytest.mark.models]


@pytest.mark.parametrize("family", cases((*SHORT, *LONG, QWEN2_AUDIO)))
def test_both_ranks_reload_the_engines_own_hit(
    family: Family,
    launcher: Launcher,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    check_on_two_ranks(family, launcher, tmp_path, record_property)
