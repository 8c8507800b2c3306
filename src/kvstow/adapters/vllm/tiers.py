"""One rank's arena and disk: budgets, who shares them, and what each holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstow.adapters.vllm.setup import image_shares
from kvstow.clock import Clock
from kvstow.config.memory import available_bytes
from kvstow.config.settings import GIB, Settings, resolve_arena_bytes
from kvstow.errors import StoreError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId, Layout
from kvstow.stores.arena import Arena, frames_for
from kvstow.stores.base import Store
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import frame_bytes
from kvstow.stores.handover import Meeting
from kvstow.stores.rank_arena import ArenaBudget, open_arena
from kvstow.stores.replica import ReplicaStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class Namespaces(msgspec.Struct, frozen=True):
    """Digests of what must agree before bytes are shared.

    Attributes:
        agreed: without the rank: the same on all.
        own: this rank's.
        first: the first rank's, if it has the same layout.
    """

    agreed: NamespaceDigest
    own: NamespaceDigest
    first: NamespaceDigest


class Tiers(msgspec.Struct, frozen=True):
    """What one rank keeps frames in.

    Attributes:
        frame_bytes: bytes of one frame, by group.
        arena: its DRAM.
        arena_slots: frames that the arena holds, by group.
        disk: its disk, or None.
        disk_frames: frames that the disk holds, by group; 0 without a disk.
        elsewhere: groups whose frames the first rank's disk keeps for all.
    """

    frame_bytes: tuple[int, ...]
    arena: Arena
    arena_slots: tuple[int, ...]
    disk: Store | None
    disk_frames: tuple[int, ...]
    elsewhere: frozenset[GroupId]

    @property
    def arena_frame_bytes(self) -> tuple[int, ...]:
        """What one frame takes in this rank's arena, by group."""
        groups = map(GroupId, range(len(self.frame_bytes)))
        return self._kept(group for group in groups if self.arena.fills(group))

    @property
    def disk_frame_bytes(self) -> tuple[int, ...]:
        """What one frame takes on this rank's disk, by group."""
        return self._kept(set(range(len(self.frame_bytes))) - self.elsewhere)

    def _kept(self, groups: Iterable[int]) -> tuple[int, ...]:
        here = set(groups)
        return tuple(size if group in here else 0 for group, size in enumerate(self.frame_bytes))


def open_tiers(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    layout: Layout,
    namespaces: Namespaces,
    clock: Clock,
) -> Tiers:
    """Open what this rank keeps frames in; without a disk if there is none to be had.

    Blocks for some seconds where ranks share slots.

    Raises:
        ConfigError: the arena's budget is too small, or more than the machine has.
    """
    parallel = vllm_config.parallel_config
    rank, world_size = Rank(parallel.rank), parallel.world_size
    frames = tuple(frame_bytes(layout.payload_bytes(GroupId(index))) for index in range(len(layout.groups)))
    shares = image_shares(kv_cache_config, settings)
    arena_bytes = resolve_arena_bytes(settings, available_bytes())
    budget = ArenaBudget(arena_bytes, frames, settings.disk_readers, shares, world_size)
    meeting = Meeting(_instance(vllm_config), namespaces.agreed, world_size)
    arena, arena_slots = open_arena(budget, layout.replicated, rank, meeting, clock)
    # What all ranks together keep of one frame: one copy of what is replicated.
    copies = [1 if group.replicated else world_size for group in layout.groups]
    stored_bytes = [size * count for size, count in zip(frames, copies, strict=True)]
    # A frame's room on each rank is never planned with: a self-test finds it on a disk that is full.
    disk_bytes = max(0, int(settings.disk_gib * GIB) - world_size * max(frames))
    disk_frames = frames_for(disk_bytes, stored_bytes, shares)
    elsewhere = layout.replicated if rank else frozenset()
    share_bytes = max(frames) + sum(
        frames[group] * count for group, count in enumerate(disk_frames) if group not in elsewhere
    )
    disk = _open_disk(vllm_config, settings, share_bytes, elsewhere, namespaces, clock)
    if disk is None:
        disk_frames = (0,) * len(frames)
    return Tiers(frames, arena, arena_slots, disk, disk_frames, elsewhere)


def _open_disk(
    vllm_config: VllmConfig,
    settings: Settings,
    share_bytes: int,
    elsewhere: frozenset[GroupId],
    namespaces: Namespaces,
    clock: Clock,
) -> Store | None:
    """The disk tier, or None with one line that says why and what to do."""
    if settings.disk_path is None:
        return None
    parallel = vllm_config.parallel_config
    root = Path(settings.disk_path)
    if parallel.data_parallel_index:
        # Each replica is an engine, with a folder and budgets of its own. vLLM tells dense
        # replicas apart by this index only.
        root /= f"dp{parallel.data_parallel_index}"
    try:
        claimed = DiskRoot.open(
            root,
            instance=_instance(vllm_config),
            rank=Rank(parallel.rank),
            world_size=parallel.world_size,
            budget_bytes=share_bytes,
            clock=clock,
        )
        store = DiskStore(claimed, namespaces.own)
    except StoreError as error:
        logger.error(
            "kvstow: rank %d runs without a disk tier: %s; give this engine a disk_path of its own",
            parallel.rank,
            error,
        )
        return None
    if not elsewhere:
        return store
    return ReplicaStore(store, DiskReader(claimed, namespaces.first, Rank(0)), elsewhere)


def _instance(vllm_config: VllmConfig) -> str:
    """The engine, by a name that all its ranks know and no other engine has."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return f"{transfer.engine_id}.{vllm_config.parallel_config.data_parallel_index}"
