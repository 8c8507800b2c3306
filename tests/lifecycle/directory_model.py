"""A naive directory: a dictionary of frames, and every rule written out by looking at all of them.

It decides nothing. What is evicted it learns from what the real directory says afterwards, and
judges: was it allowed to go, and was there nothing older that might have gone instead?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from kvstow.keys.ids import ChunkId, ChunkRef
from kvstow.layout.geometry import GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.messages import NO_SLOT, Tier

Denied = Mapping[int, AbstractSet[ChunkId]]


@dataclass
class Frame:
    """One frame.

    Attributes:
        ref: which.
        arena: "", "filling", "ready", or "doomed": bad, and its slot free when the last pin goes.
        disk: "", "filling" or "ready".
        slot: where its arena copy is.
        promoting: whether the arena copy is filled from disk.
        pins: of readers, and one of the copy to disk.
        used: when each tier's copy was last used; larger is later.
        spent: of the leading group's: no image can be reached from it.
        stranded: it was found to stay only for what is on disk, and is to be written.
        refused: and was not.
    """

    ref: ChunkRef
    arena: str = ""
    disk: str = ""
    slot: int = NO_SLOT
    promoting: bool = False
    pins: int = 0
    used: dict[Tier, int] = field(default_factory=dict)
    spent: bool = False
    stranded: bool = False
    refused: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether there is a good copy, or one on its way."""
        return self.arena in ("filling", "ready") or bool(self.disk)

    def has(self, tier: Tier) -> bool:
        """Whether that tier has a READY copy."""
        return (self.arena if tier is Tier.ARENA else self.disk) == "ready"


class DirectoryModel:
    """What a directory with these limits must say.

    Attributes:
        frames: all that have a copy or a pin.
        busy: slots that lost readers may still write, with how many of them there are.
        stranded: frames that were found to be since somebody asked.
    """

    def __init__(self, rules: Sequence[ResumeRule], slots: Sequence[int], disk_frames: Sequence[int]) -> None:
        self.rules = rules
        self.slots = slots
        self.disk_frames = disk_frames
        self.disk_usable = True
        self.frames: dict[tuple[int, ChunkId], Frame] = {}
        self.busy: dict[tuple[int, int], int] = {}
        self.stranded: list[ChunkRef] = []
        self._now = 0
        self._first = 0
        paged = [group for group, rule in enumerate(rules) if rule.kind is GroupKind.PAGED]
        self._states = [group for group, rule in enumerate(rules) if rule.kind is GroupKind.STATE]
        # The group whose frames say what leads to an image.
        self._lead = paged[0] if paged and self._states else None

    def find(self, ref: ChunkRef) -> Frame | None:
        return self.frames.get((ref.group, ref.chunk))

    def of_group(self, group: int) -> list[Frame]:
        return [frame for frame in self.frames.values() if frame.ref.group == group]

    # ---- events ----------------------------------------------------------------------------

    def added(self, ref: ChunkRef) -> Frame:
        """The frame of ``ref``, made if it is not there."""
        return self.frames.setdefault((ref.group, ref.chunk), Frame(ref))

    def used(self, frame: Frame, *tiers: Tier) -> None:
        """Copies in ``tiers`` are the most recent of their tier."""
        self._now += 1
        frame.used.update(dict.fromkeys(tiers, self._now))

    def searched(self, group: int, tier: Tier, victim: Frame | None) -> None:
        """What is older than ``victim``, or all, may not go: it is in use, and counts as used."""
        of_tier = [frame for frame in self.of_group(group) if frame.has(tier)]
        older = [frame for frame in of_tier if victim is None or frame.used[tier] < victim.used[tier]]
        for frame in sorted(older, key=lambda frame: frame.used[tier]):
            self.used(frame, tier)
            if tier is Tier.ARENA and not frame.stranded and self.is_stranded(frame):
                frame.stranded = True
                self.stranded.append(frame.ref)

    def demoted(self, frame: Frame) -> None:
        """All copies of ``frame`` are the least recent of their tier."""
        self._first -= 1
        frame.used.update(dict.fromkeys([tier for tier in Tier if frame.has(tier)], self._first))

    def ready(self, frame: Frame, tier: Tier) -> None:
        """A copy was made; one of a chunk that leads to no image goes first."""
        self.used(frame, tier)
        if self.is_spent(frame.ref.chunk):
            self._first -= 1
            frame.used[tier] = self._first

    def touched(self, chunks: Sequence[ChunkId], boundary: int) -> None:
        for group, rule in enumerate(self.rules):
            for index in sorted(needed(rule, boundary), reverse=True):
                frame = self.frames.get((group, chunks[index]))
                if frame is not None and not self.is_spent(chunks[index]):
                    self.used(frame, *[tier for tier in Tier if frame.has(tier)])

    def retired(self, chunks: Sequence[ChunkId]) -> None:
        """A request with these chunks has ended."""
        here = [chunk for chunk in chunks if (self._lead, chunk) in self.frames]
        if here:
            self.ended(here[-1])

    def ended(self, chunk: ChunkId) -> None:
        """Nobody goes on from ``chunk``."""
        tail: list[Frame] = []
        frame = self.frames.get((self._lead, chunk)) if self._lead is not None else None
        while frame is not None and not self._leads_on(frame):
            if not frame.spent:
                frame.spent = True
                tail.insert(0, frame)
            frame = self.frames.get((frame.ref.group, frame.ref.parent))
        for spent in tail:
            for other in self.frames.values():
                if other.ref.chunk == spent.ref.chunk:
                    self.demoted(other)

    def goes_on(self, ref: ChunkRef) -> None:
        """Somebody asks for room for ``ref``."""
        if self._lead is None:
            return
        frame = self.frames.get((self._lead, ref.chunk)) or self.frames.get((self._lead, ref.parent))
        while frame is not None and frame.spent:
            frame.spent = False
            for other in self.frames.values():
                if other.ref.chunk == frame.ref.chunk:
                    self.used(other, *[tier for tier in Tier if other.has(tier)])
            frame = self.frames.get((frame.ref.group, frame.ref.parent))

    def found_tails(self) -> None:
        """What leads to no image among the frames that were found, the most recent first."""
        lead = [frame for frame in self.frames.values() if frame.ref.group == self._lead]
        parents = {frame.ref.parent for frame in lead}
        for frame in reversed(lead):
            if frame.ref.chunk not in parents:
                self.ended(frame.ref.chunk)

    def latest(self, ref: ChunkRef, touched_s: dict[ChunkRef, float]) -> float:
        """When ``ref`` was used, by its own time and by those that build on it."""
        if self.rules[ref.group].kind is not GroupKind.PAGED:
            return touched_s[ref]
        followers = [other for other in touched_s if other.group == ref.group and other.parent == ref.chunk]
        return max([touched_s[ref], *(self.latest(other, touched_s) for other in followers)])

    def is_spent(self, chunk: ChunkId) -> bool:
        frame = self.frames.get((self._lead, chunk)) if self._lead is not None else None
        return frame is not None and frame.spent

    def _leads_on(self, frame: Frame) -> bool:
        has_image = any(
            image.ref.chunk == frame.ref.chunk and image.ref.group in self._states and image.is_kept
            for image in self.frames.values()
        )
        followers = [one for one in self.of_group(frame.ref.group) if one.ref.parent == frame.ref.chunk]
        return has_image or not all(follower.spent for follower in followers)

    def arena_left(self, frame: Frame, busy: int = 0) -> None:
        """The arena copy is gone; its slot waits for ``busy`` readers."""
        if busy:
            self.busy[frame.ref.group, frame.slot] = busy
        frame.arena, frame.slot, frame.promoting = "", NO_SLOT, False
        self.settle(frame)

    def disk_left(self, frame: Frame) -> None:
        frame.disk = ""
        self.settle(frame)

    def settle(self, frame: Frame) -> None:
        """What follows when a copy or a pin of ``frame`` went."""
        if frame.arena == "doomed" and not frame.pins:
            frame.arena, frame.slot, frame.promoting = "", NO_SLOT, False
        if not (frame.arena or frame.disk or frame.pins):
            self.frames.pop((frame.ref.group, frame.ref.chunk), None)

    # ---- questions -------------------------------------------------------------------------

    def taken_slots(self, group: int) -> list[int]:
        held = [frame.slot for frame in self.of_group(group) if frame.slot != NO_SLOT]
        return held + [slot for place, slot in self.busy if place == group]

    def taken_places(self, group: int) -> int:
        return sum(bool(frame.disk) for frame in self.of_group(group))

    def victims(self, group: int, tier: Tier) -> list[Frame]:
        """Frames whose copy in ``tier`` may be evicted, least recently used first."""
        other = Tier.DISK if tier is Tier.ARENA else Tier.ARENA
        allowed = [
            frame
            for frame in self.of_group(group)
            if frame.has(tier)
            and not frame.pins
            and (
                frame.has(other)
                or not self.is_built_on(frame)
                or (tier is Tier.ARENA and frame.refused and self.is_stranded(frame))
            )
        ]
        return sorted(allowed, key=lambda frame: frame.used[tier])

    def is_built_on(self, frame: Frame) -> bool:
        """Whether another chunk that is here is of no use without this one."""
        if self.rules[frame.ref.group].kind is not GroupKind.PAGED:
            return False
        return any(other.ref.parent == frame.ref.chunk for other in self.of_group(frame.ref.group))

    def is_stranded(self, frame: Frame) -> bool:
        """Whether it is in the arena only, and of those that build on it none is there."""
        followers = [one for one in self.of_group(frame.ref.group) if one.ref.parent == frame.ref.chunk]
        return (
            not frame.pins
            and not frame.disk
            and self.is_built_on(frame)
            and all(follower.slot == NO_SLOT for follower in followers)
        )

    def companions(self, chunk: ChunkId, kinds: tuple[GroupKind, ...]) -> list[Frame]:
        """Frames of groups of these kinds that ``chunk`` names and that nobody reads or makes."""
        return [
            frame
            for frame in self.frames.values()
            if frame.ref.chunk == chunk
            and self.rules[frame.ref.group].kind in kinds
            and not frame.pins
            and "filling" not in (frame.arena, frame.disk)
        ]

    def held_until(
        self, chunks: Sequence[ChunkId], start: int, stop: int, denied: Denied
    ) -> tuple[int, bool]:
        """The answer to a lookup: every boundary is tried."""
        held = self._largest(chunks, start, stop, denied, promoted=False)
        return held, self._largest(chunks, start, stop, denied, promoted=True) > held

    def _largest(
        self, chunks: Sequence[ChunkId], start: int, stop: int, denied: Denied, *, promoted: bool
    ) -> int:
        for boundary in range(stop, start, -1):
            if all(
                self._is_loadable(group, chunks[index], denied, promoted=promoted)
                for group, rule in enumerate(self.rules)
                for index in needed(rule, boundary)
                if index >= start
            ):
                return boundary
        return start

    def _is_loadable(self, group: int, chunk: ChunkId, denied: Denied, *, promoted: bool) -> bool:
        frame = self.frames.get((group, chunk))
        if frame is None or chunk in denied.get(group, ()):
            return False
        if frame.promoting:
            return promoted
        return frame.arena == "ready" or (frame.disk == "ready" and self.disk_usable)


def needed(rule: ResumeRule, boundary: int) -> set[int]:
    """Indexes of the chunks that a resume at ``boundary`` needs: section 3 of the design, token by token."""
    if boundary == 0:
        return set()
    end = boundary * rule.chunk_tokens
    if rule.kind is GroupKind.STATE:
        return {boundary - 1}
    first = 0 if rule.kind is GroupKind.PAGED else max(0, end - rule.window_tokens)
    return {token // rule.chunk_tokens for token in range(first, end)}
