"""Settings from a mapping, the environment and a file: precedence, and errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstow.config import Settings, load_settings
from kvstow.errors import ConfigError


def refused(extra: dict[str, object], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(extra, environ or {})
    return str(caught.value)


def test_nothing_given_is_all_defaults() -> None:
    assert load_settings({}, {"PATH": "/bin", "KVSTOWAWAY": "1"}) == Settings()


def test_the_processs_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTOW_CHUNK_TOKENS", "64")
    assert load_settings({}).chunk_tokens == 64
    assert load_settings({}, {}).chunk_tokens == 0


def test_mapping_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstow.toml"
    file.write_text('chunk_tokens = 16\ndisk_readers = 7\nsave = "prompt"\nload_timeout_s = 5\n')
    environ = {"KVSTOW_CONFIG_FILE": str(file), "KVSTOW_CHUNK_TOKENS": "32", "KVSTOW_DISK_READERS": "8"}
    settings = load_settings({"chunk_tokens": 64}, environ)
    assert settings == Settings(chunk_tokens=64, disk_readers=8, save="prompt", load_timeout_s=5.0)


def test_the_mappings_file_hides_the_environments(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("chunk_tokens = 16")
    (tmp_path / "b.toml").write_text("disk_readers = 7")
    environ = {"KVSTOW_CONFIG_FILE": str(tmp_path / "a.toml")}
    settings = load_settings({"config_file": str(tmp_path / "b.toml")}, environ)
    assert settings == Settings(disk_readers=7)


def test_the_environments_text_is_parsed() -> None:
    environ = {
        "KVSTOW_ARENA_GIB": "1.5",
        "KVSTOW_DISK_PATH": "/data/kv",
        "KVSTOW_DISK_GIB": "100",
        "KVSTOW_CODEC": "torch",
        "KVSTOW_NAMESPACE": "a b",
        "KVSTOW_ROLE": "",
    }
    assert load_settings({}, environ) == Settings(
        arena_gib=1.5,
        disk_path="/data/kv",
        disk_gib=100.0,
        codec="torch",
        namespace="a b",
    )


def test_none_in_the_environment_unsets_what_a_file_sets(tmp_path: Path) -> None:
    file = tmp_path / "kvstow.toml"
    file.write_text('disk_path = "/data"\ndisk_gib = 3\n')
    environ = {"KVSTOW_CONFIG_FILE": str(file), "KVSTOW_DISK_PATH": "none"}
    assert load_settings({}, environ).disk_path is None


def test_an_unknown_key_names_itself_its_place_and_the_nearest(tmp_path: Path) -> None:
    assert refused({"chunk_token": 1}) == (
        "unknown key chunk_token in kv_connector_extra_config; did you mean chunk_tokens?"
    )
    assert refused({}, {"KVSTOW_CHUNKTOKENS": "1"}) == (
        "unknown key KVSTOW_CHUNKTOKENS in the environment; did you mean KVSTOW_CHUNK_TOKENS?"
    )
    file = tmp_path / "kvstow.toml"
    file.write_text("diskpath = '/x'")
    assert refused({"config_file": str(file)}) == f"unknown key diskpath in {file}; did you mean disk_path?"
    assert "known are arena_gib, chunk_tokens, codec" in refused({"zzzzzz": 1})


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("chunk_tokens", "256", "a whole number, 0 to 1048576"),
        ("chunk_tokens", -1, "a whole number, 0 to 1048576"),
        ("chunk_tokens", 1.5, "a whole number, 0 to 1048576"),
        ("chunk_tokens", None, "a whole number, 0 to 1048576"),
        ("chunk_tokens", True, "a whole number, 0 to 1048576"),
        ("arena_gib", 0, "a number above 0, at most 100000, or none"),
        ("arena_gib", float("nan"), "a number above 0, at most 100000, or none"),
        ("load_timeout_s", float("inf"), "a number above 0, at most 86400"),
        ("load_timeout_s", -1, "a number above 0, at most 86400"),
        ("disk_cooldown_s", -1, "a number, 0 to 86400"),
        ("save", "none", "one of all, prompt"),
        ("role", "reader", "one of both, load, save"),
        ("disk_path", "kv", "an absolute path, or none"),
        ("disk_path", "", "an absolute path, or none"),
        ("weights_digest", "", "1 to 256 characters, or none"),
        ("namespace", "x" * 257, "at most 256 characters"),
        ("config_file", 3, "the path of a TOML file"),
        ("config_file", "", "the path of a TOML file"),
    ],
)
def test_a_wrong_value_names_key_value_place_and_what_is_right(key: str, value: object, want: str) -> None:
    assert refused({key: value}) == f"{key}={value!r} (kv_connector_extra_config): want {want}"


def test_a_wrong_value_in_the_environment_uses_the_variables_name() -> None:
    assert refused({}, {"KVSTOW_DISK_READERS": "many"}) == (
        "KVSTOW_DISK_READERS='many' (the environment): want a whole number, 1 to 256"
    )


def test_a_wrong_value_is_refused_even_where_a_stronger_source_hides_it() -> None:
    assert "KVSTOW_CHUNK_TOKENS='x'" in refused({"chunk_tokens": 64}, {"KVSTOW_CHUNK_TOKENS": "x"})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert str(absent) in refused({"config_file": str(absent)})
    assert "KVSTOW_CONFIG_FILE: cannot read" in refused({}, {"KVSTOW_CONFIG_FILE": str(absent)})
    bad = tmp_path / "bad.toml"
    bad.write_text("chunk_tokens 256\n")
    assert "is not TOML (" in refused({"config_file": str(bad)})
    bad.write_bytes(b"\xff\xfe")
    assert "is not TOML (" in refused({"config_file": str(bad)})
    bad.write_text("[kvstow]\nchunk_tokens = 1\n")
    assert "unknown key kvstow in" in refused({"config_file": str(bad)})


def test_a_disk_size_without_a_disk_is_a_mistake() -> None:
    assert refused({"disk_gib": 8}) == (
        "disk_gib=8 is set without disk_path, so there is no disk tier; set disk_path, or leave disk_gib out"
    )
    assert load_settings({"disk_gib": 8, "disk_path": None}, {}).disk_path is None
