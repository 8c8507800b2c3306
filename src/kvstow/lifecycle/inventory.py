"""What the ranks found on their disks at start, made one: complete, rooted, within budget."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.messages import Held, Hello


class Adoption(msgspec.Struct, frozen=True):
    """What the directory takes over for one group, and what the ranks are to delete.

    Attributes:
        keep: least recent first; every chunk is later than all that follow it.
        remove: held by some ranks only, without their parent, or over the budget.
    """

    keep: tuple[ChunkRef, ...]
    remove: tuple[ChunkRef, ...]


def adopt(hellos: Sequence[Hello], group: GroupId, frames_max: int) -> Adoption:
    """Merge the inventories of all ranks for ``group``.

    Args:
        hellos: one from each rank.
        group: the group to merge.
        frames_max: frames that the poorest rank's budget holds.
    """
    found: dict[ChunkId, ChunkRef] = {}
    holders: dict[ChunkId, int] = {}
    touched: dict[ChunkId, float] = {}
    for hello in hellos:
        for held in _of_group(hello, group):
            chunk = held.ref.chunk
            found[chunk] = held.ref
            holders[chunk] = holders.get(chunk, 0) + 1
            touched[chunk] = max(touched.get(chunk, 0.0), held.touched_s)

    rooted: set[ChunkId] = {ROOT_CHUNK}
    kept: list[ChunkRef] = []
    removed: list[ChunkRef] = []
    for ref in sorted(found.values(), key=lambda ref: ref.index):
        if holders[ref.chunk] == len(hellos) and ref.parent in rooted:
            rooted.add(ref.chunk)
            kept.append(ref)
        else:
            removed.append(ref)

    # A chunk was in use whenever one that follows it was.
    for ref in reversed(kept):
        if ref.parent in touched:
            touched[ref.parent] = max(touched[ref.parent], touched[ref.chunk])
    kept.sort(key=lambda ref: (touched[ref.chunk], -ref.index))

    over = max(0, len(kept) - frames_max)
    return Adoption(keep=tuple(kept[over:]), remove=tuple(removed + kept[:over]))


def _of_group(hello: Hello, group: GroupId) -> list[Held]:
    return [held for held in hello.inventory if held.ref.group == group]
