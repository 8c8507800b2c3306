"""Planner, worker, codec, arena and disk in one process, without an engine: saves until it is killed.

Each block's bytes follow from its chunk's id, so a test can tell a right frame from a wrong one
without knowing what was saved when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvstow.clock import SystemClock
from kvstow.codec.select import make_codec
from kvstow.keys.ids import ChunkId, NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, Group, GroupId, GroupKind, Layout, RegionId, Segment
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.executors import ThreadExecutor
from kvstow.lifecycle.limits import PlannerLimits
from kvstow.lifecycle.messages import Held, Hello, RequestId
from kvstow.lifecycle.planner import Planner
from kvstow.lifecycle.requests import Lookup
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.stores.framing import frame_bytes

BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNKS_EACH, SEGMENTS = 4, 2, 6, 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
RULE = ResumeRule(GroupKind.PAGED, BLOCK_TOKENS, CHUNK_TOKENS)
NUM_BLOCKS = 2 * CHUNKS_EACH * BLOCKS_PER_CHUNK
BLOCK_BYTES = 16384
FRAME_BYTES = 4096 + SEGMENTS * BLOCKS_PER_CHUNK * BLOCK_BYTES
DISK_FRAMES = 60
ARENA_SLOTS = 24
NAMESPACE = NamespaceDigest(b"s" * 32)
STEP_WAIT_S = 0.01


def chunk_ids(request: str) -> list[ChunkId]:
    """Ids of the chunks of the made-up prompt that ``request`` names."""
    return [ChunkId(hashlib.sha256(f"{request}/{index}".encode()).digest()) for index in range(CHUNKS_EACH)]


def block_bytes(chunk: bytes, segment: int, block: int) -> bytes:
    """What one block of a chunk holds in one segment."""
    seed = hashlib.sha256(chunk + bytes([segment, block])).digest()
    return seed * (BLOCK_BYTES // len(seed))


def payload_bytes(chunk: bytes) -> bytes:
    """What a chunk's frame holds: segment by segment, block by block (docs/design/003)."""
    return b"".join(
        block_bytes(chunk, segment, block) for segment in range(SEGMENTS) for block in range(BLOCKS_PER_CHUNK)
    )


class Stack:
    """One engine's worth of kvstow on one rank. Made by `opened`."""

    def __init__(self, root: Path, instance: str) -> None:
        segments = tuple(
            Segment(f"layer.{index}", RegionId(0), index * NUM_BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)
            for index in range(SEGMENTS)
        )
        group = Group(GroupId(0), GroupKind.PAGED, BLOCK_TOKENS, NUM_BLOCKS, "uint8", segments)
        layout = Layout((group,), CHUNK_TOKENS)
        clock, recorder = SystemClock(), Recorder()
        self.memory = np.zeros((SEGMENTS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        assert frame_bytes(layout.payload_bytes(GroupId(0))) == FRAME_BYTES
        claimed = DiskRoot.open(
            root,
            instance=instance,
            rank=Rank(0),
            world_size=1,
            budget_bytes=DISK_FRAMES * FRAME_BYTES,
            clock=clock,
        )
        disk = DiskStore(claimed, NAMESPACE)
        held = tuple(Held(item.ref, item.touched_s) for item in disk.scan())
        self._arena = Arena((ARENA_SLOTS,), (FRAME_BYTES,), 2)
        self.worker = Worker(
            Rank(0),
            NAMESPACE,
            layout,
            [make_codec(group, [self.memory.reshape(-1)], threads=1)],
            self._arena,
            disk,
            WorkerLimits(load_timeout_s=30.0, save_timeout_s=30.0, shutdown_s_max=10.0, load_parts=2),
            Executors(
                saver=ThreadExecutor("save", 1, 64),
                loader=ThreadExecutor("load", 2, 64),
                readers=ThreadExecutor("read", 2, 64),
                writer=ThreadExecutor("write", 1, 64),
            ),
            clock,
            recorder,
        )
        self.planner = Planner(_limits(), clock, recorder)
        self.planner.open([_hello(held)])

    def step(self) -> tuple[dict[RequestId, bool], set[RequestId]]:
        """One engine step: loads that ended, and requests whose held blocks are free."""
        order = self.planner.step()
        self.worker.fence(order.fences)
        self.worker.submit(order)
        self.worker.wait_for_news(STEP_WAIT_S)
        reports, loads, sent = self.worker.poll()
        for report in reports:
            self.planner.report(report)
        return dict(loads), set(sent)

    def save(self, request: str, first_block: int) -> None:
        """Compute a prompt into the blocks from ``first_block``, save it, wait until they are free."""
        chunks = chunk_ids(request)
        table = _table(first_block)
        for index, chunk in enumerate(chunks):
            for block in range(BLOCKS_PER_CHUNK):
                for segment in range(SEGMENTS):
                    content = np.frombuffer(block_bytes(chunk, segment, block), np.uint8)
                    self.memory[segment, table[index * BLOCKS_PER_CHUNK + block]] = content
        name, tokens = RequestId(request), CHUNKS_EACH * CHUNK_TOKENS
        self.planner.match(name, chunks, tokens + 1, 0)
        self.planner.progress(name, chunks, tokens, lambda: [table])
        if self.planner.finished(name):
            while name not in self.step()[1]:
                pass

    def load(self, request: str) -> int:
        """Load what is held of a prompt into garbage; chunks that came. Wrong bytes raise."""
        chunks, table = chunk_ids(request), _table(0)
        self.memory[:] = 0xEE
        name = RequestId(request)
        match = self.planner.match(name, chunks, CHUNKS_EACH * CHUNK_TOKENS + 1, 0)
        if match.lookup is not Lookup.HIT:
            self.planner.finished(name)
            return 0
        self.planner.allocated(name, [table], match.tokens)
        ended: dict[RequestId, bool] = {}
        while name not in ended:
            ended = self.step()[0]
        self.planner.finished(name)
        if not ended[name]:
            raise AssertionError(f"{request}: a load of {match.tokens} tokens failed")
        loaded = match.tokens // CHUNK_TOKENS
        for index, chunk in enumerate(chunks[:loaded]):
            got = self.memory[:, table[index * BLOCKS_PER_CHUNK : (index + 1) * BLOCKS_PER_CHUNK]].tobytes()
            if got != payload_bytes(chunk):
                raise AssertionError(f"{request}: chunk {index} came back wrong")
        return loaded

    def close(self) -> None:
        """End in peace."""
        self.worker.shutdown()
        self._arena.close()


@contextmanager
def opened(root: Path, instance: str) -> Iterator[Stack]:
    """A stack on ``root``, closed afterwards."""
    stack = Stack(root, instance)
    try:
        yield stack
    finally:
        stack.close()


def save_forever(root: Path, run: int) -> None:
    """Save one prompt after the other, each other blocks than the last, until killed."""
    stack = Stack(root, f"engine {run}")
    number = 0
    while True:
        stack.save(f"{run}/{number}", (number % 2) * CHUNKS_EACH * BLOCKS_PER_CHUNK)
        number += 1


def load_all(root: Path, requests: Sequence[str], connection: Connection) -> None:
    """Load what is held of each prompt, and say how many chunks came."""
    with opened(root, "reader") as stack:
        connection.send_bytes(b"%d" % sum(stack.load(request) for request in requests))


def _table(first_block: int) -> list[BlockId]:
    # Backwards: the order of a table is never the order of the memory.
    return [BlockId(first_block + index) for index in reversed(range(CHUNKS_EACH * BLOCKS_PER_CHUNK))]


def _limits() -> PlannerLimits:
    return PlannerLimits(
        chunk_tokens=CHUNK_TOKENS,
        rules=(RULE,),
        loads=True,
        saves=True,
        min_load_tokens=CHUNK_TOKENS,
        load_timeout_s=30.0,
        pending_loads_max=8,
        pending_saves_max=32,
        pending_writes_max=32,
        disk_cooldown_s=30.0,
    )


def _hello(held: tuple[Held, ...]) -> Hello:
    return Hello(
        rank=Rank(0),
        world_size=1,
        namespace=NAMESPACE,
        chunk_tokens=CHUNK_TOKENS,
        rules=(RULE,),
        arena_frame_bytes=(FRAME_BYTES,),
        disk_frame_bytes=(FRAME_BYTES,),
        arena_slots=(ARENA_SLOTS,),
        disk_frames=(DISK_FRAMES,),
        inventory=held,
        version="test",
    )
