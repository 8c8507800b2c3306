"""Runs every model family on a real engine and writes what was seen into a page: ``models_table.py PAGE.md``.

The table of the page is replaced, between its two marks; what is around it stays. A run in which a
test fails writes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPORTS = Path("out/models")
BEGIN, END = "<!-- table: make test-models -->", "<!-- end of table -->"
COLUMNS = (
    "family",
    "groups",
    "kinds",
    "dtype",
    "own hit equals cold",
    "bit-exact against",
    "tokens restored",
    "two at once",
    "another ending",
    "TP=2",
    "remarks",
)
# Text models run without torchvision.
TORCHVISION = str(Path(sys.prefix) / "vision")
RUNS = {
    "text": ("tests/vllm/test_models.py", ""),
    "vision": ("tests/vllm/vision/test_vision_models.py", TORCHVISION),
    "tensor_parallel": ("tests/vllm_processes/test_models_tensor_parallel.py", ""),
    "vision_tensor_parallel": ("tests/vllm_processes/vision/test_vision_tensor_parallel.py", TORCHVISION),
}
"""By report: tests, and what is put into their path."""

Row = dict[str, str]


def run(report: str) -> int:
    """Run the tests of a report; pytest's exit status."""
    tests, extra = RUNS[report]
    path = os.pathsep.join(filter(None, [extra, os.environ.get("PYTHONPATH")]))
    # Naming the marker selects the long form; the short one is marked vllm like all of them.
    options = ["-m", "vllm or models", "--junitxml", str(REPORTS / f"{report}.xml")]
    command = [sys.executable, "-m", "pytest", "-q", tests, *options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def rows() -> list[Row]:
    """A row for each family, from the properties that the tests of all reports recorded."""
    found: dict[str, Row] = {}
    for report in RUNS:
        for case in ElementTree.parse(REPORTS / f"{report}.xml").iter("testcase"):
            noted = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
            found.setdefault(noted["family"], {}).update(noted)
    return list(found.values())


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row.get(name) or "–" for name in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(page: Path) -> int:
    """Run, and write the page if all is well; else the worst exit status."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    worst = max(run(report) for report in RUNS)
    if worst:
        print(f"a test failed: {page} stays as it is", file=sys.stderr)
        return worst
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(rows())}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
