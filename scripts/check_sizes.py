"""Fails on Python modules that are too long to read: ``check_sizes.py FOLDER...``."""

from __future__ import annotations

import sys
from pathlib import Path

LINES_MAX = 500


def main(folders: list[str]) -> int:
    """Print every module over `LINES_MAX` lines; 1 if there is one, else 0."""
    modules = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    too_long = {path: lines for path, lines in lengths.items() if lines > LINES_MAX}
    for path, lines in too_long.items():
        print(f"{path}: {lines} lines, more than {LINES_MAX}; move its second idea to a module of its own")
    print(f"{len(modules)} modules, {len(too_long)} too long")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
