"""Where the command keeps things: the cache folder, and a disk tier's folder for each model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

_NAME_CHARS_MAX = 80


def user_cache(environ: Mapping[str, str]) -> Path:
    """kvstow's folder under the XDG cache folder.

    A relative ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification asks.
    """
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return base / "kvstow"


def project_cache(environ: Mapping[str, str], package: Path) -> Path:
    """``.cache`` of the checkout that ``package`` lies in as ``src/kvstow``, else `user_cache`.

    Args:
        environ: the process's environment.
        package: folder of the imported ``kvstow`` package.
    """
    checkout = package.parent.parent
    if package.parent.name == "src" and (checkout / "pyproject.toml").is_file():
        return checkout / ".cache"
    return user_cache(environ)


def disk_folder(cache: Path, model: str) -> Path:
    """The default folder of the disk tier for ``model``, one for each model name.

    Args:
        cache: what `user_cache` said.
        model: a name or a folder, as vLLM takes it.

    Returns:
        A folder with a readable name; models whose readable names agree (``a/b`` and ``a--b``)
        still get folders of their own.
    """
    # A relative folder is another model in another working directory.
    model = str(Path(model).absolute()) if os.path.isdir(model) else model
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", model).strip("-.")[-_NAME_CHARS_MAX:]
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    return cache / "disk" / f"{readable}-{digest}"
