"""A small stand-in for an engine: one planner, ranks that answer as a test says."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstow.clock import ManualClock
from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import BlockId, GroupId, GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.limits import PlannerLimits
from kvstow.lifecycle.messages import (
    FailedItem,
    Fault,
    Held,
    Hello,
    ImageOffer,
    JobId,
    LoadReport,
    Report,
    RequestId,
    SaveReport,
    WorkOrder,
    WriteReport,
)
from kvstow.lifecycle.planner import Planner
from kvstow.metrics import Recorder

CHUNK = 8
BLOCK = 4
PAGED = ResumeRule(GroupKind.PAGED, BLOCK, CHUNK)
STATE = ResumeRule(GroupKind.STATE, BLOCK, CHUNK)


def window(tokens: int) -> ResumeRule:
    """The rule of a window group."""
    return ResumeRule(GroupKind.WINDOW, BLOCK, CHUNK, tokens)


def chunk_ids(prompt: str, count: int) -> list[ChunkId]:
    """Ids of a made-up prompt: ``prompt`` names it."""
    return [ChunkId(hashlib.sha256(f"{prompt}/{index}".encode()).digest()) for index in range(count)]


def refs(ids: Sequence[ChunkId], group: int = 0) -> list[ChunkRef]:
    return [
        ChunkRef(GroupId(group), index, chunk, ids[index - 1] if index else ROOT_CHUNK)
        for index, chunk in enumerate(ids)
    ]


def hello(
    rank: int = 0,
    world_size: int = 1,
    *,
    slots: int | Sequence[int] = 16,
    disk_frames: int = 0,
    rules: Sequence[ResumeRule] = (PAGED,),
    inventory: Sequence[Held] = (),
    namespace: bytes = b"n" * 32,
) -> Hello:
    return Hello(
        rank=Rank(rank),
        world_size=world_size,
        namespace=NamespaceDigest(namespace),
        chunk_tokens=CHUNK,
        rules=tuple(rules),
        arena_frame_bytes=(8192,) * len(rules),
        disk_frame_bytes=(8192,) * len(rules),
        arena_slots=(slots,) * len(rules) if isinstance(slots, int) else tuple(slots),
        disk_frames=(disk_frames,) * len(rules),
        inventory=tuple(inventory),
        version="test",
    )


def limits(**changes: object) -> PlannerLimits:
    values: dict[str, object] = {
        "chunk_tokens": CHUNK,
        "rules": (PAGED,),
        "loads": True,
        "saves": True,
        "min_load_tokens": 1,
        "load_timeout_s": 10.0,
        "pending_loads_max": 64,
        "pending_saves_max": 64,
        "pending_writes_max": 64,
        "disk_cooldown_s": 30.0,
    }
    return PlannerLimits(**{**values, **changes})  # type: ignore[arg-type]


class Bench:
    """A planner with everything it needs, and shorthands for what engines and workers do."""

    def __init__(self, *hellos: Hello, **changes: object) -> None:
        self.clock = ManualClock()
        self.recorder = Recorder()
        self.hellos = hellos or (hello(),)
        self.rules = self.hellos[0].rules
        self.planner = Planner(limits(**{"rules": self.rules, **changes}), self.clock, self.recorder)
        self.order = WorkOrder()  # the last that `save_prompt` carried out
        self.planner.open(self.hellos)
        self._numbers: Counter[int] = Counter()

    @property
    def directory(self):
        return self.planner.directory

    def counted(self, name: str) -> float:
        return self.recorder.snapshot()[name]

    @staticmethod
    def tables(tokens: int, groups: int = 1) -> list[list[BlockId]]:
        """Block tables for ``tokens``; block ids are 100, 101, ..."""
        return [[BlockId(100 + index) for index in range(-(-tokens // BLOCK))] for _ in range(groups)]

    def answer(self, order: WorkOrder, ranks: Sequence[int] | None = None) -> None:
        """Every rank does all of ``order`` well."""
        for rank in ranks if ranks is not None else range(len(self.hellos)):
            saves = order.saves + order.snapshots
            writes = [item.write for save in saves for item in save.items if item.write]
            writes += [write.job for write in order.writes]
            self.tell(
                rank,
                loads=tuple(LoadReport(load.job, refused=not load.items) for load in order.loads),
                saves=tuple(SaveReport(save.job) for save in saves),
                writes=tuple(WriteReport(job, stored=True) for job in writes),
            )

    def tell(self, rank: int = 0, **what: object) -> Report:
        """A rank's next report."""
        self._numbers[rank] += 1
        report = Report(Rank(rank), self._numbers[rank], **what)  # type: ignore[arg-type]
        self.planner.report(report)
        return report

    def save_all(self, prompt: str, chunks: int, request: str = "saver") -> list[ChunkId]:
        """Save ``chunks`` chunks in every group, with an image at the end of each."""
        ids = chunk_ids(prompt, chunks)
        name, tokens = RequestId(request), chunks * CHUNK
        tables = self.tables(tokens, len(self.rules))
        self.planner.progress(name, ids, tokens, lambda: tables)
        self.planner.snapshot(name, ids, tokens, lambda: tables, self.offers(range(1, chunks + 1)))
        self.order = self.planner.step()
        self.answer(self.order)
        self.planner.finished(name)
        return ids

    def offers(self, boundaries: Iterable[int]) -> list[ImageOffer]:
        """Images of every STATE group at ``boundaries`` (in chunks), in blocks 900, 901, ..."""
        return [
            ImageOffer(GroupId(group), boundary * CHUNK, BlockId(900 + boundary))
            for group, rule in enumerate(self.rules)
            if rule.kind is GroupKind.STATE
            for boundary in boundaries
        ]

    def fail_load(self, job: JobId, items: Sequence[int], fault: Fault, rank: int = 0) -> None:
        failed = tuple(FailedItem(item, fault) for item in items)
        self.tell(rank, loads=(LoadReport(job, failed),))

    def save_prompt(self, prompt: str, chunks: int, request: str = "saver") -> list[ChunkId]:
        """Save ``chunks`` chunks through a request of its own."""
        ids = chunk_ids(prompt, chunks)
        name = RequestId(request)
        self.planner.match(name, ids, chunks * CHUNK + 1, 0)
        self.planner.progress(name, ids, chunks * CHUNK, lambda: self.tables(chunks * CHUNK))
        self.planner.finished(name)
        self.order = self.planner.step()
        self.answer(self.order)
        return ids
