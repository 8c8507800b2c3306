"""How the ranks of an engine on one host come to share memory.

::

    the first rank                                  every other rank
    listens                              <────      connects, says who it is
    sends descriptor, sizes, a mark      ────>      maps the memory, looks for the mark in it
                                         <────      says that it found it
    says to use it, once all have        ────>      uses it; without a word it keeps its own

The address is an abstract socket's: no file is left behind, and a second engine cannot take it, it
carries the process that started all ranks. Both sides look who the other is: the same user, the
same engine. Every wait has a bound, and whatever fails, each rank goes on with memory of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from kvstow.clock import Clock
from kvstow.errors import ConfigError, InvariantError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.shared_slots import SharedSlots

logger = logging.getLogger(__name__)

HANDOVER_S_MAX = 10.0
"""How long the ranks of an engine wait for each other."""

_PAUSE_S = 0.02
_MESSAGE_BYTES_MAX = 4096
_MARK_BYTES = 32
_FOUND, _USE = b"found", b"use"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class _Request(msgspec.Struct, frozen=True):
    """Who wants to share."""

    rank: int
    namespace: bytes


class _Offer(msgspec.Struct, frozen=True):
    """What is in the memory: (group, slots, frame bytes), and the mark at its beginning."""

    groups: tuple[tuple[int, int, int], ...]
    mark: bytes


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks of one engine meet, and how long they wait.

    Attributes:
        instance: the engine's id.
        namespace: what all its ranks agree on.
        world_size: ranks of the engine.
        s_max: how long each step may take.
    """

    instance: str
    namespace: NamespaceDigest
    world_size: int
    s_max: float = HANDOVER_S_MAX

    @property
    def address(self) -> bytes:
        """The abstract socket: of this engine, of the process that started its ranks."""
        # Process ids are unlike within one namespace of them only.
        space = os.stat("/proc/self/ns/pid").st_ino
        return f"\0kvstow-arena-{space}-{os.getppid()}-{self.instance}"[:100].encode()


def lend(meeting: Meeting, slots: SharedSlots, clock: Clock) -> bool:
    """On the first rank: hand ``slots`` to all others; whether to use it.

    Blocks for ``s_max`` at most. If the answer is no, no other rank uses the memory.
    """
    mark = os.urandom(_MARK_BYTES)
    group = next(iter(slots.slots))
    frame = slots.frame(group, 0)
    frame[:_MARK_BYTES] = mark
    offer = _Offer(
        tuple((group, count, slots.frame_bytes[group]) for group, count in slots.slots.items()), mark
    )
    give_up_s = clock.monotonic_s() + meeting.s_max
    try:
        with _gathered(meeting, offer, slots.descriptor, clock, give_up_s) as others:
            for rank, other in others.items():
                _say_use(rank, other)
            return True
    except OSError as error:
        logger.warning(
            "kvstow: the ranks of this engine do not share an arena (%s); each keeps copies of its own", error
        )
        return False
    finally:
        frame[:_MARK_BYTES] = bytes(_MARK_BYTES)


def borrow(meeting: Meeting, rank: Rank, clock: Clock) -> SharedSlots | None:
    """On another rank: the first rank's slots, to read; None if they are not to be had.

    Blocks for twice ``s_max`` and a moment at most.
    """
    try:
        with _connected(meeting, clock) as first:
            first.sendall(msgspec.msgpack.encode(_Request(rank, meeting.namespace)))
            slots = _receive(first)
            try:
                # All others have as long as this one had.
                first.settimeout(meeting.s_max + 1.0)
                first.sendall(_FOUND)
                if first.recv(len(_USE)) == _USE:
                    return slots
                raise ConnectionError("the first rank did not hear from all")
            except BaseException:
                slots.close()
                raise
    except (OSError, msgspec.DecodeError, ConfigError, InvariantError) as error:
        logger.warning(
            "kvstow: rank %d does not share the first rank's arena (%s); it keeps copies of its own",
            rank,
            error,
        )
        return None


@contextmanager
def _gathered(
    meeting: Meeting, offer: _Offer, descriptor: int, clock: Clock, give_up_s: float
) -> Iterator[dict[int, socket.socket]]:
    """Connections to all other ranks, by rank, each of which has found the mark."""
    others: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(meeting.address)
        listener.listen(meeting.world_size)
        while len(others) < meeting.world_size - 1:
            listener.settimeout(
                _left(clock, give_up_s, f"{len(others) + 1} of {meeting.world_size} ranks came")
            )
            other = stack.enter_context(listener.accept()[0])
            other.settimeout(_left(clock, give_up_s, "a rank connected too late"))
            rank = _rank_of(other, meeting)
            if rank is not None and rank not in others:
                socket.send_fds(other, [msgspec.msgpack.encode(offer)], [descriptor])
                others[rank] = other
        for rank, other in others.items():
            other.settimeout(_left(clock, give_up_s, f"rank {rank} did not answer"))
            if other.recv(len(_FOUND)) != _FOUND:
                raise ConnectionError(f"rank {rank} does not see the memory")
        yield others


def _say_use(rank: int, other: socket.socket) -> None:
    try:
        other.sendall(_USE)
    except OSError as error:
        # The others go on with it, and that one with copies of its own, if it lives.
        logger.warning("kvstow: rank %d does not hear that the arena is shared (%s)", rank, error)


def _rank_of(other: socket.socket, meeting: Meeting) -> int | None:
    """Which rank of this engine has connected; None if it is none of them."""
    if not _is_own_user(other):
        return None
    try:
        request = msgspec.msgpack.decode(other.recv(_MESSAGE_BYTES_MAX), type=_Request)
    except msgspec.DecodeError:
        return None
    is_ours = request.namespace == meeting.namespace and 0 < request.rank < meeting.world_size
    return request.rank if is_ours else None


@contextmanager
def _connected(meeting: Meeting, clock: Clock) -> Iterator[socket.socket]:
    """A connection to the first rank, as soon as it listens."""
    give_up_s = clock.monotonic_s() + meeting.s_max
    pause = threading.Event()
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.settimeout(_left(clock, give_up_s, "the first rank does not listen"))
            try:
                first.connect(meeting.address)
            except ConnectionRefusedError:
                pause.wait(_PAUSE_S)
                continue
            if not _is_own_user(first):
                raise PermissionError("another user listens in place of the first rank")
            yield first
            return


def _receive(first: socket.socket) -> SharedSlots:
    """The memory that the first rank sends, with its mark in it."""
    message, descriptors, _, _ = socket.recv_fds(first, _MESSAGE_BYTES_MAX, 1)
    for descriptor in descriptors:
        # Else a program that this process starts keeps the memory as long as it lives. (Python 3.11
        # does not pass flags on to the call that receives.)
        os.set_inheritable(descriptor, False)
    if len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("the first rank sent no memory")
    try:
        offer = msgspec.msgpack.decode(message, type=_Offer)
    except msgspec.DecodeError:
        os.close(descriptors[0])
        raise
    slots = SharedSlots.attach(
        descriptors[0],
        {GroupId(group): count for group, count, _ in offer.groups},
        {GroupId(group): size for group, _, size in offer.groups},
    )
    if slots.frame(GroupId(offer.groups[0][0]), 0)[:_MARK_BYTES] != offer.mark:
        slots.close()
        raise ConnectionError("the memory that came is not the first rank's")
    return slots


def _is_own_user(peer: socket.socket) -> bool:
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())


def _left(clock: Clock, give_up_s: float, else_: str) -> float:
    left_s = give_up_s - clock.monotonic_s()
    if left_s <= 0:
        raise TimeoutError(else_)
    return left_s
