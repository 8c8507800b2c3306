"""What the ranks found on their disks at start, made one: complete, of use, within budget."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.lifecycle.messages import Hello


class Adoption(msgspec.Struct, frozen=True):
    """What the directory takes over for one group, and what the ranks are to delete.

    Attributes:
        keep: least recent first; every chunk of a PAGED group is later than all that follow it.
        remove: held by some ranks only, of no use without what is not kept, or over the budget.
    """

    keep: tuple[ChunkRef, ...]
    remove: tuple[ChunkRef, ...]


class _Found:
    """What the ranks hold of one group."""

    def __init__(self, hellos: Sequence[Hello], group: GroupId) -> None:
        self.ranks = len(hellos)
        self.frames_max = min(hello.disk_frames[group] for hello in hellos)
        self.refs: dict[ChunkId, ChunkRef] = {}
        self.holders: dict[ChunkId, int] = {}
        self.touched_s: dict[ChunkId, float] = {}
        for hello in hellos:
            for held in hello.inventory:
                if held.ref.group == group:
                    chunk = held.ref.chunk
                    self.refs[chunk] = held.ref
                    self.holders[chunk] = self.holders.get(chunk, 0) + 1
                    self.touched_s[chunk] = max(self.touched_s.get(chunk, 0.0), held.touched_s)

    def by_depth(self) -> list[ChunkRef]:
        """All of it, first chunks first."""
        return sorted(self.refs.values(), key=lambda ref: ref.index)

    def is_complete(self, ref: ChunkRef) -> bool:
        """Whether every rank has it."""
        return self.holders[ref.chunk] == self.ranks

    def adoption(self, kept: list[ChunkRef], removed: list[ChunkRef]) -> Adoption:
        """``kept`` in order of use, and what of it is over the budget removed."""
        kept.sort(key=lambda ref: (self.touched_s[ref.chunk], -ref.index))
        over = max(0, len(kept) - self.frames_max)
        return Adoption(keep=tuple(kept[over:]), remove=tuple(removed + kept[:over]))


def adopt(hellos: Sequence[Hello]) -> list[Adoption]:
    """Merge the inventories of all ranks.

    Args:
        hellos: one from each rank.

    Returns:
        What becomes of each group's frames, by group.
    """
    rules = hellos[0].rules
    found = [_Found(hellos, GroupId(group)) for group in range(len(rules))]
    is_paged = [rule.kind is GroupKind.PAGED for rule in rules]
    adoptions = {group: _adopt_chunks(found[group]) for group in range(len(rules)) if is_paged[group]}
    chunks = [{ref.chunk for ref in adoption.keep} for adoption in adoptions.values()]
    for group in range(len(rules)):
        if not is_paged[group]:
            adoptions[group] = _adopt_ends(found[group], chunks)
    return [adoptions[group] for group in range(len(rules))]


def _adopt_chunks(found: _Found) -> Adoption:
    """PAGED: what has all before it."""
    rooted: set[ChunkId] = {ROOT_CHUNK}
    kept: list[ChunkRef] = []
    removed: list[ChunkRef] = []
    for ref in found.by_depth():
        if found.is_complete(ref) and ref.parent in rooted:
            rooted.add(ref.chunk)
            kept.append(ref)
        else:
            removed.append(ref)
    # A chunk was in use whenever one that follows it was.
    touched_s = found.touched_s
    for ref in reversed(kept):
        if ref.parent in touched_s:
            touched_s[ref.parent] = max(touched_s[ref.parent], touched_s[ref.chunk])
    return found.adoption(kept, removed)


def _adopt_ends(found: _Found, chunks: Sequence[AbstractSet[ChunkId]]) -> Adoption:
    """WINDOW and STATE: what belongs to a chunk that every PAGED group keeps."""
    kept: list[ChunkRef] = []
    removed: list[ChunkRef] = []
    for ref in found.by_depth():
        of_use = found.is_complete(ref) and all(ref.chunk in kept_chunks for kept_chunks in chunks)
        (kept if of_use else removed).append(ref)
    return found.adoption(kept, removed)
