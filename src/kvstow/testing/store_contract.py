"""What every store must do: inherit `StoreContract`, give it a store, and run pytest.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Iterator[Store]:
            store = MyStore(...)
            yield store
            store.close()

The store is empty at the start of each test, takes at least `frames_max` frames of
`PAYLOAD_BYTES`, and belongs to `NAMESPACE` and `RANK` (all of `kvstow.testing.samples`). The groups
of its frames are 0, 1, 2 and 11. Two things are for a subclass to add:

- a store whose budget is hard says in `budget_frames` how many frames of `PAYLOAD_BYTES` it holds;
- a store whose medium a test can reach overrides `damage`, to change bytes behind the store's back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from kvstow.errors import CorruptFrameError, NoSpaceError
from kvstow.layout.geometry import GroupId
from kvstow.stores.base import FrameName, Store
from kvstow.stores.framing import HEADER_BYTES, frame_bytes
from kvstow.testing.samples import (
    PAYLOAD_BYTES,
    blank_frame,
    opened,
    sample_frame,
    sample_name,
    sample_payload,
)

FRAME_BYTES = frame_bytes(PAYLOAD_BYTES)


def flipped(place: int) -> Callable[[bytes], bytes]:
    """Damage: one bit of the byte at ``place``, which may count from the end."""

    def damage(frame: bytes) -> bytes:
        changed = bytearray(frame)
        changed[place] ^= 0x10
        return bytes(changed)

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "header": flipped(30),
    "header checksum": flipped(100),
    "rest of the header": flipped(HEADER_BYTES - 1),
    "payload": flipped(HEADER_BYTES + 1234),
    "last byte of the payload": flipped(HEADER_BYTES + PAYLOAD_BYTES - 1),
    "padding": flipped(-1),
    "another frame": lambda _: bytes(sample_frame(sample_name(1))),
    "torn": lambda frame: frame[: len(frame) // 2].ljust(len(frame), b"\0"),
    "zeroes": lambda frame: bytes(len(frame)),
    "a sector short": lambda frame: frame[:-512],
    "a page short": lambda frame: frame[:-HEADER_BYTES],
    "a header only": lambda frame: frame[:HEADER_BYTES],
    "a page long": lambda frame: frame + bytes(HEADER_BYTES),
}
"""What may become of a frame's bytes where they are stored."""


class StoreContract:
    """The tests. A subclass gives the ``store`` fixture, and may set what follows.

    Attributes:
        frames_max: how many frames the tests may put at once; a multiple of 4.
        budget_frames: how many fit, exactly; at least ``frames_max``. None: nobody says.
    """

    frames_max = 64
    budget_frames: int | None = None

    def damage(self, store: Store, name: FrameName, content: bytes) -> None:
        """Make ``content`` what is stored under ``name``, where there is a whole frame now.

        By default through the front door: a store must give back what it was given, good or bad. Skip
        the test where the medium cannot hold such bytes.
        """
        store.put(name, memoryview(content))

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

    def test_get_gives_a_copy(self, store: Store) -> None:
        name = sample_name(0)
        store.put(name, sample_frame(name))
        target = blank_frame()
        assert store.get_into(name, target)
        target[:] = bytes(len(target))
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name)

    @pytest.mark.parametrize("payload_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + 1])
    def test_frames_of_other_lengths_are_kept_beside_each_other(
        self, store: Store, payload_bytes: int
    ) -> None:
        small, large = sample_name(0), sample_name(1)
        store.put(small, sample_frame(small, payload_bytes))
        store.put(large, sample_frame(large))
        for name, frame in ((small, sample_frame(small, payload_bytes)), (large, sample_frame(large))):
            target = memoryview(bytearray(len(frame)))
            assert store.get_into(name, target)
            assert target == frame
        assert {stored.size_bytes for stored in store.scan()} == {frame_bytes(payload_bytes), FRAME_BYTES}

    def test_remove_takes_many_and_absent_ones(self, store: Store) -> None:
        names = [sample_name(index) for index in range(4)]
        for name in names[:3]:
            store.put(name, sample_frame(name))
        store.remove([names[0], names[3], names[2]])
        store.remove(names[0:1])
        store.remove([])
        store.remove(name for name in names[3:])
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
        assert {stored.size_bytes for stored in found.values()} == {FRAME_BYTES}

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

    @pytest.mark.parametrize("what", DAMAGES)
    def test_a_damaged_frame_is_never_opened_and_can_be_replaced(self, store: Store, what: str) -> None:
        name, target = sample_name(0), blank_frame()
        store.put(name, sample_frame(name))
        self.damage(store, name, DAMAGES[what](bytes(sample_frame(name))))
        for _ in range(2):  # looking at it makes it no better
            with pytest.raises(CorruptFrameError):  # noqa: PT012
                # A store that finds out by itself may call it absent.
                if not store.get_into(name, target):
                    raise CorruptFrameError("gone")
                opened(target, name)
        store.remove([name])
        assert not store.get_into(name, target)
        store.put(name, sample_frame(name, version=1))
        assert store.get_into(name, target)
        assert opened(target, name) == sample_payload(name, version=1)

    def test_readers_of_a_frame_that_is_removed_see_all_of_it_or_nothing(self, store: Store) -> None:
        # A neighbour takes the place of what was removed, if places are used again.
        name, neighbour = sample_name(0), sample_name(1)
        frames = {name: sample_frame(name), neighbour: sample_frame(neighbour)}
        start = Barrier(4)

        def churn(_: int) -> None:
            start.wait()
            for _ in range(50):
                store.put(name, frames[name])
                store.remove([name])
                store.put(neighbour, frames[neighbour])
                store.remove([neighbour])

        def read(_: int) -> None:
            target = blank_frame()
            start.wait()
            for _ in range(100):
                for wanted in frames:
                    if store.get_into(wanted, target):
                        assert opened(target, wanted) == sample_payload(wanted)

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(churn, 0), threads.submit(churn, 1)]
            running += [threads.submit(read, 0), threads.submit(read, 1)]
            for thread in running:
                thread.result()
        assert list(store.scan()) == []

    def test_a_scan_goes_on_while_frames_come_and_go(self, store: Store) -> None:
        steady = [sample_name(index) for index in range(self.frames_max // 4)]
        passing = [sample_name(index, GroupId(1)) for index in range(self.frames_max // 4)]
        for name in steady:
            store.put(name, sample_frame(name))
        frames = [(name, sample_frame(name)) for name in passing]

        def churn() -> None:
            for _ in range(5):
                for name, frame in frames:
                    store.put(name, frame)
                store.remove(passing)

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(churn)
            while True:
                done = running.done()
                found = [stored.ref for stored in store.scan()]
                assert all(found.count(name.ref) == 1 for name in steady)
                assert set(found) <= {name.ref for name in steady + passing}
                if done:
                    break
            running.result()

    def test_a_full_store_says_so_and_keeps_what_it_has(self, store: Store) -> None:
        names = [sample_name(index) for index in range(self._budget())]
        for name in names:
            store.put(name, sample_frame(name))
        one_more, target = sample_name(len(names)), blank_frame()
        for _ in range(3):
            with pytest.raises(NoSpaceError):
                store.put(one_more, sample_frame(one_more))
        assert not store.contains(one_more)
        assert not store.get_into(one_more, target)
        for name in names:
            assert store.get_into(name, target)
            assert opened(target, name) == sample_payload(name)
        store.remove(names[:1])
        store.put(one_more, sample_frame(one_more))
        with pytest.raises(NoSpaceError):
            store.put(names[0], sample_frame(names[0]))
        assert len(list(store.scan())) == len(names)

    def test_replacing_in_a_full_store_leaves_the_old_frame_or_the_new(self, store: Store) -> None:
        names = [sample_name(index) for index in range(self._budget())]
        for name in names:
            store.put(name, sample_frame(name))
        # Room for both may be needed, and then there is none.
        try:
            store.put(names[0], sample_frame(names[0], version=1))
            version = 1
        except NoSpaceError:
            version = 0
        target = blank_frame()
        assert store.get_into(names[0], target)
        assert opened(target, names[0]) == sample_payload(names[0], version=version)
        assert len(list(store.scan())) == len(names)

    def test_threads_together_do_not_pass_the_budget(self, store: Store) -> None:
        budget = self._budget()

        def try_put(index: int) -> bool:
            name = sample_name(index)
            try:
                store.put(name, sample_frame(name))
            except NoSpaceError:
                return False
            return True

        with ThreadPoolExecutor(4) as threads:
            kept = sum(threads.map(try_put, range(budget + 32)))
        assert kept == len(list(store.scan())) == budget

    def test_close_is_idempotent(self, store: Store) -> None:
        store.put(sample_name(0), sample_frame(sample_name(0)))
        store.close()
        store.close()

    def _budget(self) -> int:
        if self.budget_frames is None:
            pytest.skip("budget_frames is not set: this store's budget is not known here")
        return self.budget_frames
