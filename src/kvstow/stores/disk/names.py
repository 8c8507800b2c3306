"""Where a frame lies under a root, so that its reference can be read from the path alone.

::

    <root>/<namespace, 32 hex>/r<rank>/g<group>/<2 hex>/<index>-<chunk, 64 hex>-<parent, 64 hex>

The two digits are the first two of the chunk: 256 folders per group keep each one small. What
does not look like this is foreign: it is never read nor deleted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from os import DirEntry
from typing import NamedTuple

from kvstow.keys.ids import ChunkId, ChunkRef, NamespaceDigest, Rank
from kvstow.layout.geometry import GroupId

DRAFT_PREFIX = ".draft-"
"""How the names of files begin that are being written and not visible yet."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"r(0|[1-9][0-9]*)")
_GROUP = re.compile(r"g(0|[1-9][0-9]*)")
_FAN = re.compile(r"[0-9a-f]{2}")
_FAN_IN_SHARE = re.compile(rf"/{_GROUP.pattern}/{_FAN.pattern}")
_FRAME = re.compile(r"(0|[1-9][0-9]*)-([0-9a-f]{64})-([0-9a-f]{64})")


class Contents(NamedTuple):
    """What lies in one folder.

    Attributes:
        folders: paths.
        files: frames and foreign files, with their status.
        drafts: paths of files that are being written, or were when their writer was killed.
    """

    folders: list[str]
    files: list[tuple[DirEntry[str], os.stat_result]]
    drafts: list[str]

    @property
    def size_bytes(self) -> int:
        """Of the files, without the drafts."""
        return sum(status.st_size for _, status in self.files)


def share_path(root: str, namespace: NamespaceDigest, rank: Rank) -> str:
    """The folder of one rank's frames of one namespace."""
    return f"{root}/{namespace.hex()[:32]}/r{rank}"


def frame_path(share: str, ref: ChunkRef) -> str:
    """The file of one frame, below a folder that `share_path` gave."""
    chunk = ref.chunk.hex()
    return f"{share}/g{ref.group}/{chunk[:2]}/{ref.index}-{chunk}-{ref.parent.hex()}"


def shares_under(root: str) -> Iterator[tuple[str, Rank]]:
    """Every folder under ``root`` that looks like some rank's share of some namespace."""
    for namespace in _folders(root, _NAMESPACE):
        for entry in _folders(namespace.path, _RANK):
            yield entry.path, Rank(int(entry.name[1:]))


def fans_under(share: str) -> Iterator[tuple[str, GroupId]]:
    """Every folder of a share that holds frames, with the group they belong to."""
    for entry in _folders(share, _GROUP):
        for fan in _folders(entry.path, _FAN):
            yield fan.path, GroupId(int(entry.name[1:]))


def group_in(folder: str, share: str) -> GroupId | None:
    """The group whose frames lie in ``folder`` of a share, or None if it has none."""
    match = _FAN_IN_SHARE.fullmatch(folder.removeprefix(share))
    return None if match is None else GroupId(int(match[1]))


def ref_of(name: str, group: GroupId) -> ChunkRef | None:
    """The reference that a file's name spells, or None for a foreign name."""
    match = _FRAME.fullmatch(name)
    if match is None:
        return None
    index, chunk, parent = match.groups()
    return ChunkRef(group, int(index), ChunkId(bytes.fromhex(chunk)), ChunkId(bytes.fromhex(parent)))


def entries_of(folder: str) -> Iterator[DirEntry[str]]:
    """A folder's entries; none when somebody removed it meanwhile."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return


def contents_of(folder: str) -> Contents:
    """List ``folder``; nothing is there when somebody removed it meanwhile."""
    contents = Contents([], [], [])
    for entry in entries_of(folder):
        if entry.is_dir(follow_symlinks=False):
            contents.folders.append(entry.path)
        elif entry.name.startswith(DRAFT_PREFIX):
            contents.drafts.append(entry.path)
        else:
            try:
                contents.files.append((entry, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue
    return contents


def _folders(parent: str, pattern: re.Pattern[str]) -> Iterator[DirEntry[str]]:
    for entry in entries_of(parent):
        if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry
