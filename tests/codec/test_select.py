"""The fastest codec that can serve, or the one asked for, or an error that says what to do."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from kvstow.codec.select import make_codec
from kvstow.errors import ConfigError
from kvstow.testing.codec_contract import group_of, segment_of

GROUP = group_of([segment_of(0, 0, 10, 10)], 4)


def regions() -> list[object]:
    return [np.zeros(40, np.uint8)]


@pytest.mark.parametrize("prefer", ["torch", "reference"])
def test_the_codec_asked_for_serves(prefer: str) -> None:
    assert make_codec(GROUP, regions(), prefer=prefer).name == prefer


@pytest.mark.parametrize("prefer", ["native", "auto"])
def test_the_kernel_serves_host_memory(prefer: str) -> None:
    pytest.importorskip("kvstow.codec._native", reason="the C kernel is not built")
    assert make_codec(GROUP, regions(), prefer=prefer).name == "native"
    assert make_codec(GROUP, [torch.zeros(40, dtype=torch.uint8)], prefer=prefer).name == "native"


def test_without_the_kernel_torch_serves_and_without_torch_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvstow.codec.native", None)
    assert make_codec(GROUP, regions()).name == "torch"
    with pytest.raises(ConfigError, match="pip install"):
        make_codec(GROUP, regions(), prefer="native")
    monkeypatch.setitem(sys.modules, "kvstow.codec.torch_codec", None)
    assert make_codec(GROUP, regions()).name == "reference"
    with pytest.raises(ConfigError, match="torch"):
        make_codec(GROUP, regions(), prefer="torch")


def test_memory_elsewhere_is_for_torch() -> None:
    elsewhere = [torch.zeros(40, dtype=torch.uint8, device="meta")]
    assert make_codec(GROUP, elsewhere).name == "torch"
    for prefer in ("native", "reference"):
        with pytest.raises(ConfigError, match="host memory"):
            make_codec(GROUP, elsewhere, prefer=prefer)


def test_a_wrong_preference_names_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="'triton' is no codec; use one of auto, native, torch, reference"):
        make_codec(GROUP, regions(), prefer="triton")


def test_no_threads_is_an_error() -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        make_codec(GROUP, regions(), threads=0)
