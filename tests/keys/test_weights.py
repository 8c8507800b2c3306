"""Weights digests: what changes them, how much they read, what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow.errors import ConfigError
from kvstow.keys import weights
from kvstow.keys.weights import adapter_digest, given_weights_digest, weights_digest

MIB = 2**20


def write_safetensors(path: Path, tensors: dict[str, int], size_bytes: int | None = None) -> int:
    """A file of zeros (sparse) with this header; returns where its data begin."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, length in tensors.items():
        header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at if size_bytes is None else size_bytes)
    return 8 + len(text)


def poke(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x7f")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    for number in (1, 2):
        write_safetensors(
            folder / f"model-0000{number}-of-00002.safetensors", {f"a{number}": 9000, "b": 5000}
        )
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    tensors = {f"layer.{number}": (3 if number % 2 else 1) * MIB for number in range(100)}
    write_safetensors(folder / "model.safetensors", {**tensors, "norm": 64})
    return folder


def test_the_digest_depends_on_the_files_alone(small: Path, tmp_path: Path) -> None:
    before = weights_digest(small)
    assert len(before) == 32
    moved = tmp_path / "elsewhere"
    shutil.copytree(small, moved)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "README.md"):
        (moved / name).write_text('{"other": 1}')
    (moved / ".cache").mkdir()
    (moved / ".cache" / "part.bin").write_bytes(b"x")
    os.utime(moved / "model-00001-of-00002.safetensors", (1, 1))
    assert weights_digest(moved) == before
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in small.iterdir():
        (linked / file.name).symlink_to(file)
    assert weights_digest(linked) == before


CHANGES: list[Callable[[Path], object]] = [
    lambda folder: poke(folder / "model-00002-of-00002.safetensors", 7777),
    lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
    lambda folder: (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors"),
    lambda folder: (folder / "extra.bin").write_bytes(b"x"),
    lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'),
    lambda folder: write_safetensors(folder / "model-00001-of-00002.safetensors", {"a1": 5000, "b": 9000}),
    lambda folder: (folder / "preprocessor_config.json").write_text('{"size": 448}'),
    lambda folder: (folder / "modeling_custom.py").write_text("SCALE = 2"),
    lambda folder: [(folder / "sub").mkdir(), (folder / "sub" / "more.pt").write_bytes(b"x")],
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_small_weights_is_seen(small: Path, change: Callable[[Path], object]) -> None:
    before = weights_digest(small)
    change(small)
    assert weights_digest(small) != before


def test_bytes_cannot_move_between_files(tmp_path: Path) -> None:
    digests = set()
    for first, second in ((b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")):
        (tmp_path / "a.bin").write_bytes(first)
        (tmp_path / "b.bin").write_bytes(second)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 3


@pytest.mark.slow
def test_every_tensor_of_large_weights_has_a_sample_and_so_have_the_edges(large: Path) -> None:
    file = large / "model.safetensors"
    seen = {weights_digest(large)}
    size_bytes = file.stat().st_size
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
    del header["__metadata__"]
    places = [8 + header_bytes, 8 + header_bytes + 60_000, size_bytes - 1, size_bytes - 60_000]
    for entry in header.values():
        begin, end = entry["data_offsets"]
        places.append(8 + header_bytes + (begin + end) // 2)
    for count, place in enumerate(places, start=2):
        poke(file, place)
        # Several places may fall on a byte that was changed before: the norm lies at the end.
        seen.add(weights_digest(large))
        assert len(seen) == count, f"a change at {place} was not seen"


def test_a_changed_header_or_size_of_large_weights_is_seen(large: Path) -> None:
    file = large / "model.safetensors"
    before = weights_digest(large)
    text = file.read_bytes()[:4000]
    with file.open("r+b") as handle:
        handle.write(text.replace(b"layer.99", b"layer.98", 1).replace(b"layer.7", b"layer_7", 1))
    changed_header = weights_digest(large)
    assert changed_header != before
    with file.open("ab") as handle:
        handle.write(b"\0")
    assert weights_digest(large) not in (before, changed_header)


def test_other_large_formats_are_sampled_too(tmp_path: Path) -> None:
    for name in ("model.gguf", "pytorch_model.bin"):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / name
        with file.open("wb") as handle:
            handle.truncate(100 * MIB)
        seen = {weights_digest(folder)}
        for count, place in enumerate((0, 50 * MIB, 100 * MIB - 1), start=2):
            poke(file, place)
            seen.add(weights_digest(folder))
            assert len(seen) == count


def test_what_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        tensors = {f"layer.{number}.{part}": 40 * MIB for part in range(100)}
        write_safetensors(tmp_path / f"model-{number}.safetensors", tensors)
    read_bytes = 0
    pread = os.pread

    def counting(source: int, length: int, offset: int) -> bytes:
        nonlocal read_bytes
        read_bytes += length
        return pread(source, length, offset)

    monkeypatch.setattr(os, "pread", counting)
    weights_digest(tmp_path)
    assert 15 * MIB < read_bytes < 20 * MIB


def test_side_files_of_large_weights_are_read_in_full(large: Path) -> None:
    side = large / "kv_cache_scales.json"
    side.write_bytes(b" " * 300_000)
    before = weights_digest(large)
    poke(side, 123_456)
    assert weights_digest(large) != before


def test_a_gguf_file_stands_for_all_its_shards(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"x" * number)
    (tmp_path / "other-00001-of-00002.gguf").write_bytes(b"y")
    whole = weights_digest(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "other-00001-of-00002.gguf").write_bytes(b"z")
    assert weights_digest(tmp_path / "m-00001-of-00002.gguf") == whole
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"z")
    assert weights_digest(tmp_path / "m-00001-of-00002.gguf") != whole
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert weights_digest(tmp_path / "one.gguf") != whole


def test_no_weights_names_the_folder_and_the_way_out(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="weights_digest") as caught:
            weights_digest(folder)
        assert str(folder) in str(caught.value)


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"cannot read .*model.safetensors \(No such file"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "claims a header"),
        ((2**40).to_bytes(8, "little") + b"{}", "claims a header of 1099511627776"),
        ((2).to_bytes(8, "little") + b"[]", "header is broken"),
        ((12).to_bytes(8, "little") + b'{"a":{"b":1}', "header is broken"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "header is broken"),
    ],
)
def test_a_safetensors_file_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with (tmp_path / "big.bin").open("wb") as handle:
        handle.truncate(weights.FULL_BYTES_MAX)
    with pytest.raises(ConfigError, match=message):
        weights_digest(tmp_path)


def test_a_download_that_stopped_is_refused(large: Path) -> None:
    file = large / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="shorter than its header says"):
        weights_digest(large)


def test_an_adapter_is_read_in_full(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(ConfigError, match=r"want an adapter_config\.json and"):
        adapter_digest(tmp_path)
    model = tmp_path / "adapter_model.safetensors"
    model.write_bytes(bytes(3 * MIB))
    seen = {adapter_digest(tmp_path)}
    poke(model, 1_234_567)
    seen.add(adapter_digest(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"r": 9}')
    seen.add(adapter_digest(tmp_path))
    (tmp_path / "new_embeddings.safetensors").write_bytes(b"x")
    seen.add(adapter_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "README.md").write_text("x")
    assert adapter_digest(tmp_path) in seen
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"want an adapter_config\.json and"):
        adapter_digest(tmp_path)


def test_a_given_digest_is_its_text_and_no_files(small: Path) -> None:
    assert given_weights_digest("v1") == given_weights_digest("v1")
    assert len({given_weights_digest("v1"), given_weights_digest("v2"), weights_digest(small)}) == 3
