"""The kernel's own tests skip where it is not built; this one says when that is a fault."""

from __future__ import annotations

import importlib.util
import shutil

import pytest


@pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("cc") is None, reason="no C compiler: the torch codec serves"
)
def test_where_there_is_a_compiler_the_kernel_is_built() -> None:
    assert importlib.util.find_spec("kvstow.codec._native") is not None, "pip install -e . to build it"
