"""The self-test passes where all is well, sees every fault that is planted, and leaves nothing behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from numpy_engine import BLOCKS, KINDS, LAYERS, PAGE_BYTES, ROW_BYTES, TOKENS, NumpyEngine, rig

from kvstow.codec.base import Codec
from kvstow.errors import ConfigError, NoSpaceError, StoreUnavailableError
from kvstow.layout.geometry import BlockId, Group, Layout
from kvstow.stores.base import FrameName
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import HEADER_BYTES

BLOCK_BYTES = TOKENS * ROW_BYTES


@pytest.fixture
def engine() -> NumpyEngine:
    return NumpyEngine()


class Wrapped:
    """A codec like another; subclasses do one thing wrong, in groups of one kind."""

    name = "wrapped"

    def __init__(self, codec: Codec, kind: str = "paged") -> None:
        self._codec = codec
        self.group: Group = codec.group
        self._is_wrong = codec.group.kind == kind

    def gather(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        self._codec.gather(blocks, target)
        if self._is_wrong:
            self.spoil_frame(blocks, target)

    def scatter(self, blocks: Sequence[BlockId], source: memoryview, skip_blocks: int = 0) -> None:
        if self._is_wrong:
            self.scatter_wrongly(blocks, source, skip_blocks)
        else:
            self._codec.scatter(blocks, source, skip_blocks)

    def spoil_frame(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        pass

    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        self._codec.scatter(blocks, source, skip)


class SwapsSegmentsInFrame(Wrapped):
    def spoil_frame(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        _swap(np.frombuffer(target, np.uint8), len(blocks))


class SwapsSegmentsInBlocks(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        payload = np.frombuffer(source, np.uint8).copy()
        _swap(payload, len(blocks))
        self._codec.scatter(blocks, memoryview(payload), skip)


class SwapsSegmentsBothWays(SwapsSegmentsInFrame, SwapsSegmentsInBlocks):
    """It gives back what it took, and no other codec could."""


class DropsByteOfFrame(Wrapped):
    def spoil_frame(self, blocks: Sequence[BlockId], target: memoryview) -> None:
        target[-1] ^= 0xFF


class DropsByteOfBlock(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        payload = bytearray(source)
        payload[5] ^= 0x01
        self._codec.scatter(blocks, memoryview(payload), skip)


class WritesOneBlockTooMany(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        per_segment = np.frombuffer(source, np.uint8).reshape(LAYERS, len(blocks), BLOCK_BYTES)
        wide = np.concatenate([per_segment, per_segment[:, -1:]], axis=1)
        more = (*blocks, BlockId(blocks[-1] + 1))
        self._codec.scatter(more, memoryview(wide.reshape(-1)), skip)


class IgnoresSkip(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        self._codec.scatter(blocks, source, 0)


class SkipsOneMore(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        self._codec.scatter(blocks, source, skip + bool(skip))


class TurnsBlocksRound(Wrapped):
    def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
        order = list(blocks[skip:])[::-1]
        self._codec.scatter([*blocks[:skip], *order], source, skip)


def _swap(payload: np.ndarray, blocks: int) -> None:
    segments = payload.reshape(LAYERS, blocks * BLOCK_BYTES)
    segments[[0, 1]] = segments[[1, 0]]


def refusal(engine: NumpyEngine, *args: object, **options: object) -> str:
    with rig(engine, *args, **options) as made, pytest.raises(ConfigError) as refused:
        made.run()
    assert not engine.pool.any(), "blocks hold what they held before, also after a refusal"
    return str(refused.value)


class TestSound:
    def test_every_group_goes_through_arena_and_disk(self, engine: NumpyEngine, disk: DiskStore) -> None:
        with rig(engine, disk=disk) as made:
            tested = made.run()
        assert (tested.frames, tested.disk) == (2 * len(KINDS), True)
        assert tested.payload_bytes == LAYERS * BLOCK_BYTES * (4 + 2 + 1)
        assert tested.took_s < 1.0

    def test_nothing_is_left(self, engine: NumpyEngine, disk: DiskStore) -> None:
        engine.pool[:] = (
            np.arange(engine.pool.size, dtype=np.uint32).astype(np.uint8).reshape(engine.pool.shape)
        )
        before = engine.pool.copy()
        with rig(engine, disk=disk) as made:
            made.run()
            for group in engine.layout.groups:
                assert not any(made.arena.frame(group.group, 0)[:HEADER_BYTES])
        assert np.array_equal(engine.pool, before)
        assert list(disk.scan()) == []
        assert disk.used_bytes == 0

    def test_without_a_disk_it_ends_at_the_arena(self, engine: NumpyEngine) -> None:
        with rig(engine) as made:
            tested = made.run()
        assert (tested.frames, tested.disk) == (len(KINDS), False)

    def test_a_leftover_of_a_run_that_was_killed_is_removed(
        self, engine: NumpyEngine, disk: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch, rig(engine, disk=disk) as made:
            patch.setattr(disk, "remove", lambda names: None)
            made.run()
        assert len(list(disk.scan())) == len(KINDS)
        with rig(engine, disk=disk) as made:
            made.run()
        assert list(disk.scan()) == []

    def test_a_pool_smaller_than_a_frame_is_left_out(self, engine: NumpyEngine) -> None:
        with rig(engine, layout=_with_blocks(engine, 3)) as made:
            assert made.run().frames == len(KINDS) - 1


def _with_blocks(engine: NumpyEngine, blocks: int) -> Layout:
    groups = tuple(msgspec.structs.replace(group, num_blocks=blocks) for group in engine.layout.groups)
    return msgspec.structs.replace(engine.layout, groups=groups)


class TestWrongBytesRefuseTheStart:
    @pytest.mark.parametrize("kind", ["paged", "window"])
    @pytest.mark.parametrize(
        "codec",
        [
            SwapsSegmentsInFrame,
            SwapsSegmentsInBlocks,
            SwapsSegmentsBothWays,
            DropsByteOfFrame,
            DropsByteOfBlock,
            WritesOneBlockTooMany,
            IgnoresSkip,
            SkipsOneMore,
            TurnsBlocksRound,
        ],
    )
    def test_a_codec(self, engine: NumpyEngine, codec: Callable[[Codec, str], Codec], kind: str) -> None:
        said = refusal(engine, wrap=lambda inner: codec(inner, kind))
        group = KINDS.index(kind)  # type: ignore[arg-type]
        assert f"KV cache group {group} ({kind}, 3 segments), codec wrapped, tier arena" in said
        assert "layers." in said
        assert "report this" in said

    @pytest.mark.parametrize(
        "codec", [SwapsSegmentsInFrame, SwapsSegmentsInBlocks, DropsByteOfBlock, WritesOneBlockTooMany]
    )
    def test_a_codec_of_states(self, engine: NumpyEngine, codec: Callable[[Codec, str], Codec]) -> None:
        said = refusal(engine, wrap=lambda inner: codec(inner, "state"))
        assert "KV cache group 2 (state, 3 segments), codec wrapped, tier arena" in said

    def test_the_byte_and_the_block_are_named(self, engine: NumpyEngine) -> None:
        said = refusal(engine, wrap=DropsByteOfBlock)
        # The frame begins with the last block; a skip of half of it leaves that alone.
        assert (
            f"after save and load, layers.0.paged: block {BLOCKS - 1}, byte 5 of {BLOCK_BYTES} is 0x" in said
        )
        assert "(1 bytes differ)" in said

    def test_a_block_that_was_not_named_is_told_as_such(self, engine: NumpyEngine) -> None:
        assert "block 1, which it does not name, byte" in refusal(engine, wrap=WritesOneBlockTooMany)

    def test_padding_that_is_written_over(self, engine: NumpyEngine) -> None:
        class WritesPadding(Wrapped):
            def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
                self._codec.scatter(blocks, source, skip)
                engine.pool[blocks[-1], 1, BLOCK_BYTES] += 1

        with rig(engine, wrap=WritesPadding) as made, pytest.raises(ConfigError, match="next to block 0"):
            made.run()

    def test_a_codec_that_raises(self, engine: NumpyEngine) -> None:
        class Raises(Wrapped):
            def scatter_wrongly(self, blocks: Sequence[BlockId], source: memoryview, skip: int) -> None:
                raise ValueError("no")

        assert "the load failed (unavailable)" in refusal(engine, wrap=Raises)

    @pytest.mark.parametrize(
        "changes",
        [
            {"block_stride_bytes": LAYERS * PAGE_BYTES - 8},
            {"block_stride_bytes": (LAYERS - 1) * PAGE_BYTES},
            {"offset_bytes": PAGE_BYTES + 8},
            {"offset_bytes": 2 * PAGE_BYTES},
            {"block_bytes": BLOCK_BYTES - 1},
        ],
        ids=["stride", "stride of a page", "offset", "another layer's offset", "short"],
    )
    @pytest.mark.parametrize("group", range(len(KINDS)))
    def test_a_layout_that_is_not_the_engines(
        self, engine: NumpyEngine, changes: dict[str, int], group: int
    ) -> None:
        said = refusal(engine, layout=engine.with_segment(group, 1, **changes))
        assert f"KV cache group {group}" in said
        assert f"layers.1.{KINDS[group]}" in said

    def test_tensors_that_share_memory(self, engine: NumpyEngine) -> None:
        engine.tensors[1]["layers.2.window"] = engine.view(1)[::-1]
        said = refusal(engine)
        assert "KV cache group 1" in said
        assert "after writing a pattern into every block, layers.1.window" in said

    def test_a_disk_that_gives_other_bytes(self, engine: NumpyEngine, disk: DiskStore) -> None:
        said = refusal(engine, disk=_Disk(disk, flip=True))
        assert "KV cache group 0 (paged, 3 segments), codec reference, tier disk" in said
        assert list(disk.scan()) == []


class _Disk:
    """A disk with one fault."""

    name = "disk"

    def __init__(
        self,
        disk: DiskStore,
        *,
        put: Exception | None = None,
        get: Exception | None = None,
        flip: bool = False,
    ) -> None:
        self._disk = disk
        self._put = put
        self._get = get
        self._flip = flip

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def put(self, name: FrameName, frame: memoryview) -> None:
        if self._put is not None:
            raise self._put
        self._disk.put(name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        if self._get is not None:
            raise self._get
        found = self._disk.get_into(name, target)
        if self._flip:
            target[HEADER_BYTES + 7] ^= 1
        return found


class TestDiskThatFails:
    @pytest.mark.parametrize(
        ("faults", "told"),
        [
            ({"put": NoSpaceError("full")}, "took no frame"),
            ({"put": StoreUnavailableError("gone")}, "took no frame"),
            ({"get": StoreUnavailableError("gone")}, "gave no frame back: unavailable"),
        ],
    )
    def test_is_left_out_with_one_line(
        self,
        engine: NumpyEngine,
        disk: DiskStore,
        faults: dict[str, Exception],
        told: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with caplog.at_level(logging.INFO, "kvstow"), rig(engine, disk=_Disk(disk, **faults)) as made:  # type: ignore[arg-type]
            tested = made.run()
        assert (tested.frames, tested.disk) == (len(KINDS), False)
        said = [record.getMessage() for record in caplog.records if "self-test" in record.getMessage()]
        assert len(said) == 1
        assert told in said[0]
        assert list(disk.scan()) == []
        assert not engine.pool.any()

    def test_that_hangs_is_left_out_when_the_time_is_up(
        self, engine: NumpyEngine, disk: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        door = threading.Event()
        monkeypatch.setattr(disk, "put", lambda name, frame: door.wait(30))
        with rig(engine, disk=disk) as made:
            tested = made.run(s_max=0.6)
            door.set()
        assert (tested.frames, tested.disk) == (len(KINDS), False)


class TestTime:
    def test_a_worker_that_does_not_answer_is_refused(self, engine: NumpyEngine) -> None:
        door = threading.Event()
        with rig(engine) as made:
            made.executors.saver.submit(lambda: door.wait(30) and None)
            with pytest.raises(ConfigError, match=r"group 0 .*did not answer a save"):
                made.run(s_max=0.2)
            door.set()

    def test_nor_one_whose_loads_hang(self, engine: NumpyEngine) -> None:
        door = threading.Event()
        with rig(engine) as made:
            made.executors.loader.submit(lambda: door.wait(30) and None)
            with pytest.raises(ConfigError, match=r"group 0 .*did not answer a load"):
                made.run(s_max=0.2)
            door.set()
