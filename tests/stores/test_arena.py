"""The arena: slots that do not overlap, memory that is bounded and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvstow.errors import ConfigError, InvariantError
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena, frames_for, slots_for
from kvstow.testing.arena_contract import ArenaContract

if TYPE_CHECKING:
    from conftest import Fork

PAGE = 4096
G0 = GroupId(0)


class TestArena(ArenaContract):
    def make(self, slots: Sequence[int], frame_bytes: Sequence[int], staging_frames: int) -> Arena:
        return Arena(slots, frame_bytes, staging_frames)


def test_slots_are_equal_for_all_groups_and_fit_the_budget() -> None:
    frames = (3 * PAGE, 10 * PAGE)
    budget = 2 * 10 * PAGE + 4 * 13 * PAGE
    assert slots_for(budget, frames, staging_frames=2) == (4, 4)
    assert slots_for(budget - 1, frames, staging_frames=2) == (3, 3)
    assert Arena((4, 4), frames, 2).size_bytes == budget


def test_a_budget_below_one_chunk_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=f"use {23 * PAGE} or more"):
        slots_for(23 * PAGE - 1, (3 * PAGE, 10 * PAGE), staging_frames=1)


def test_more_than_the_machine_can_map_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="lower the arena budget"):
        Arena((1 << 40,), (1 << 30,), staging_frames=0)


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


def test_a_process_that_is_killed_leaves_nothing_behind(fork: Fork) -> None:
    """All is anonymous memory, which the kernel takes back: no file in /dev/shm or elsewhere."""

    def work(say: Callable[[bytes], None]) -> None:
        arena = Arena((16,), (1 << 20,), staging_frames=1)
        arena.prefault(step_bytes=1 << 20)
        say(b"+")
        signal.pause()

    before = _mapped_files(os.getpid())
    child = fork(work)
    assert child.hear(1) == b"+"
    assert _mapped_files(child.pid) <= before
    child.kill()


def _mapped_files(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.partition("/")[2] for line in lines if "/" in line}


def _minor_faults() -> int:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[7])


@pytest.mark.parametrize(
    ("budget", "frames", "shares", "slots"),
    [
        (1000, (10, 10), (0.0, 0.0), (50, 50)),
        (1000, (10, 100), (0.0, 0.25), (75, 2)),
        (1000, (10, 5, 100, 100), (0.0, 0.0, 0.2, 0.2), (40, 40, 2, 2)),
        (1000, (100,), (0.25,), (10,)),  # nobody else wants the rest
        (1000, (100, 100), (0.1, 0.1), (5, 5)),
        (0, (10, 100), (0.0, 0.25), (0, 0)),
    ],
)
def test_a_group_with_a_share_of_its_own_takes_none_of_the_others(
    budget: int, frames: tuple[int, ...], shares: tuple[float, ...], slots: tuple[int, ...]
) -> None:
    assert frames_for(budget, frames, shares) == slots
    assert sum(size * count for size, count in zip(frames, slots, strict=True)) <= budget


def test_the_error_names_a_budget_that_is_enough() -> None:
    frames, shares = (2 * PAGE, 9 * PAGE), (0.0, 0.25)
    with pytest.raises(ConfigError, match=r"use (\d+) or more") as refused:
        slots_for(PAGE, frames, 1, shares)
    enough = int(str(refused.value).split("use ")[1].split(" ")[0])
    assert min(slots_for(enough, frames, 1, shares)) >= 1
