"""The demo's model folder, its servers as processes, and what it hands to them."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from kvstow.cli.demo import server as server_module
from kvstow.cli.demo.errors import DemoError
from kvstow.cli.demo.model import ensure_model, is_complete, model_folder
from kvstow.cli.demo.scenario import (
    ENGINE_BLOCKS,
    FILLER_TOKENS_MIN,
    FILLERS,
    server_environ,
)
from kvstow.cli.demo.server import Server, ServerPlan, free_port
from kvstow.clock import SystemClock

FILES = ("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json")


def fake_model(cache: Path) -> Path:
    folder = model_folder(cache)
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("some bytes")
    (folder / "kvstow-manifest.json").write_text(json.dumps(dict.fromkeys(FILES, 10)))
    return folder


def test_a_whole_model_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = fake_model(tmp_path)
    assert ensure_model(tmp_path) == folder
    assert (folder / "config.json").read_text() == "some bytes"


@pytest.mark.parametrize("name", [*FILES, "kvstow-manifest.json"])
def test_half_a_model_is_no_model(tmp_path: Path, name: str) -> None:
    folder = fake_model(tmp_path)
    assert is_complete(folder)
    (folder / name).write_text("short")
    assert not is_complete(folder)
    (folder / name).unlink()
    assert not is_complete(folder)


def test_the_callers_settings_do_not_change_the_story() -> None:
    environ = server_environ({"PATH": "/bin", "KVSTOW_DISK_GIB": "9", "VLLM_PLUGINS": "", "HOME": "/h"})
    assert environ["PATH"] == "/bin"
    assert environ["HOME"] == "/h"
    assert [name for name in environ if name.startswith("KVSTOW_")] == ["KVSTOW_CHUNK_TOKENS"]
    assert "VLLM_PLUGINS" not in environ


def test_the_fillers_alone_fill_the_engines_cache() -> None:
    assert FILLERS * FILLER_TOKENS_MIN >= ENGINE_BLOCKS * 32


SERVES = """
import http.server, os, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = "print('no such model'); raise SystemExit(3)"
DEAF = "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES


@pytest.fixture
def plan(tmp_path: Path) -> ServerPlan:
    return ServerPlan(
        model=tmp_path / "model",
        served_name="demo",
        disk=tmp_path / "disk",
        log=tmp_path / "log",
        options=("--seed", "0"),
        environ=dict(os.environ),
        start_s_max=30.0,
        stop_s_max=0.5,
    )


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Start ``text`` in the place of a real server, which takes half a minute."""
    monkeypatch.setattr(server_module, "_COMMAND", (sys.executable, "-c", text))


def ends(pid: int) -> bool:
    """Whether the process is gone, or goes within seconds: a signal takes a moment to act."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5.0)[0])
    finally:
        os.close(descriptor)


def child_of(plan: ServerPlan) -> int:
    return int(plan.log.read_text().split("child ")[1].split()[0])


@pytest.mark.slow
def test_a_stopped_server_leaves_no_process(plan: ServerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, SERVES)
    server = Server(plan, SystemClock())
    server.start()
    child = child_of(plan)
    server.stop()
    assert ends(child)


@pytest.mark.slow
def test_a_server_that_does_not_heed_is_killed(plan: ServerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, DEAF)
    server = Server(plan, SystemClock())
    server.start()
    child = child_of(plan)
    with pytest.raises(DemoError, match=r"did not stop within 0\.5 s"):
        server.stop()
    assert ends(child)


@pytest.mark.slow
def test_the_log_says_why_a_server_did_not_start(plan: ServerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, DIES)
    with pytest.raises(DemoError, match=r"status 3 while starting\n(.|\n)*no such model"):
        Server(plan, SystemClock()).start()


@pytest.mark.slow
def test_ctrl_c_while_starting_leaves_no_process(plan: ServerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, SERVES.replace("self.send_response(200)", "self.send_response(503)"))
    server = Server(plan, SystemClock())
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert ends(child_of(plan))


def test_ports_are_free() -> None:
    assert 1024 <= free_port() <= 65535
