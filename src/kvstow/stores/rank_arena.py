"""One rank's arena, within the budget of its engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from kvstow.clock import Clock
from kvstow.errors import ConfigError
from kvstow.keys.ids import Rank
from kvstow.layout.geometry import GroupId
from kvstow.stores.arena import Arena, slots_for
from kvstow.stores.handover import Meeting, borrow, lend
from kvstow.stores.shared_slots import SharedSlots

logger = logging.getLogger(__name__)


class ArenaBudget(msgspec.Struct, frozen=True):
    """What the arenas of all ranks of an engine may occupy together.

    Attributes:
        budget_bytes: all of it.
        frame_bytes: bytes of one frame on one rank, by group.
        staging_frames: on each rank.
        shares: the part of the budget that is for a group alone, by group; 0 for none.
        world_size: ranks.
    """

    budget_bytes: int
    frame_bytes: tuple[int, ...]
    staging_frames: int
    shares: tuple[float, ...]
    world_size: int

    def slots(self, shared: frozenset[GroupId]) -> tuple[int, ...]:
        """Slots on each rank, by group, where the frames of groups in ``shared`` lie there once.

        Raises:
            ConfigError: the budget does not hold one frame of every group.
        """
        copies = [
            1 if GroupId(group) in shared else self.world_size for group in range(len(self.frame_bytes))
        ]
        staging_frames = self.staging_frames * self.world_size
        return slots_for(self.budget_bytes, self.frame_bytes, staging_frames, self.shares, copies)


def open_arena(
    budget: ArenaBudget, replicated: frozenset[GroupId], rank: Rank, meeting: Meeting, clock: Clock
) -> tuple[Arena, tuple[int, ...]]:
    """One rank's arena, and how many slots each group has in it.

    Groups of which all ranks hold the same bytes lie in it once, if the ranks find each other; else
    each rank has copies of its own. Blocks for some seconds where there are such groups, and not
    otherwise.

    Args:
        budget: the engine's.
        replicated: such groups; none if the ranks are not all on this host.
        rank: whose arena.
        meeting: where the ranks find each other.
        clock: monotonic time.

    Raises:
        ConfigError: the budget does not hold one frame of every group, or the system does not
            give so much memory.
    """
    frame_bytes = budget.frame_bytes
    slots = list(budget.slots(replicated))
    shared = None
    if replicated and rank:
        shared = borrow(meeting, rank, clock)
    elif replicated:
        shared = _lent({group: slots[group] for group in sorted(replicated)}, frame_bytes, meeting, clock)
    if shared is None:
        slots = list(budget.slots(frozenset()))
    else:
        for group, count in shared.slots.items():
            slots[group] = count
        logger.info(
            "kvstow: rank %d %s %.2f GiB of slots that all %d ranks share",
            rank,
            "reads" if rank else "fills",
            shared.size_bytes / (1 << 30),
            budget.world_size,
        )
    return Arena(slots, frame_bytes, budget.staging_frames, shared), tuple(slots)


def _lent(
    slots: Mapping[GroupId, int], frame_bytes: Sequence[int], meeting: Meeting, clock: Clock
) -> SharedSlots | None:
    """The first rank's slots, when all other ranks have them; None if that cannot be."""
    try:
        shared = SharedSlots.make(slots, {group: frame_bytes[group] for group in slots})
    except ConfigError as error:
        # A sandbox may refuse such memory and give any other.
        logger.warning("kvstow: the ranks share no slots (%s); each keeps copies of its own", error)
        return None
    if lend(meeting, shared, clock):
        return shared
    shared.close()
    return None
