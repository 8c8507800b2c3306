"""What lies in a disk root, read by the design note and not by kvstow's own code (docs/design/002)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

_FRAME = re.compile(r"([0-9a-f]{32})/r(\d+)/g(\d+)/([0-9a-f]{2})/(\d+)-([0-9a-f]{64})-([0-9a-f]{64})")
_LOCK = re.compile(r"lock(\.r\d+)?")
_HEADER = struct.Struct("<8sHHIQQ32s32sQ")
_HEADER_BYTES = 4096
_ROOT = "00" * 32


@dataclass(frozen=True)
class FrameFile:
    """One frame's file, by its name."""

    path: Path
    namespace: str
    rank: int
    index: int
    chunk: str
    parent: str

    def payload(self) -> bytes | None:
        """Its payload if every byte of the file is as it was written, else None."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) < _HEADER_BYTES:
            return None
        fields = _HEADER.unpack(content[: _HEADER.size])
        magic, version, kind, rank, payload_bytes, checksum, _, namespace, header_checksum = fields
        payload = content[_HEADER_BYTES : _HEADER_BYTES + payload_bytes]
        rest = content[_HEADER.size : _HEADER_BYTES] + content[_HEADER_BYTES + payload_bytes :]
        is_whole = (
            (magic, version, kind, rank) == (b"KVSTOW\r\n", 1, 1, self.rank)
            and namespace.hex().startswith(self.namespace)
            and len(payload) == payload_bytes
            and xxhash.xxh3_64_intdigest(payload) == checksum
            and xxhash.xxh3_64_intdigest(content[: _HEADER.size - 8]) == header_checksum
            and not any(rest)
        )
        return payload if is_whole else None


def frames_in(root: Path, rank: int = 0) -> list[FrameFile]:
    """The frames of ``rank`` that a reader can see, first chunks first."""
    found = []
    for path in _files(root):
        match = _FRAME.fullmatch(str(path.relative_to(root)))
        if match is not None and int(match[2]) == rank:
            found.append(FrameFile(path, match[1], rank, int(match[5]), match[6], match[7]))
    return sorted(found, key=lambda frame: (frame.index, frame.chunk))


def strangers_in(root: Path) -> list[Path]:
    """Files that are neither frames nor locks: drafts and other left-overs."""
    names = [path.relative_to(root) for path in _files(root)]
    return [name for name in names if not _FRAME.fullmatch(str(name)) and not _LOCK.fullmatch(str(name))]


def rooted(frames: Iterable[FrameFile]) -> list[FrameFile]:
    """Those of ``frames``, given first chunks first, all of whose parents are there too."""
    reached = {_ROOT}
    kept = []
    for frame in frames:
        if frame.parent in reached:
            reached.add(frame.chunk)
            kept.append(frame)
    return kept


def occupied_bytes(root: Path) -> int:
    """What the file system gives to everything under ``root`` that is not a folder."""
    occupied = 0
    for path in _files(root):
        # A running engine evicts meanwhile.
        with suppress(FileNotFoundError):
            occupied += path.stat().st_blocks * 512
    return occupied


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and time of change of everything below ``folder``, by path."""
    taken = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        taken[str(path.relative_to(folder))] = (content, status.st_mode, status.st_mtime_ns)
    return taken


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir()]
