"""Every model family that needs torchvision, on two ranks: a reload is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import Family, cases
from tensor_parallel_check import check_on_two_ranks
from vision_families import LONG, SHORT
from vllm_children import Launcher

pytestmark = [pytest.mark.vllm, pytest.mark.models]


@pytest.mark.parametrize("family", cases((*SHORT, *LONG)))
def test_both_ranks_reload_the_engines_own_hit(
    family: Family,
    launcher: Launcher,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    check_on_two_ranks(family, launcher, tmp_path, record_property)
