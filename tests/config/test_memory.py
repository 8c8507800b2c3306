"""A container's limit counts where it is below what the machine has."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvstow.config.memory import available_bytes

MIB = 1 << 20


def group(folder: Path, limit: str, used: str, cache: str, sizes: tuple[str, int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text, used_bytes, cache_bytes = sizes
    (folder / limit).write_text(f"{text}\n")
    (folder / used).write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache} {cache_bytes}\nfile 7\n")


def group2(folder: Path, *sizes: object) -> None:
    group(folder, "memory.max", "memory.current", "inactive_file", sizes)  # type: ignore[arg-type]


def test_the_least_that_any_group_above_has_left_counts(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pod/container\n")
    group2(tmp_path / "pod", str(64 * MIB), 10 * MIB, 2 * MIB)
    group2(tmp_path / "pod" / "container", "max", 8 * MIB, 0)
    assert available_bytes(tmp_path, tmp_path / "own") == 56 * MIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/kubepods/pod7/c0ffee\n")
    group2(tmp_path, str(32 * MIB), 40 * MIB, 0)
    assert available_bytes(tmp_path, tmp_path / "own") == 0


def test_the_first_version_too(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:devices:/a\n4:memory:/a\n0::/\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group(tmp_path / "memory" / "a", *names, (str(48 * MIB), 16 * MIB, MIB))
    group(tmp_path / "memory", *names, ("9223372036854771712", 90 * MIB, MIB))
    assert available_bytes(tmp_path, tmp_path / "own") == 33 * MIB


@pytest.mark.parametrize("own", ["0::/nowhere\n", ""], ids=["no such group", "no groups"])
def test_without_limits_it_is_the_machines(tmp_path: Path, own: str) -> None:
    (tmp_path / "own").write_text(own)
    for file in (tmp_path / "own", tmp_path / "missing"):
        assert available_bytes(tmp_path, file) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
