"""Where vLLM does not hash images, two of them have one name: refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import running
from vision_families import OPTIONS, make_qwen2_vl

from kvstow.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_numbered_images_are_refused(tmp_path: Path) -> None:
    model = make_qwen2_vl(tmp_path / "model")
    options = OPTIONS | {"enable_prefix_caching": False}
    with (
        pytest.raises(ConfigError, match=r"mm_processor_cache_gb=0 .*--enable-prefix-caching"),
        running(model, mm_processor_cache_gb=0, **options),
    ):
        pass
    with running(model, **options) as engine:
        engine.expect_baseline()
