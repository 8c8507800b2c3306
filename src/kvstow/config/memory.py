"""How much memory this process can get: the machine's, or less in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# By version: the controller's folder, limit, use, and the cache that the kernel drops when it needs room.
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(mount: Path = _MOUNT, own: Path = _OWN) -> int:
    """Memory that can be had now without swapping, and without being killed for it.

    Args:
        mount: where control groups are.
        own: says which this process is in.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_left(mount, own)]))


def _left(mount: Path, own: Path) -> Iterator[int]:
    """What each control group that this process is in, and each above it, has left."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit, used, cache = _V1 if controllers else _V2
        group = Path(path.lstrip("/"))
        # In a container the mount is the container's own group, whatever the path says.
        for above in (group, *group.parents):
            try:
                limit_text = (mount / folder / above / limit).read_text(encoding="utf-8").strip()
                used_bytes = int((mount / folder / above / used).read_text(encoding="utf-8"))
                stat = (mount / folder / above / "memory.stat").read_text(encoding="utf-8")
            except OSError:
                continue
            if limit_text != "max":
                yield int(limit_text) - used_bytes + _field(stat, cache)


def _field(stat: str, name: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{name} ")), 0)
