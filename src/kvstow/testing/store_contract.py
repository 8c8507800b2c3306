"""What every store must do: inherit `StoreContract`, give it a store, and run pytest.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Iterator[Store]:
            store = MyStore(...)
            yield store
            store.close()

The store is empty at the start of each test, takes at least `frames_max` frames of
`PAYLOAD_BYTES`, and belongs to `NAMESPACE` and `RANK`.
"""

from __future__ import annotations

import hashlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from kvstow.errors import CorruptFrameError
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef, Key, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import FrameName, Store
from kvstow.stores.framing import FrameIdentity, FrameKind, frame_bytes, open_frame, payload_of, seal

NAMESPACE = NamespaceDigest(hashlib.sha256(b"namespace of the store contract").digest())
RANK = Rank(3)
PAYLOAD_BYTES = 70_000
"""Not a multiple of a page, so that every frame has padding."""

GROUP = GroupId(0)


def sample_name(index: int, group: GroupId = GROUP) -> FrameName:
    """A frame's name: chunk ``index`` of one prompt that all samples share."""
    key = Key(hashlib.sha256(b"key %d %d" % (group, index)).digest())
    parent = _chunk(index - 1) if index else ROOT_CHUNK
    return FrameName(key, ChunkRef(group, index, _chunk(index), parent))


def sample_identity(name: FrameName, payload_bytes: int = PAYLOAD_BYTES) -> FrameIdentity:
    """What a frame stored under ``name`` must be."""
    return FrameIdentity(FrameKind.CHUNK, name.key, NAMESPACE, RANK, payload_bytes)


def sample_payload(name: FrameName, payload_bytes: int = PAYLOAD_BYTES, version: int = 0) -> bytes:
    """Bytes that are a function of the name and of ``version``, and of nothing else."""
    seed = name.key + version.to_bytes(8, "little")
    return hashlib.shake_256(seed).digest(payload_bytes)


def sample_frame(name: FrameName, payload_bytes: int = PAYLOAD_BYTES, version: int = 0) -> memoryview:
    """A sealed frame in page-aligned memory of its own."""
    frame = blank_frame(payload_bytes)
    payload_of(frame, payload_bytes)[:] = sample_payload(name, payload_bytes, version)
    seal(frame, sample_identity(name, payload_bytes))
    return frame


def blank_frame(payload_bytes: int = PAYLOAD_BYTES) -> memoryview:
    """Page-aligned zeroes [``frame_bytes(payload_bytes)``], to read into."""
    return memoryview(mmap.mmap(-1, frame_bytes(payload_bytes)))


def opened(frame: memoryview, name: FrameName) -> bytes:
    """The payload of a sample's frame, verified."""
    return bytes(open_frame(frame, sample_identity(name)))


def _chunk(index: int) -> ChunkId:
    return ChunkId(hashlib.sha256(b"chunk %d" % index).digest())


class StoreContract:
    """The tests. A subclass gives the ``store`` fixture, and may lower `frames_max`."""

    frames_max = 64

    def test_what_was_put_comes_back(self, store: Store) -> None:
        name = sample_name(0)
        store.put(name, sample_frame(name))
        target = blank_frame()
        assert store.get_into(name, target)
        assert target == sample_frame(name)

    def test_an_absent_frame_is_a_value_and_leaves_the_target_alone(self, store: Store) -> None:
        store.put(sample_name(0), sample_frame(sample_name(0)))
        target = blank_frame()
        assert store.get_into(sample_name(1), target) is False
        assert target == blank_frame()
        assert not store.contains(sample_name(1))

    def test_contains_follows_put_and_remove(self, store: Store) -> None:
        name = sample_name(0)
        assert not store.contains(name)
        store.put(name, sample_frame(name))
        assert store.contains(name)
        store.remove([name])
        assert not store.contains(name)
        assert not store.get_into(name, blank_frame())

    def test_names_that_differ_in_one_part_are_apart(self, store: Store) -> None:
        names = [sample_name(1), sample_name(2), sample_name(1, GroupId(1)), sample_name(1, GroupId(11))]
        for name in names:
            store.put(name, sample_frame(name))
        for name in names:
            target = blank_frame()
            assert store.get_into(name, target)
            assert opened(target, name) == sample_payload(name)

    def test_put_replaces(self, store: Store) -> None:
        name = sample_name(0)
        store.put(name, sample_frame(name, version=1))
        store.put(name, sample_frame(name, version=2))
        target = blank_frame()
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name, version=2)
        assert len(list(store.scan())) == 1

    def test_put_keeps_no_reference_to_the_callers_buffer(self, store: Store) -> None:
        name = sample_name(0)
        frame = sample_frame(name)
        store.put(name, frame)
        frame[:] = bytes(len(frame))
        target = blank_frame()
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name)

    def test_put_takes_a_read_only_unaligned_buffer(self, store: Store) -> None:
        name = sample_name(0)
        store.put(name, memoryview(b"#" + bytes(sample_frame(name)))[1:])
        target = memoryview(bytearray(len(sample_frame(name)) + 1))[1:]
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name)

    def test_remove_takes_many_and_absent_ones(self, store: Store) -> None:
        names = [sample_name(index) for index in range(4)]
        for name in names[:3]:
            store.put(name, sample_frame(name))
        store.remove([names[0], names[3], names[2]])
        store.remove(names[0:1])
        store.remove([])
        assert [store.contains(name) for name in names] == [False, True, False, False]

    @pytest.mark.parametrize("other_bytes", [PAYLOAD_BYTES - 4096, PAYLOAD_BYTES + 4096])
    def test_another_length_than_stored_is_corrupt(self, store: Store, other_bytes: int) -> None:
        name = sample_name(0)
        store.put(name, sample_frame(name))
        with pytest.raises(CorruptFrameError):
            store.get_into(name, blank_frame(other_bytes))
        assert store.get_into(name, blank_frame())

    def test_scan_gives_every_reference_and_size(self, store: Store) -> None:
        names = [sample_name(index) for index in range(self.frames_max // 2)]
        names += [sample_name(index, GroupId(2)) for index in range(self.frames_max // 2)]
        for name in names:
            store.put(name, sample_frame(name))
        store.remove(names[:1])
        found = {stored.ref: stored for stored in store.scan()}
        assert set(found) == {name.ref for name in names[1:]}
        assert {stored.size_bytes for stored in found.values()} == {frame_bytes(PAYLOAD_BYTES)}

    def test_scan_of_an_empty_store_is_empty(self, store: Store) -> None:
        assert list(store.scan()) == []

    def test_threads_put_and_get_their_own_frames(self, store: Store) -> None:
        start = Barrier(4)

        def live(thread: int) -> None:
            start.wait()
            for index in range(thread, self.frames_max, 4):
                name, target = sample_name(index), blank_frame()
                store.put(name, sample_frame(name))
                assert store.get_into(name, target)
                assert opened(target, name) == sample_payload(name)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(live, range(4)))
        assert len(list(store.scan())) == self.frames_max

    def test_readers_see_one_writers_frame_or_the_others_never_half(self, store: Store) -> None:
        name = sample_name(0)
        frames = [sample_frame(name, version=version) for version in range(2)]
        payloads = [sample_payload(name, version=version) for version in range(2)]
        start = Barrier(4)

        def write(version: int) -> None:
            start.wait()
            for _ in range(50):
                store.put(name, frames[version])

        def read(_: int) -> None:
            target = blank_frame()
            start.wait()
            for _ in range(100):
                if store.get_into(name, target):
                    assert opened(target, name) in payloads

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(write, 0), threads.submit(write, 1)]
            running += [threads.submit(read, 0), threads.submit(read, 1)]
            for thread in running:
                thread.result()

    def test_close_is_idempotent(self, store: Store) -> None:
        store.put(sample_name(0), sample_frame(sample_name(0)))
        store.close()
        store.close()
