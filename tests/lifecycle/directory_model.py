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
    """

    ref: ChunkRef
    arena: str = ""
    disk: str = ""
    slot: int = NO_SLOT
    promoting: bool = False
    pins: int = 0
    used: dict[Tier, int] = field(default_factory=dict)

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
    """

    def __init__(self, rules: Sequence[ResumeRule], slots: Sequence[int], disk_frames: Sequence[int]) -> None:
        self.rules = rules
        self.slots = slots
        self.disk_frames = disk_frames
        self.disk_usable = True
        self.frames: dict[tuple[int, ChunkId], Frame] = {}
        self.busy: dict[tuple[int, int], int] = {}
        self._now = 0

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

    def touched(self, chunks: Sequence[ChunkId], boundary: int) -> None:
        for group, rule in enumerate(self.rules):
            for index in sorted(needed(rule, boundary), reverse=True):
                frame = self.frames.get((group, chunks[index]))
                if frame is not None:
                    self.used(frame, *[tier for tier in Tier if frame.has(tier)])

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
            if frame.has(tier) and not frame.pins and (frame.has(other) or not self.is_built_on(frame))
        ]
        return sorted(allowed, key=lambda frame: frame.used[tier])

    def is_built_on(self, frame: Frame) -> bool:
        """Whether another chunk that is here is of no use without this one."""
        if self.rules[frame.ref.group].kind is not GroupKind.PAGED:
            return False
        return any(other.ref.parent == frame.ref.chunk for other in self.of_group(frame.ref.group))

    def companions(self, chunk: ChunkId) -> list[Frame]:
        """Frames of windows and states that ``chunk`` names and that nobody reads or makes."""
        return [
            frame
            for frame in self.frames.values()
            if frame.ref.chunk == chunk
            and self.rules[frame.ref.group].kind is not GroupKind.PAGED
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
