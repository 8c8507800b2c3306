"""Every codec keeps the contract, over numpy arrays and over tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvstow.codec.base import Codec, Region
from kvstow.codec.reference import ReferenceCodec
from kvstow.codec.torch_codec import TorchCodec
from kvstow.errors import LayoutError
from kvstow.layout.geometry import Group
from kvstow.testing.codec_contract import Bytes, CodecContract, group_of, ids, segment_of


class _OverTensors(CodecContract):
    def regions(self, arrays: Sequence[Bytes]) -> Sequence[Region]:
        return [torch.from_numpy(array) for array in arrays]


class TestReference(CodecContract):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        return ReferenceCodec(group, regions)


class TestReferenceOverTensors(_OverTensors):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        return ReferenceCodec(group, regions)


class TestTorch(_OverTensors):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        return TorchCodec(group, regions, threads)

    def test_a_region_may_be_a_view_into_a_larger_storage(self) -> None:
        storage = torch.arange(60, dtype=torch.uint8)
        target = bytearray(10)
        codec = TorchCodec(group_of([segment_of(0, 2, 10, 10)], 4), [storage[7:]])
        codec.gather(ids([1]), memoryview(target))
        assert bytes(target) == bytes(range(19, 29))

    @pytest.mark.parametrize("threads", [1, 2])
    def test_the_callers_thread_count_is_put_back(self, threads: int) -> None:
        before = torch.get_num_threads()
        codec = TorchCodec(
            group_of([segment_of(0, 0, 10, 10)], 4), [torch.zeros(40, dtype=torch.uint8)], threads
        )
        codec.gather(ids([0]), memoryview(bytearray(10)))
        codec.scatter(ids([0]), memoryview(bytes(10)))
        assert torch.get_num_threads() == before


class TestTorchOverArrays(CodecContract):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        return TorchCodec(group, regions, threads)


class TestNative(CodecContract):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        native = pytest.importorskip("kvstow.codec.native", reason="the C kernel is not built")
        codec: Codec = native.NativeCodec(group, regions, threads)
        return codec

    def test_a_read_only_region_is_not_bound(self) -> None:
        region = np.zeros(40, np.uint8)
        region.flags.writeable = False
        with pytest.raises(LayoutError, match="writable"):
            self.make(group_of([segment_of(0, 0, 10, 10)], 4), [region])


class TestNativeOverTensors(_OverTensors):
    def make(self, group: Group, regions: Sequence[Region], threads: int = 1) -> Codec:
        native = pytest.importorskip("kvstow.codec.native", reason="the C kernel is not built")
        codec: Codec = native.NativeCodec(group, regions, threads)
        return codec
