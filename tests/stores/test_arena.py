"""The arena: slots that do not overlap, memory that is bounded and comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from kvstow.errors import ConfigError, InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena, slots_for

if TYPE_CHECKING:
    from conftest import Fork

PAGE = 4096
G0, G1 = GroupId(0), GroupId(1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(slots=(3, 2), frame_bytes=(2 * PAGE, 5 * PAGE), staging_frames=2)
    yield arena
    arena.close()


def test_slots_are_equal_for_all_groups_and_fit_the_budget() -> None:
    frames = (3 * PAGE, 10 * PAGE)
    budget = 2 * 10 * PAGE + 4 * 13 * PAGE
    assert slots_for(budget, frames, staging_frames=2) == (4, 4)
    assert slots_for(budget - 1, frames, staging_frames=2) == (3, 3)
    assert Arena((4, 4), frames, 2).size_bytes == budget


def test_a_budget_below_one_chunk_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=f"use {23 * PAGE} or more"):
        slots_for(23 * PAGE - 1, (3 * PAGE, 10 * PAGE), staging_frames=1)


def test_frames_are_whole_aligned_and_apart(arena: Arena) -> None:
    frames = [arena.frame(G0, slot) for slot in range(3)] + [arena.frame(G1, slot) for slot in range(2)]
    frames += [arena.acquire_staging(group, 0.0).frame for group in (G0, G1)]
    assert [len(frame) for frame in frames] == [2 * PAGE] * 3 + [5 * PAGE] * 2 + [2 * PAGE, 5 * PAGE]
    for number, frame in enumerate(frames, start=1):
        assert np.frombuffer(frame, np.uint8).ctypes.data % PAGE == 0
        frame[:] = bytes([number]) * len(frame)
    for number, frame in enumerate(frames, start=1):
        assert frame == bytes([number]) * len(frame)


def test_a_slot_is_the_same_memory_each_time(arena: Arena) -> None:
    arena.frame(G1, 1)[:3] = b"abc"
    assert arena.frame(G1, 1)[:3] == b"abc"


@pytest.mark.parametrize(("group", "slot"), [(0, 3), (0, -1), (1, 2), (2, 0), (-1, 0)])
def test_what_is_outside_is_refused(arena: Arena, group: int, slot: int) -> None:
    with pytest.raises(InvariantError, match=f"group {group} slot {slot}"):
        arena.frame(GroupId(group), slot)


@pytest.mark.parametrize(
    ("slots", "frames"), [((1,), (PAGE, PAGE)), ((1,), (100,)), ((), ()), ((-1,), (PAGE,))]
)
def test_sizes_that_make_no_sense_are_refused(slots: tuple[int, ...], frames: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError):
        Arena(slots, frames, staging_frames=1)


def test_more_than_the_machine_can_map_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="lower the arena budget"):
        Arena((1 << 40,), (1 << 30,), staging_frames=0)


def test_staging_is_bounded_and_comes_back(arena: Arena) -> None:
    first, second = arena.acquire_staging(G0, 0.0), arena.acquire_staging(G1, 0.0)
    assert first is not None
    assert second is not None
    assert arena.acquire_staging(G0, 0.0) is None
    assert arena.acquire_staging(G0, 0.001) is None
    first.release()
    with pytest.raises(InvariantError, match="released twice"):
        first.release()
    with arena.acquire_staging(G1, 0.0) as frame:
        assert len(frame) == 5 * PAGE
        assert arena.acquire_staging(G1, 0.0) is None
    assert arena.acquire_staging(G1, 0.0) is not None


def test_a_waiting_reader_gets_the_frame_that_is_released(arena: Arena) -> None:
    lent = [arena.acquire_staging(G0, 0.0), arena.acquire_staging(G0, 0.0)]
    got = []
    reader = threading.Thread(target=lambda: got.append(arena.acquire_staging(G0, 30.0)))
    reader.start()
    lent[1].release()
    reader.join()
    assert got[0] is not None


def test_close_wakes_a_waiting_reader(arena: Arena) -> None:
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


def test_prefault_brings_in_all_pages_and_alters_none() -> None:
    arena = Arena((64,), (1 << 20,), staging_frames=1)
    for slot in range(64):
        arena.frame(G0, slot)[:8] = slot.to_bytes(8, "little")
    arena.prefault(step_bytes=1 << 20)
    assert arena.wait_prefaulted(60.0)
    for slot in range(64):
        assert arena.frame(G0, slot)[:16] == slot.to_bytes(8, "little") + bytes(8)
    content = b"x" * (1 << 20)
    before = _minor_faults()
    arena.frame(G0, 5)[:] = content
    assert _minor_faults() - before < 128
    with pytest.raises(InvariantError, match="once"):
        arena.prefault(step_bytes=1 << 20)
    arena.close()


def test_close_stops_prefault_and_frees_the_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().vms
    arena = Arena((256,), (1 << 20,), staging_frames=0)
    arena.prefault(step_bytes=PAGE)
    arena.close()
    arena.close()
    assert process.memory_info().vms - before < 128 << 20
    with pytest.raises(InvariantError, match="closed"):
        arena.frame(G0, 0)
    assert arena.wait_prefaulted(0.0)


def test_a_view_in_use_outlives_close(arena: Arena) -> None:
    frame = arena.frame(G0, 0)
    frame[:4] = b"keep"
    arena.close()
    assert frame[:4] == b"keep"


def test_a_killed_process_leaves_nothing_behind(fork: Fork) -> None:
    before = set(os.listdir("/dev/shm"))

    def work(say: Callable[[bytes], None]) -> None:
        arena = Arena((16,), (1 << 20,), staging_frames=1)
        arena.prefault(step_bytes=1 << 20)
        say(b"+")
        signal.pause()

    child = fork(work)
    assert child.hear(1) == b"+"
    child.kill()
    assert set(os.listdir("/dev/shm")) == before


def _minor_faults() -> int:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])
