"""Ranks find each other and share memory, or each goes on with its own; within bounds either way."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstow.clock import SystemClock
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores import handover
from kvstow.stores.handover import Meeting, borrow, lend
from kvstow.stores.rank_arena import ArenaBudget, open_arena
from kvstow.stores.shared_slots import SharedSlots

if TYPE_CHECKING:
    from conftest import Fork

PAGE = 4096
G0 = GroupId(0)
CLOCK = SystemClock()


def meeting(ranks: int, name: str, s_max: float = 20.0, namespace: bytes = b"n" * 32) -> Meeting:
    return Meeting(f"{name}-{os.getpid()}", NamespaceDigest(namespace), ranks, s_max)


@pytest.fixture
def slots() -> Iterator[SharedSlots]:
    slots = SharedSlots.make({G0: 3}, {G0: PAGE})
    yield slots
    slots.close()


def test_all_ranks_see_the_memory_and_the_mark_is_gone(slots: SharedSlots) -> None:
    place = meeting(3, "all")
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(borrow, place, Rank(rank), CLOCK) for rank in (1, 2)]
        assert lend(place, slots, CLOCK)
        borrowed = [other.result() for other in others]
    slots.frame(G0, 2)[:5] = b"frame"
    for other in borrowed:
        assert other is not None
        assert not other.is_first
        assert not os.get_inheritable(other.descriptor)
        assert bytes(other.frame(G0, 2)[:5]) == b"frame"
        assert bytes(other.frame(G0, 0)) == bytes(PAGE)
        other.close()


def test_the_first_rank_may_come_last(slots: SharedSlots) -> None:
    place = meeting(2, "last")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(borrow, place, Rank(1), CLOCK)
        time.sleep(0.2)
        assert lend(place, slots, CLOCK)
        borrowed = other.result()
    assert borrowed is not None
    borrowed.close()


def test_a_rank_that_does_not_come_leaves_each_with_its_own(
    slots: SharedSlots, caplog: pytest.LogCaptureFixture
) -> None:
    place = meeting(3, "missing", s_max=0.3)
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        other = threads.submit(borrow, place, Rank(1), CLOCK)
        assert not lend(place, slots, CLOCK)
        assert other.result() is None
    assert time.monotonic() - began_s < 5.0
    assert "2 of 3 ranks came" in caplog.text or "timed out" in caplog.text
    assert caplog.text.count("copies of its own") == 2


def test_memory_that_one_rank_has_found_is_not_used_when_another_does_not_answer(slots: SharedSlots) -> None:
    place = meeting(3, "silent", s_max=1.0)
    with ThreadPoolExecutor(2) as threads, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        first = threads.submit(lend, place, slots, CLOCK)
        found = threads.submit(borrow, place, Rank(1), CLOCK)
        time.sleep(0.3)  # the rank that answers comes first
        silent.connect(place.address)
        silent.sendall(msgspec.msgpack.encode({"rank": 2, "namespace": place.namespace}))
        assert not first.result()
        assert found.result() is None


def test_without_a_first_rank_another_gives_up_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert borrow(meeting(2, "alone", s_max=0.2), Rank(1), CLOCK) is None
    assert "does not listen" in caplog.text


def test_the_address_is_free_again_afterwards(slots: SharedSlots) -> None:
    place = meeting(2, "again", s_max=0.1)
    assert not lend(place, slots, CLOCK)
    assert not lend(place, slots, CLOCK)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(place.address)


def test_a_second_engine_of_the_same_name_gets_nothing(
    slots: SharedSlots, caplog: pytest.LogCaptureFixture
) -> None:
    place = meeting(2, "twice", s_max=0.5)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        first = threads.submit(lend, place, slots, CLOCK)
        time.sleep(0.1)
        assert not lend(place, slots, CLOCK)
        assert not first.result()
    assert "in use" in caplog.text


def test_an_engine_of_another_parent_has_another_address(fork: Fork) -> None:
    """Two servers that were given one id: their ranks have other parents."""

    def work(say: Callable[[bytes], None]) -> None:
        say(Meeting("one id", NamespaceDigest(b"n" * 32), 2).address.ljust(108, b" "))

    here = Meeting("one id", NamespaceDigest(b"n" * 32), 2).address
    assert fork(work).hear(108).rstrip() != here
    assert here[0] == 0  # abstract: no file


@pytest.mark.parametrize(
    "request_",
    [
        msgspec.msgpack.encode({"rank": 1, "namespace": b"x" * 32}),
        msgspec.msgpack.encode({"rank": 0, "namespace": b"n" * 32}),
        msgspec.msgpack.encode({"rank": 2, "namespace": b"n" * 32}),
        b"hello",
        b"",
    ],
    ids=["other namespace", "the first rank", "no such rank", "not a request", "nothing"],
)
def test_a_stranger_gets_no_memory(slots: SharedSlots, request_: bytes) -> None:
    place = meeting(2, "stranger", s_max=2.0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lend, place, slots, CLOCK)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            while True:
                try:
                    stranger.connect(place.address)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
            stranger.settimeout(5.0)
            if request_:
                stranger.sendall(request_)
            else:
                stranger.shutdown(socket.SHUT_WR)
            other = threads.submit(borrow, place, Rank(1), CLOCK)
            assert first.result()
            borrowed = other.result()
            _, descriptors, _, _ = socket.recv_fds(stranger, 4096, 1)
            assert descriptors == []
    assert borrowed is not None
    borrowed.close()


def test_another_user_is_refused(slots: SharedSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    place = meeting(2, "user", s_max=0.5)
    user = os.geteuid()
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(handover.os, "geteuid", lambda: user + 1)
        other = threads.submit(borrow, place, Rank(1), CLOCK)
        assert not lend(place, slots, CLOCK)
        assert other.result() is None


def test_memory_without_the_mark_is_not_used(
    slots: SharedSlots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = meeting(2, "mark", s_max=1.0)
    stranger = SharedSlots.make({G0: 3}, {G0: PAGE})
    send = socket.send_fds
    monkeypatch.setattr(
        handover.socket, "send_fds", lambda to, message, _: send(to, message, [stranger.descriptor])
    )
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        other = threads.submit(borrow, place, Rank(1), CLOCK)
        assert not lend(place, slots, CLOCK)
        assert other.result() is None
    assert "not the first rank's" in caplog.text
    stranger.close()


def test_processes_share_what_the_first_rank_writes(fork: Fork) -> None:
    place = Meeting(f"processes-{os.getpid()}", NamespaceDigest(b"n" * 32), 2)

    def first(say: Callable[[bytes], None]) -> None:
        slots = SharedSlots.make({G0: 2}, {G0: PAGE})
        say(b"+" if lend(place, slots, CLOCK) else b"-")
        slots.frame(G0, 1)[:5] = b"frame"
        say(b"w")
        time.sleep(60)

    def second(say: Callable[[bytes], None]) -> None:
        slots = borrow(place, Rank(1), CLOCK)
        say(b"+" if slots is not None else b"-")
        while slots is not None and not slots.frame(G0, 1)[4]:
            time.sleep(0.01)
        say(bytes(slots.frame(G0, 1)[:5]) if slots is not None else b"?")
        time.sleep(60)

    writer, reader = fork(first), fork(second)
    assert writer.hear(2) == b"+w"
    assert reader.hear(6) == b"+frame"
    writer.kill()
    reader.kill()


# ---- an engine's budget ----------------------------------------------------------------------


def test_ranks_that_share_hold_more_within_one_budget() -> None:
    budget = ArenaBudget(100 * PAGE, (PAGE, PAGE), staging_frames=1, shares=(0.0, 0.0), world_size=2)
    place = meeting(2, "budget")
    replicated = frozenset({G0})
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(open_arena, budget, replicated, Rank(1), place, CLOCK)
        first_arena, first_slots = open_arena(budget, replicated, Rank(0), place, CLOCK)
        other_arena, other_slots = other.result()
    assert first_slots == other_slots == (32, 32)
    assert first_arena.size_bytes + other_arena.size_bytes <= budget.budget_bytes
    first_arena.frame(G0, 31)[:3] = b"abc"
    assert bytes(other_arena.frame(G0, 31)[:3]) == b"abc"
    assert not other_arena.fills(G0)
    first_arena.close()
    other_arena.close()


def test_ranks_that_do_not_find_each_other_keep_their_own_within_the_budget() -> None:
    budget = ArenaBudget(100 * PAGE, (PAGE, PAGE), staging_frames=1, shares=(0.0, 0.0), world_size=2)
    place = meeting(2, "apart", s_max=0.1)
    arenas = [open_arena(budget, frozenset({G0}), Rank(rank), place, CLOCK) for rank in (0, 1)]
    assert [slots for _, slots in arenas] == [(24, 24), (24, 24)]
    assert sum(arena.size_bytes for arena, _ in arenas) <= budget.budget_bytes
    for arena, _ in arenas:
        assert arena.fills(G0)
        arena.close()


def test_where_no_memory_can_be_shared_each_rank_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "no such call here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    budget = ArenaBudget(100 * PAGE, (PAGE, PAGE), staging_frames=1, shares=(0.0, 0.0), world_size=2)
    place = meeting(2, "refused", s_max=0.1)
    arena, slots = open_arena(budget, frozenset({G0}), Rank(0), place, CLOCK)
    assert slots == (24, 24)
    assert arena.fills(G0)
    arena.close()


def test_nothing_is_waited_for_where_nothing_is_replicated() -> None:
    budget = ArenaBudget(100 * PAGE, (PAGE,), staging_frames=1, shares=(0.0,), world_size=2)
    began_s = time.monotonic()
    arena, slots = open_arena(budget, frozenset(), Rank(1), meeting(2, "none"), CLOCK)
    assert time.monotonic() - began_s < 1.0
    assert slots == (49,)
    arena.close()
