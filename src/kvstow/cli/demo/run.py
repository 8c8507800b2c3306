"""The demo from end to end: model, story, table, picture, exit status."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from kvstow.cli.demo.chart import write_chart
from kvstow.cli.demo.document import CountTokens
from kvstow.cli.demo.model import ensure_model
from kvstow.cli.demo.report import LABELS, make_table, write_json
from kvstow.cli.demo.scenario import Scene, play, server_environ
from kvstow.cli.demo.verdict import judge
from kvstow.clock import Clock, SystemClock
from kvstow.errors import KvstowError

_INTERRUPTED = 130


def run_demo(cache: Path, out: Path) -> int:
    """Play the demo and write ``demo.json``, ``demo.png`` and the servers' log to ``out``.

    Args:
        cache: folder for the converted model, and for the disk tier while the demo runs.
        out: folder for the results; made if missing.

    Returns:
        The exit status: 0 when every row is as promised, else 1; 130 after Ctrl-C.
    """
    console = Console()
    # A closed terminal or a plain kill ends the demo as Ctrl-C does: with its servers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _run(console, cache, out)
    except KvstowError as error:
        console.print("[red]The demo stopped:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; no server is left running.")
        return _INTERRUPTED


def _run(console: Console, cache: Path, out: Path) -> int:
    clock = SystemClock()
    steps = _Steps(console, clock)
    out.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    log = out / "demo-server.log"
    log.unlink(missing_ok=True)
    console.print("One document, five places to have it from. This takes about three minutes.")
    with steps.step("the model: SmolLM2-135M-Instruct, converted once (about 20 s)"):
        model = ensure_model(cache)
        count_tokens = _tokenizer(model)
    scratch = Path(tempfile.mkdtemp(prefix="demo-disk-", dir=cache))
    try:
        stages = play(
            Scene(
                model=model,
                disk=scratch / "disk",
                log=log,
                environ=server_environ(os.environ),
                count_tokens=count_tokens,
                clock=clock,
                step=steps.step,
            )
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows = judge(stages)
    console.print()
    console.print(make_table(rows))
    write_json(rows, out / "demo.json")
    write_chart(rows, out / "demo.png")
    for name in ("demo.json", "demo.png", log.name):
        console.print(f"wrote {out / name}", highlight=False)
    for row in rows:
        for reason in row.broken:
            console.print(f"[red]not as promised:[/] {LABELS[row.stage]}: {reason}", highlight=False)
    return 1 if any(row.broken for row in rows) else 0


def _tokenizer(model: Path) -> CountTokens:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Steps:
    """Shows each step while it lasts, and its time when it is done."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun_s = self._clock.monotonic_s()
        with self._console.status(name):
            yield
        took_s = self._clock.monotonic_s() - begun_s
        self._console.print(f"  {took_s:6.1f} s  {name}", highlight=False)
