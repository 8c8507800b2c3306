"""One rank: the real worker, codec, arena and disk store over simulated memory, threads and time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvstow.clock import ManualClock
from kvstow.codec.select import make_codec
from kvstow.errors import StoreError
from kvstow.keys.chain import frame_key
from kvstow.keys.ids import ChunkRef, NamespaceDigest, Rank
from kvstow.keys.namespace import rank_namespace
from kvstow.layout.fingerprint import layout_digest
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.lifecycle.messages import Held, Hello
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.base import FrameName, Store
from kvstow.stores.disk.reader import DiskReader
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import frame_bytes
from kvstow.stores.replica import ReplicaStore
from kvstow.stores.shared_slots import SharedSlots
from kvstow.testing.faulty_store import FaultSource, FaultyStore
from kvstow.testing.sim.engine import Promise, Step, StepAnswer, Work
from kvstow.testing.sim.fibers import FiberExecutor, Fibers
from kvstow.testing.sim.memory import RankMemory
from kvstow.testing.sim.model import SimModel
from kvstow.testing.sim.oracle import next_token

VOCABULARY = 7


class RankLimits(msgspec.Struct, frozen=True):
    """What one rank has.

    Attributes:
        arena_slots: by group.
        disk_frames: by group, 0 for no disk.
        readers: threads that read from disk.
        load_threads: threads that load from the arena.
        queue_max: tasks that wait in front of each kind of thread.
        load_timeout_s, save_timeout_s: the worker's bounds.
        slow_s: how long an operation of the disk takes that a fault makes slow.
    """

    arena_slots: tuple[int, ...]
    disk_frames: tuple[int, ...]
    readers: int
    load_threads: int
    queue_max: int
    load_timeout_s: float
    save_timeout_s: float
    slow_s: float = 1.0


class SimRank:
    """One rank of one engine's life.

    Args:
        model: groups and chunk.
        rank: this rank.
        world_size: ranks of the engine.
        num_blocks: pages of its memory.
        limits: what it has.
        namespace: what all ranks agree on.
        root: folder of the disk, shared by the ranks.
        instance: the engine's id.
        faults: what the disk does wrong.
        clock: simulated time.
        noise: seed of the memory's first content.
        first: the first rank, if this one is another and shares its slots of replicated groups.
        shares: whether such slots are shared, where this is the first rank.

    Attributes:
        shared: the slots that it shares with others, if any.
    """

    def __init__(
        self,
        model: SimModel,
        rank: int,
        world_size: int,
        num_blocks: int,
        limits: RankLimits,
        namespace: NamespaceDigest,
        root: Path,
        instance: str,
        faults: FaultSource,
        clock: ManualClock,
        noise: int,
        first: SimRank | None,
        *,
        shares: bool,
    ) -> None:
        self.rank = rank
        self.memory = RankMemory(model, rank, num_blocks, noise)
        self.layout = model.layout(num_blocks)
        self.recorder = Recorder()
        self.inbox: deque[Step] = deque()
        self.is_stuck = False  # its threads do nothing; the engine's own thread goes on
        self._model = model
        self._limits = limits
        fibers = Fibers(clock)
        self._frames = tuple(
            frame_bytes(self.layout.payload_bytes(GroupId(group))) for group in range(len(model.groups))
        )
        self.shared = self._share(first, shares=shares)
        elsewhere = self.shared.slots if self.shared is not None else {}
        slots = tuple(elsewhere.get(GroupId(group), own) for group, own in enumerate(limits.arena_slots))
        self.arena = Arena(slots, self._frames, limits.readers, self.shared)
        digest = layout_digest(self.layout)
        self.namespace = rank_namespace(namespace, Rank(rank), digest)
        self._first_namespace = rank_namespace(namespace, Rank(0), digest)
        self.disk, store = self._open_disk(root, world_size, instance, clock, faults, fibers)
        self.executors = [
            FiberExecutor("saver", fibers, clock, threads=1, queue_max=limits.queue_max),
            FiberExecutor("loader", fibers, clock, threads=limits.load_threads, queue_max=limits.queue_max),
            FiberExecutor("readers", fibers, clock, threads=limits.readers, queue_max=limits.queue_max),
            FiberExecutor("writer", fibers, clock, threads=1, queue_max=limits.queue_max),
        ]
        self.hello = Hello(
            rank=Rank(rank),
            world_size=world_size,
            namespace=namespace,
            chunk_tokens=model.chunk_tokens,
            rules=self.layout.rules,
            arena_frame_bytes=self._frames,
            disk_frame_bytes=self._frames,
            arena_slots=slots,
            disk_frames=limits.disk_frames if self.disk is not None else (0,) * len(self._frames),
            inventory=()
            if store is None
            else tuple(Held(found.ref, found.touched_s) for found in store.inner.scan()),
            version="simulated",
        )
        self.worker = Worker(
            Rank(rank),
            self.namespace,
            self.layout,
            [make_codec(group, [self.memory.region]) for group in self.layout.groups],
            self.arena,
            store,
            WorkerLimits(
                load_timeout_s=limits.load_timeout_s,
                save_timeout_s=limits.save_timeout_s,
                shutdown_s_max=limits.save_timeout_s,
                load_parts=limits.load_threads,
            ),
            Executors(*self.executors),
            clock,
            self.recorder,
            self._first_namespace,
        )

    @property
    def disk_budget_bytes(self) -> int:
        """What this rank may occupy on disk."""
        return sum(frames * size for frames, size in zip(self._limits.disk_frames, self._frames, strict=True))

    def stored_frames(self) -> Iterator[tuple[ChunkRef, bytearray]]:
        """Every frame on this rank's disk as it is there, past all faults."""
        if self.disk is None:
            return
        for found in list(self.disk.scan()):
            frame = bytearray(found.size_bytes)
            name = FrameName(frame_key(self.namespace, found.ref.group, found.ref.chunk), found.ref)
            if self.disk.get_into(name, memoryview(frame)):
                yield found.ref, frame

    def do_step(self) -> StepAnswer:
        """The oldest step that was sent: fence, forward, orders, answers; as an adapter's worker half."""
        step = self.inbox.popleft()
        self.worker.fence(step.order.fences)
        self.memory.forget(step.fresh)
        said = {}
        for work in step.work:
            said[work.request.serial] = self._forward(work)
        self.worker.submit(step.order)
        self.worker.copy_snapshots(step.order)
        reports, loads, sent = self.worker.poll()
        return StepAnswer(self.rank, reports, tuple(loads), tuple(sent), said)

    def believe(self, promise: Promise) -> None:
        """The engine thinks that all of a promise is in its blocks."""
        for index, group in enumerate(self._model.groups):
            first = promise.floor
            if group.kind is GroupKind.WINDOW:
                first = max(
                    first, (promise.boundary - group.window_tokens) // group.block_tokens * group.block_tokens
                )
            self.memory.believe(
                GroupId(index), promise.tables[index], promise.request.reading, first, promise.boundary
            )

    @property
    def wake_s(self) -> float:
        """When the first of its threads that waits may go on."""
        return min(executor.wake_s for executor in self.executors)

    def run_threads(self) -> int:
        """Let every thread do all that it can now; how many tasks moved."""
        moved = 0
        for executor in self.executors:
            while executor.can_run:
                executor.run_one()
                moved += 1
        return moved

    def shutdown(self) -> None:
        """End in order, as when the engine is asked to stop."""
        self.worker.shutdown()
        self.arena.close()

    def kill(self) -> None:
        """End as by SIGKILL: only what the kernel does is done."""
        for executor in self.executors:
            executor.kill()
        if self.disk is not None:
            self.disk.close()
        self.arena.close()

    def _share(self, first: SimRank | None, *, shares: bool) -> SharedSlots | None:
        if first is not None and first.shared is not None:
            theirs = first.shared
            return SharedSlots.attach(os.dup(theirs.descriptor), theirs.slots, theirs.frame_bytes)
        if first is not None or not shares or not self.layout.replicated:
            return None
        groups = sorted(self.layout.replicated)
        return SharedSlots.make(
            {group: self._limits.arena_slots[group] for group in groups},
            {group: self._frames[group] for group in groups},
        )

    def _forward(self, work: Work) -> int:
        folded = []
        for index in range(len(self._model.groups)):
            group = GroupId(index)
            if not self.memory.knows(group, work.tables[index], work.first):
                raise AssertionError(
                    f"rank {self.rank} group {group}: {work.request} goes on from token {work.first} without "
                    "what that needs"
                )
            self.memory.forward(group, work.tables[index], work.request.reading, work.first, work.stop)
            folded.append(self.memory.fold(group, work.tables[index], work.request.reading, work.stop))
        return next_token(folded, VOCABULARY)

    def _open_disk(
        self,
        root: Path,
        world_size: int,
        instance: str,
        clock: ManualClock,
        faults: FaultSource,
        fibers: Fibers,
    ) -> tuple[DiskStore | None, FaultyStore | None]:
        if not any(self._limits.disk_frames):
            return None, None
        try:
            claimed = DiskRoot.open(
                root,
                instance=instance,
                rank=Rank(self.rank),
                world_size=world_size,
                budget_bytes=self.disk_budget_bytes,
                clock=clock,
            )
        except StoreError:
            return None, None
        disk = DiskStore(claimed, self.namespace)
        store: Store = disk
        if self.layout.replicated and self.rank:
            first = DiskReader(claimed, self._first_namespace, Rank(0))
            store = ReplicaStore(disk, first, self.layout.replicated)
        return disk, FaultyStore(store, faults, fibers.pause, slow_s=self._limits.slow_s)
