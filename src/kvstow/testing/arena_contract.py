"""What every arena must do: inherit `ArenaContract`, say how to make one, and run pytest.

::

    class TestMyArena(ArenaContract):
        def make(self, slots, frame_bytes, staging_frames):
            return MyArena(slots, frame_bytes, staging_frames)

An arena is no store: it has places, not names, so it promises other things. Its memory is distinct
and stays where it is, nothing outside the slots can be had, and staging frames are lent and come back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvstow.errors import InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena
from kvstow.stores.framing import HEADER_BYTES

PAGE = HEADER_BYTES
G0, G1 = GroupId(0), GroupId(1)

few_and_repeatable = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],
)


def fill(frame: memoryview, number: int) -> None:
    """Write bytes that only ``number`` has, as long as it is below 256."""
    frame[:] = bytes([number]) * len(frame)


def holds(frame: memoryview, number: int) -> bool:
    """Whether every byte is as `fill` left it."""
    return bytes(frame) == bytes([number]) * len(frame)


class ArenaContract:
    """The tests. Override `make`."""

    def make(self, slots: Sequence[int], frame_bytes: Sequence[int], staging_frames: int) -> Arena:
        """The arena under test; see `kvstow.stores.arena.Arena`."""
        raise NotImplementedError

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """Two groups with slots of different lengths, and two staging frames."""
        arena = self.make((3, 2), (2 * PAGE, 5 * PAGE), 2)
        yield arena
        arena.close()

    @few_and_repeatable
    @given(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 3)
    )
    def test_every_frame_is_whole_aligned_and_apart_from_all_others(
        self, groups: list[tuple[int, int]], staging_frames: int
    ) -> None:
        assume(staging_frames or any(slots for slots, _ in groups))
        sizes = [pages * PAGE for _, pages in groups]
        arena = self.make([slots for slots, _ in groups], sizes, staging_frames)
        frames = [
            (arena.frame(GroupId(group), slot), sizes[group])
            for group, (slots, _) in enumerate(groups)
            for slot in range(slots)
        ]
        for index in range(staging_frames):
            group = index % len(groups)
            lent = arena.acquire_staging(GroupId(group), 0.0)
            assert lent is not None
            frames.append((lent.frame, sizes[group]))
        for number, (frame, size) in enumerate(frames):
            assert len(frame) == size
            assert np.frombuffer(frame, np.uint8).ctypes.data % PAGE == 0
            fill(frame, number)
        assert all(holds(frame, number) for number, (frame, _) in enumerate(frames))
        assert sum(len(frame) for frame, _ in frames) <= arena.size_bytes
        arena.close()

    def test_a_slot_is_the_same_memory_each_time(self, arena: Arena) -> None:
        kept = arena.frame(G1, 1)
        kept[:3] = b"abc"
        assert bytes(arena.frame(G1, 1)[:3]) == b"abc"
        arena.frame(G1, 1)[:3] = b"def"
        assert bytes(kept[:3]) == b"def"

    @pytest.mark.parametrize(("group", "slot"), [(0, 3), (0, -1), (1, 2), (2, 0), (-1, 0)])
    def test_a_slot_that_is_outside_is_refused(self, arena: Arena, group: int, slot: int) -> None:
        with pytest.raises(InvariantError, match=f"group {group} slot {slot}"):
            arena.frame(GroupId(group), slot)

    @pytest.mark.parametrize("group", [-1, 2])
    def test_staging_for_a_group_that_is_not_there_is_refused(self, arena: Arena, group: int) -> None:
        with pytest.raises(InvariantError, match=f"group {group}"):
            arena.acquire_staging(GroupId(group), 0.0)

    @pytest.mark.parametrize(
        ("slots", "frames", "staging_frames"),
        [
            ((1,), (PAGE, PAGE), 1),
            ((1,), (100,), 1),
            ((), (), 1),
            ((-1,), (PAGE,), 1),
            ((1,), (PAGE,), -1),
            ((0, 0), (PAGE, PAGE), 0),
        ],
    )
    def test_sizes_that_make_no_sense_are_refused(
        self, slots: tuple[int, ...], frames: tuple[int, ...], staging_frames: int
    ) -> None:
        with pytest.raises(InvariantError):
            self.make(slots, frames, staging_frames)

    def test_staging_is_bounded_and_comes_back(self, arena: Arena) -> None:
        first, second = arena.acquire_staging(G0, 0.0), arena.acquire_staging(G1, 0.0)
        assert first is not None
        assert second is not None
        assert arena.acquire_staging(G0, 0.0) is None
        assert arena.acquire_staging(G0, 0.001) is None
        first.release()
        with pytest.raises(InvariantError, match="released twice"):
            first.release()
        again = arena.acquire_staging(G1, 0.0)
        assert again is not None
        with again as frame:
            assert len(frame) == 5 * PAGE
            assert arena.acquire_staging(G1, 0.0) is None
        assert arena.acquire_staging(G1, 0.0) is not None

    def test_a_waiting_reader_gets_the_frame_that_is_released(self, arena: Arena) -> None:
        lent = [arena.acquire_staging(G0, 0.0), arena.acquire_staging(G0, 0.0)]
        got = []
        reader = threading.Thread(target=lambda: got.append(arena.acquire_staging(G0, 30.0)))
        reader.start()
        assert lent[1] is not None
        lent[1].release()
        reader.join()
        assert got[0] is not None

    def test_close_wakes_a_waiting_reader(self, arena: Arena) -> None:
        lent = [arena.acquire_staging(G0, 0.0), arena.acquire_staging(G0, 0.0)]
        refused = []

        def wait() -> None:
            with pytest.raises(InvariantError, match="closed"):
                arena.acquire_staging(G0, 30.0)
            refused.append(True)

        reader = threading.Thread(target=wait)
        reader.start()
        arena.close()
        reader.join()
        assert refused == [True]
        assert len(lent) == 2

    def test_threads_never_share_a_staging_frame(self, arena: Arena) -> None:
        def borrow(number: int) -> None:
            for _ in range(200):
                lent = arena.acquire_staging((G0, G1)[number % 2], 30.0)
                assert lent is not None
                with lent as frame:
                    fill(frame, number)
                    assert holds(frame, number)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(borrow, range(1, 5)))
        assert arena.acquire_staging(G0, 0.0) is not None

    def test_threads_write_slots_beside_each_other(self, arena: Arena) -> None:
        places = [(G0, slot) for slot in range(3)] + [(G1, slot) for slot in range(2)]

        def write(number: int) -> None:
            group, slot = places[number]
            for turn in range(50):
                frame = arena.frame(group, slot)
                fill(frame, 5 * turn + number)
                assert holds(arena.frame(group, slot), 5 * turn + number)

        with ThreadPoolExecutor(len(places)) as threads:
            list(threads.map(write, range(len(places))))

    def test_what_a_slot_holds_outlives_all_that_happens_beside_it(self, arena: Arena) -> None:
        rng = random.Random(0)
        places = [(G0, slot) for slot in range(3)] + [(G1, slot) for slot in range(2)]
        model = dict.fromkeys(places, 0)
        for turn in range(1, 255):
            place = rng.choice(places)
            fill(arena.frame(*place), turn)
            model[place] = turn
            lent = arena.acquire_staging(place[0], 0.0)
            assert lent is not None
            with lent as frame:
                fill(frame, 255)
            assert all(holds(arena.frame(*place), number) for place, number in model.items())

    def test_a_view_in_use_outlives_close(self, arena: Arena) -> None:
        frame = arena.frame(G0, 0)
        frame[:4] = b"keep"
        arena.close()
        assert bytes(frame[:4]) == b"keep"

    def test_a_closed_arena_says_so(self, arena: Arena) -> None:
        arena.close()
        arena.close()
        with pytest.raises(InvariantError, match="closed"):
            arena.frame(G0, 0)
        with pytest.raises(InvariantError, match="closed"):
            arena.acquire_staging(G0, 0.0)
