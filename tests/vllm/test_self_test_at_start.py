"""The self-test at the start of a real engine: it passes, is quick, leaves nothing, and refuses faults."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from gates import kvstow_log
from inprocess import ask_twice, running, start
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group

from kvstow.adapters.vllm import worker
from kvstow.codec.base import Codec
from kvstow.codec.select import make_codec
from kvstow.errors import ConfigError
from kvstow.layout.geometry import BlockId, Layout

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOWS: dict[str, Any] = {"num_gpu_blocks_override": 300}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(autouse=True)
def _says_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstow")


def told(log: Sequence[logging.LogRecord]) -> str:
    """The line of the self-test."""
    (line,) = [record.getMessage() for record in log if "self-test" in record.getMessage()]
    return line


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock")]


@pytest.mark.parametrize("model", ["dense", "window"])
def test_it_passes_within_a_second_and_leaves_nothing(
    model: str, llama: Path, gemma: Path, tmp_path: Path
) -> None:
    path, options = (llama, {}) if model == "dense" else (gemma, WINDOWS)
    with (
        kvstow_log(logging.INFO) as log,
        running(path, {"disk_path": str(tmp_path / "disk")}, **options) as engine,
    ):
        groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
        assert f"{2 * groups} frames there and back through arena and disk" in told(log)
        took = re.search(r"([0-9.]+) s$", told(log))
        assert took is not None
        assert float(took[1]) < 1.0
        assert files(tmp_path / "disk") == []
        assert not any(get_kv_transfer_group()._worker.recorder.snapshot().values())
        assert not any(torch.count_nonzero(cache.view(torch.uint8)) for cache in engine.kv_caches)
        assert ask_twice(engine, seed=1) == 448
        engine.expect_baseline()


def test_an_engine_that_never_writes_leaves_the_disk_alone(llama: Path, tmp_path: Path) -> None:
    stow = {"disk_path": str(tmp_path / "disk"), "role": "load"}
    with kvstow_log(logging.INFO) as log, running(llama, stow):
        assert "1 frames there and back through the arena" in told(log)


def test_it_can_be_left_out(llama: Path) -> None:
    with kvstow_log(logging.INFO) as log, running(llama, {"self_test": False}):
        assert not [record for record in log if "self-test" in record.getMessage()]


class MixesBlocks:
    """A codec that puts the blocks of one group's frames back in another order."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name, self.group = codec.name, codec.group

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        self._codec.gather(blocks, target)

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        self._codec.scatter([*blocks[:skip_blocks], *reversed(blocks[skip_blocks:])], source, skip_blocks)


def refusal(model: Path, **options: Any) -> str:
    try:
        with pytest.raises(ConfigError) as refused:
            start(model, **options)
    finally:
        ensure_kv_transfer_shutdown()
    return str(refused.value)


def test_a_codec_that_moves_other_bytes_is_refused(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(group: Any, *args: Any, **options: Any) -> Codec:
        codec = make_codec(group, *args, **options)
        return MixesBlocks(codec) if group.group == 1 else codec

    monkeypatch.setattr(worker, "make_codec", make)
    said = refusal(gemma, **WINDOWS)
    assert "self-test: KV cache group 1" in said
    assert re.search(r"model\.layers\.\d+\.self_attn\.attn: block \d+, byte \d+ of \d+ is 0x", said)


def test_a_layout_with_another_stride_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that nothing else finds fault with: every block lies in its region, and none overlap."""
    measure = worker.engine_layout

    def measure_wrongly(*args: Any, **options: Any) -> tuple[Layout, list[torch.Tensor]]:
        layout, regions = measure(*args, **options)
        (group,) = layout.groups
        first, *others = group.segments
        first = msgspec.structs.replace(first, block_stride_bytes=first.block_stride_bytes + 64)
        wrong = msgspec.structs.replace(group, segments=(first, *others))
        return Layout((wrong,), layout.chunk_tokens), regions

    monkeypatch.setattr(worker, "engine_layout", measure_wrongly)
    said = refusal(llama)
    assert "self-test: KV cache group 0 (paged, 3 segments)" in said
    assert "model.layers.0.self_attn.attn: block 59, byte 0 of" in said
