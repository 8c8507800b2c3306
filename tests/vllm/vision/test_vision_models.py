"""Every model family that needs torchvision: a reload is what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families import Family, cases
from family_check import check_family
from vision_families import LONG, SHORT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("family", cases(SHORT, LONG))
def test_a_reload_is_the_engines_own_hit(
    family: Family, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check_family(family, tmp_path, record_property)
