"""Slots that several ranks see: one writes, the others read, and nothing outlives them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstow.errors import InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena, slots_for
from kvstow.stores.shared_slots import SharedSlots
from kvstow.testing.arena_contract import ArenaContract

if TYPE_CHECKING:
    from conftest import Fork

PAGE = 4096
G0, G1 = GroupId(0), GroupId(1)


def make(**sizes: tuple[int, int]) -> SharedSlots:
    """Shared slots of groups ``g0=(slots, pages)``."""
    groups = {GroupId(int(name[1:])): size for name, size in sizes.items()}
    return SharedSlots.make(
        {group: slots for group, (slots, _) in groups.items()},
        {group: pages * PAGE for group, (_, pages) in groups.items()},
    )


def attach(slots: SharedSlots) -> SharedSlots:
    """As another rank has them."""
    return SharedSlots.attach(os.dup(slots.descriptor), slots.slots, slots.frame_bytes)


class TestArenaOfTheFirstRank(ArenaContract):
    """All groups with slots are shared: for the rank that fills them nothing is different."""

    def make(self, slots: Sequence[int], frame_bytes: Sequence[int], staging_frames: int) -> Arena:
        here = {GroupId(group): count for group, count in enumerate(slots) if count > 0}
        sizes = dict(enumerate(frame_bytes))
        if len(slots) != len(frame_bytes) or not staging_frames or min(slots, default=0) < 0:
            return Arena(slots, frame_bytes, staging_frames)  # it is refused, or has no memory of its own
        if not here or any(sizes[group] % PAGE for group in here):
            return Arena(slots, frame_bytes, staging_frames)
        shared = SharedSlots.make(here, {group: sizes[group] for group in here})
        return Arena(slots, frame_bytes, staging_frames, shared)


def test_another_rank_sees_what_the_first_writes_and_cannot_write() -> None:
    first = Arena((2, 3), (PAGE, 2 * PAGE), 1, make(g1=(3, 2)))
    shared = first._shared
    assert shared is not None
    other = Arena((2, 3), (PAGE, 2 * PAGE), 1, attach(shared))
    assert (first.fills(G0), first.fills(G1), other.fills(G0), other.fills(G1)) == (True, True, True, False)
    for slot in range(3):
        first.frame(G1, slot)[:] = bytes([slot + 1]) * 2 * PAGE
    assert [bytes(other.frame(G1, slot)) for slot in range(3)] == [
        bytes([slot + 1]) * 2 * PAGE for slot in range(3)
    ]
    with pytest.raises(TypeError, match="read-only"):
        other.frame(G1, 0)[0] = 1
    other.frame(G0, 0)[:3] = b"own"
    assert bytes(first.frame(G0, 0)[:3]) == bytes(3)
    first.close()
    assert other.frame(G1, 2)[0] == 3  # it is there as long as anybody has it
    other.close()


def test_the_memory_counts_for_the_rank_that_fills_it() -> None:
    shared = make(g0=(4, 1))
    first, other = Arena((4,), (PAGE,), 1, shared), Arena((4,), (PAGE,), 1, attach(shared))
    assert (first.size_bytes, other.size_bytes) == (5 * PAGE, PAGE)
    first.close()
    other.close()


def test_pages_of_shared_slots_are_brought_in_by_the_first_rank() -> None:
    shared = make(g0=(64, 256))
    first = Arena((64,), (1 << 20,), 1, shared)
    first.prefault(1 << 20)
    assert first.wait_prefaulted(60.0)
    assert os.fstat(shared.descriptor).st_blocks * 512 == 64 << 20
    first.close()


def test_nobody_can_take_memory_away_from_under_a_reader() -> None:
    shared = make(g0=(2, 1))
    other = attach(shared)
    with pytest.raises(PermissionError):
        os.truncate(shared.descriptor, 0)
    shared.close()
    assert bytes(other.frame(G0, 1)) == bytes(PAGE)
    other.close()


def test_a_view_in_use_outlives_close() -> None:
    shared = make(g0=(1, 1))
    frame = shared.frame(G0, 0)
    frame[:4] = b"keep"
    assert not shared.close()
    assert shared.close()
    assert bytes(frame[:4]) == b"keep"
    with pytest.raises(InvariantError, match="closed"):
        shared.frame(G0, 0)


@pytest.mark.parametrize(("group", "slot"), [(0, 2), (0, -1), (1, 0)])
def test_a_slot_that_is_outside_is_refused(group: int, slot: int) -> None:
    shared = make(g0=(2, 1))
    with pytest.raises(InvariantError, match=f"group {group} slot {slot}"):
        shared.frame(GroupId(group), slot)
    shared.close()


@pytest.mark.parametrize(("slots", "size"), [(0, PAGE), (1, 100), (1, 0)])
def test_sizes_that_make_no_sense_are_refused(slots: int, size: int) -> None:
    with pytest.raises(InvariantError, match="shared slots"):
        SharedSlots.make({G0: slots}, {G0: size})
    with pytest.raises(InvariantError, match="no group"):
        SharedSlots.make({}, {})


def test_other_sizes_than_the_memory_has_are_refused_and_nothing_stays_open() -> None:
    shared = make(g0=(2, 1))
    descriptor = os.dup(shared.descriptor)
    with pytest.raises(InvariantError, match="memory of"):
        SharedSlots.attach(descriptor, {G0: 3}, {G0: PAGE})
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
    with pytest.raises(InvariantError, match="group 0"):
        Arena((3,), (PAGE,), 1, shared)
    shared.close()


def test_the_budget_pays_once_for_what_lies_there_once() -> None:
    # Two ranks: 2 staging frames, and slots for a latent that is kept once and a state that is not.
    assert slots_for(100 * PAGE, (PAGE, 2 * PAGE), 2, copies=(2, 2)) == (16, 16)
    assert slots_for(100 * PAGE, (PAGE, 2 * PAGE), 2, copies=(1, 2)) == (19, 19)
    assert slots_for(100 * PAGE, (PAGE, 2 * PAGE), 2, (0.0, 0.5), copies=(1, 2)) == (48, 12)


def test_ranks_that_are_killed_leave_nothing_behind(fork: Fork) -> None:
    """The memory has no name, in /dev/shm or elsewhere: it goes with the processes that have it."""

    def work(say: Callable[[bytes], None]) -> None:
        shared = make(g0=(16, 256))
        arena = Arena((16,), (1 << 20,), 1, shared)
        np.frombuffer(arena.frame(G0, 0), np.uint8)[:] = 1
        say(os.readlink(f"/proc/self/fd/{shared.descriptor}").ljust(64).encode())
        signal.pause()

    child = fork(work)
    assert child.hear(64).rstrip() == b"/memfd:kvstow-slots (deleted)"
    child.kill()
