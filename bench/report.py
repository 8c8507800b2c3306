"""How every bench reports: a table for people, JSON for the record."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def emit(name: str, rows: Sequence[dict[str, Any]], json_path: str | os.PathLike[str] | None = None) -> None:
    """Print ``rows`` as a table, and write them as JSON where a path is given.

    Args:
        name: what was measured; the table's title.
        rows: one dictionary per line, all with the same keys in the same order; units in the keys
            (``gather_gb_per_s``). Floats are shown with three significant digits and kept whole in
            the JSON.
        json_path: where to write ``{"name", "machine", "rows"}``, or None.
    """
    table = Table(title=name)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    # A table cut to the width of a pipe is of no use in a log.
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(table)
    if json_path is not None:
        document = {"name": name, "machine": machine(), "rows": list(rows)}
        Path(json_path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to judge the figures."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    """The model name Linux gives, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
