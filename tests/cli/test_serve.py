"""The command line that ``kvstow serve`` turns into."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstow.cli.main import app
from kvstow.cli.paths import disk_folder, project_cache, user_cache


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands that would have taken the process's place."""
    for name in [name for name in os.environ if name.startswith("KVSTOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == command[0]
        commands.append(command)

    monkeypatch.setattr(os, "execv", execv)
    return commands


def serve(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *words])
    return result.exit_code, result.stderr


def config_of(command: list[str]) -> dict[str, object]:
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


def test_the_server_runs_the_connector_and_recomputes_what_fails(
    started: list[list[str]], tmp_path: Path
) -> None:
    assert serve("some/model")[0] == 0
    (command,) = started
    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "some/model",
    ]
    config = config_of(command)
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "StowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert isinstance(extra, dict)
    assert list(extra) == ["disk_path"]
    assert Path(extra["disk_path"]).parent == tmp_path / "kvstow" / "disk"


def test_options_reach_the_connector_and_the_rest_reaches_vllm(started: list[list[str]]) -> None:
    words = ["--max-model-len", "8192", "--arena-gib", "1.5", "-tp", "2", "--disk", "/d", "--enforce-eager"]
    assert serve("m", *words, "--disk-gib", "7", "--override={'a': 1}")[0] == 0
    (command,) = started
    assert config_of(command)["kv_connector_extra_config"] == {
        "arena_gib": 1.5,
        "disk_path": "/d",
        "disk_gib": 7.0,
    }
    assert command[9:] == ["--max-model-len", "8192", "-tp", "2", "--enforce-eager", "--override={'a': 1}"]


def test_the_server_has_time_to_finish_its_writes(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTOW_SHUTDOWN_S_MAX", "20.5")
    assert serve("m")[0] == 0
    assert serve("m", "--shutdown_timeout=3")[0] == 0
    assert started[0][7:] == ["--shutdown-timeout", "26"]
    assert started[1][7:] == ["--shutdown_timeout=3"]


def test_a_relative_disk_folder_is_made_absolute(started: list[list[str]]) -> None:
    assert serve("m", "--disk", "here")[0] == 0
    assert config_of(started[0])["kv_connector_extra_config"] == {"disk_path": str(Path("here").absolute())}


def test_no_disk_overrides_the_environment(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTOW_DISK_PATH", "/from/environment")
    assert serve("m", "--disk", "none")[0] == 0
    assert serve("m")[0] == 0
    assert [config_of(command)["kv_connector_extra_config"] for command in started] == [
        {"disk_path": None},
        {"disk_path": "/from/environment"},
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["m", "--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["m", "--kv-transfer-config={}"], "--kv-transfer-config"),
        (["m", "--kv_transfer_config.kv_role", "kv_both"], "--kv_transfer_config.kv_role"),
        (["m", "--kv-offloading-size", "4"], "--kv-offloading-size"),
        (["m", "--model", "n"], "--model"),
        (["--max-model-len", "8192", "m"], "MODEL comes first"),
        (["m", "--arena-gib", "-1"], "arena_gib=-1"),
        (["m", "--disk", "none", "--disk-gib", "3"], "--disk-gib 3"),
    ],
)
def test_a_contradiction_is_an_error_that_names_it(
    started: list[list[str]], words: list[str], named: str
) -> None:
    status, message = serve(*words)
    assert status == 2
    assert named in message
    assert not started


def test_version() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert (result.exit_code, result.stdout.strip()) == (0, "0.1.0")


def test_cache_folder_follows_the_xdg_specification(tmp_path: Path) -> None:
    assert user_cache({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/kvstow")
    assert user_cache({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/kvstow")
    assert user_cache({"HOME": "/h"}) == Path("/h/.cache/kvstow")


def test_a_checkout_keeps_its_cache_to_itself(tmp_path: Path) -> None:
    package = tmp_path / "src" / "kvstow"
    package.mkdir(parents=True)
    installed = {"XDG_CACHE_HOME": "/x"}
    assert project_cache(installed, package) == Path("/x/kvstow")
    (tmp_path / "pyproject.toml").touch()
    assert project_cache(installed, package) == tmp_path / ".cache"
    assert project_cache(installed, tmp_path / "lib" / "kvstow") == Path("/x/kvstow")


def test_every_model_has_a_disk_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["org/model", "org--model", "org/model-2", "../model", "m" * 300, "m" * 301]
    folders = [disk_folder(tmp_path, name) for name in names]
    assert len(set(folders)) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path / "disk"}
    assert all(len(folder.name) < 120 for folder in folders)
    assert folders[0].name.startswith("org--model-")

    for place in ("a", "b"):
        (tmp_path / place / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    first = disk_folder(tmp_path, "model")
    assert first == disk_folder(tmp_path, str(tmp_path / "a" / "model"))
    monkeypatch.chdir(tmp_path / "b")
    assert first != disk_folder(tmp_path, "model")
