"""Where the files of weights are looked for, and where they are not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.adapters.vllm.identity import _speculative, _weights_folder
from kvstow.config.settings import Settings
from kvstow.errors import ConfigError

COMMIT = "0" * 40


def test_weights_lie_in_the_download_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in ("hub", "downloads"):
        folder = tmp_path / cache / "models--someone--model"
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    downloads = str(tmp_path / "downloads")
    assert downloads in str(_weights_folder("someone/model", None, downloads))
    shutil.rmtree(downloads)
    with pytest.raises(ConfigError, match=r"download_dir=.*weights_digest"):
        _weights_folder("someone/model", None, downloads)


def test_a_draft_without_files_takes_a_digest_too(tmp_path: Path) -> None:
    draft = SimpleNamespace(model=str(tmp_path), revision=None)
    config: Any = SimpleNamespace(
        load_config=SimpleNamespace(download_dir=None),
        speculative_config=SimpleNamespace(
            draft_model_config=draft, draft_load_config=None, method="mtp", num_speculative_tokens=1
        ),
    )
    with pytest.raises(ConfigError, match="set weights_digest"):
        _speculative(config, Settings())
    assert _speculative(config, Settings(weights_digest="first try"))
