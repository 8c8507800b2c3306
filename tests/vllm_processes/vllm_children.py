"""The tests' side of engines and servers in processes of their own: start, ask, stop, kill.

Every process gets a session of its own, so that whatever it starts can be found and ended with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
from engine_child import serve_forked
from prompt_json import to_json

from kvstow.clock import SystemClock

HERE = Path(__file__).parent
PYTHON = sys.executable
VOCABULARY = 512
BLOCK = 32
CHUNK = 64
CHUNK_FRAME_BYTES = 4096 + 3 * 2 * 2 * 32 * 4 * CHUNK
"""Header, and layers * (K, V) * heads * head size * float32 * tokens, of the tiny model."""

START_S_MAX = 240.0
ANSWER_S_MAX = 120.0
END_S_MAX = 60.0
_POLL_S = 0.02
_SLOW_POLL_S = 0.2
"""For what takes seconds, or is costly to ask."""

_clock = SystemClock()


def wait_until(condition: Callable[[], bool], bound_s: float, what: str, poll_s: float = _POLL_S) -> None:
    """Return once ``condition()``; fail past the bound, saying ``what`` did not happen."""
    give_up_s = _clock.monotonic_s() + bound_s
    pause = threading.Event()
    while not condition():
        assert _clock.monotonic_s() < give_up_s, f"not within {bound_s:g} s: {what}"
        pause.wait(poll_s)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; the special ones are left out."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


def stow(**settings: object) -> dict[str, object]:
    """vLLM's option for kvstow, with chunks of `CHUNK` tokens."""
    return {
        "kv_connector": "StowConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"chunk_tokens": CHUNK, "arena_gib": 0.02, **settings},
    }


def environment(**changes: str) -> dict[str, str]:
    """What a child starts with: nothing of whoever runs the tests decides them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "KVSTOW_")) and name != "PYTHONHASHSEED"
    }
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The default binds to NUMA nodes and fails on a machine with one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return kept | ours | changes


@dataclass(frozen=True)
class Answer:
    """What an engine said to one prompt; two are equal if tokens and log-probabilities are, bit for bit.

    Attributes:
        text: tokens and log-probabilities.
        cached: prompt tokens that were not computed, from the engine's cache or kvstow's.
        length: tokens of the prompt, those of its images and sounds among them.
    """

    text: str
    cached: int
    length: int


class Process(Protocol):
    """A child, whoever made it."""

    pid: int

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...

    def wait(self, bound_s: float) -> int:
        """Its exit status; fails past the bound."""
        ...


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, bound_s: float) -> int:
        return self._process.wait(bound_s)


class _Forked:
    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self._process = process

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def wait(self, bound_s: float) -> int:
        self._process.join(bound_s)
        assert self._process.exitcode is not None, f"process {self.pid} did not end within {bound_s:g} s"
        return int(self._process.exitcode)


class Child:
    """A process in a session of its own.

    Attributes:
        log: file with everything it printed.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log

    def lines(self, text: str) -> list[str]:
        """Lines of its log that hold ``text``."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once ``condition()``; fail if it ends before, or past a bound."""

        def is_so() -> bool:
            if condition():
                return True
            assert self.process.is_alive(), f"not so, and the process has ended: {what}; see {self.log}"
            return False

        wait_until(is_so, ANSWER_S_MAX, f"{what}; see {self.log}")

    def session(self) -> list[psutil.Process]:
        """The living processes of its session; the dead that nobody has asked after do not count."""
        return [member for member in psutil.process_iter() if self._is_member(member)]

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that its processes have mapped or open now."""
        return {path for member in self.session() for path in _shared_memory(member.pid)}

    def sockets(self) -> set[Path]:
        """Sockets with a name in the file system that its processes have open now."""
        found: set[Path] = set()
        for member in self.session():
            with suppress(psutil.NoSuchProcess):
                found.update(Path(item.laddr) for item in member.net_connections("unix") if item.laddr)
        return found

    def expect_gone(self) -> None:
        """Nothing of its session lives on."""
        # The interpreter's resource tracker notices a little later than others that all are gone.
        wait_until(
            lambda: not self.session(),
            END_S_MAX,
            f"no process of session {self.process.pid} is left",
            _SLOW_POLL_S,
        )

    def kill(self) -> None:
        """SIGKILL to all of it at once; returns when all are dead."""
        for _ in range(2):  # A group of its own inside the session needs one of its own.
            for group in {self.process.pid, *map(_group_of, self.session())} - {0}:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        self.process.wait(END_S_MAX)
        self.expect_gone()

    def _is_member(self, member: psutil.Process) -> bool:
        try:
            return os.getsid(member.pid) == self.process.pid and member.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False


def _group_of(member: psutil.Process) -> int:
    try:
        return os.getpgid(member.pid)
    except ProcessLookupError:
        return 0


def _shared_memory(pid: int) -> Iterator[Path]:
    folder = Path(f"/proc/{pid}")
    names: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        names += [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
        names += [str(link.readlink()) for link in (folder / "fd").iterdir()]
    yield from (Path(name) for name in names if name.startswith("/dev/shm/"))


class Engine(Child):
    """vLLM's offline engine in a child; see `engine_child`."""

    def __init__(self, process: Process, log: Path, connection: Connection) -> None:
        super().__init__(process, log)
        self._connection = connection

    def wait_ready(self) -> None:
        """Block until it can be asked."""
        assert self._hear(START_S_MAX) == "ready"

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Have it answer one prompt."""
        self.say({"ask": list(tokens)})
        return self.answer()

    def ask_about(self, content: Mapping[str, Any]) -> Answer:
        """The same, for a prompt with images or sounds in it; see `prompt_json`."""
        self.say({"ask_about": to_json(content)})
        return self.answer()

    def answer(self) -> Answer:
        """The answer to the oldest prompt that was said and not answered yet."""
        heard = self._hear(ANSWER_S_MAX)
        return Answer(json.dumps([heard["tokens"], heard["logprobs"]]), heard["cached"], heard["length"])

    def numbers(self) -> Mapping[str, float]:
        """kvstow's numbers, without prefix and suffix, as far as the last step told them."""
        self.say({"numbers": None})
        heard = self._hear(ANSWER_S_MAX)
        return {name.removeprefix("kvstow_").replace("_total", ""): value for name, value in heard.items()}

    def forget(self) -> None:
        """Have it empty its own cache, once nothing is in flight any more; kvstow keeps what it has."""

        def is_empty() -> bool:
            # A save's report comes with a step, and a step needs a request; this one is too short to save.
            self.ask([7, 7, 7])
            self.say({"forget": None})
            return bool(self._hear(ANSWER_S_MAX))

        self.wait_until(is_empty, "its cache is empty")

    def say(self, message: Mapping[str, object]) -> None:
        """Send a message without waiting for the answer."""
        self._connection.send_bytes(json.dumps(message).encode())

    def stop(self) -> None:
        """Have it end in peace; nothing of it is left afterwards."""
        self.say({"stop": None})
        assert self.process.wait(END_S_MAX) == 0, f"see {self.log}"
        self.expect_gone()

    def _hear(self, bound_s: float) -> Any:
        try:
            assert self._connection.poll(bound_s), f"no answer within {bound_s:g} s; see {self.log}"
            return json.loads(self._connection.recv_bytes())
        except EOFError:
            tail = self.log.read_text(errors="replace").splitlines()[-30:]
            raise AssertionError("\n".join(["the engine ended; its last lines:", *tail])) from None


class Server(Child):
    """vLLM's OpenAI server in a child.

    Attributes:
        url: base address.
    """

    def __init__(self, process: Process, log: Path, port: int) -> None:
        super().__init__(process, log)
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        """Block until it can be asked."""
        wait_until(self._answers, START_S_MAX, f"{self.url} answers; see {self.log}", _SLOW_POLL_S)

    def ask(self, tokens: Sequence[int]) -> Answer:
        """Have it complete one prompt."""
        body = {
            "model": "tiny",
            "prompt": list(tokens),
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": 4,
            "ignore_eos": True,
        }
        heard = httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S_MAX)
        assert heard.is_success, heard.text
        content = heard.json()
        [choice] = content["choices"]
        usage = content["usage"]
        details = usage["prompt_tokens_details"]
        cached = details["cached_tokens"] if details else 0
        text = json.dumps([choice["text"], choice["logprobs"]])
        return Answer(text, cached or 0, usage["prompt_tokens"])

    def metrics(self) -> dict[str, float]:
        """kvstow's numbers as the server shows them, summed over its engines, by name and tier."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=ANSWER_S_MAX).text.splitlines():
            if line.startswith("kvstow_"):
                labelled, value = line.rsplit(" ", 1)
                name, _, labels = labelled.partition("{")
                tier = [label.split('"')[1] for label in labels.split(",") if label.startswith("tier=")]
                key = "_".join([name, *tier])
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def stop(self) -> None:
        """SIGTERM, as an operator does; nothing of it is left afterwards."""
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.wait(END_S_MAX)
        self.expect_gone()

    def _answers(self) -> bool:
        assert self.process.is_alive(), f"the server ended; see {self.log}"
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).is_success
        except httpx.TransportError:
            return False


class Launcher:
    """Starts engines and servers, and ends at `close` what a failing test left.

    Args:
        logs: folder for their logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def fork(
        self,
        model: Path,
        transfer: Mapping[str, object] | None = None,
        serve: Callable[[Connection, dict[str, Any]], None] = serve_forked,
    ) -> Engine:
        """An engine in one process, forked from one that has vLLM imported. Starts in seconds."""
        ours, theirs = multiprocessing.Pipe()
        child = self.forked(serve, theirs, engine_options(model, transfer))
        theirs.close()
        return self._engine(child.process, child.log, ours)

    def forked(self, target: Callable[..., None], *arguments: object) -> Child:
        """A process that runs ``target``, forked from one that has vLLM imported."""
        log = self._new_log()
        process = _forkserver().Process(target=_begin, args=(log, target, *arguments), daemon=True)
        process.start()
        child = Child(_Forked(process), log)
        self._children.append(child)
        return child

    def spawn(
        self,
        model: Path,
        transfer: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: object,
    ) -> Engine:
        """An engine in an interpreter of its own, and in as many processes as vLLM likes."""
        ours, theirs = multiprocessing.Pipe()
        said = json.dumps(engine_options(model, transfer, **options))
        command = [PYTHON, str(HERE / "engine_child.py"), str(theirs.fileno()), said]
        process, log = self._popen(command, environ or {}, pass_fds=(theirs.fileno(),))
        theirs.close()
        return self._engine(process, log, ours)

    def server(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Server:
        """A server that is not ready yet: ``command`` and what makes it small and talkative."""
        port = _free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        options += ["--dtype", "float32", "--enforce-eager", "--seed", "0", "--max-model-len", "1024"]
        options += ["--block-size", str(BLOCK), "--enable-prompt-tokens-details"]
        process, log = self._popen([*command, *options], environ or {})
        server = Server(process, log, port)
        self._children.append(server)
        return server

    def close(self) -> None:
        """End what still runs."""
        for child in self._children:
            if child.session():
                child.kill()

    def _engine(self, process: Process, log: Path, connection: Connection) -> Engine:
        engine = Engine(process, log, connection)
        self._children.append(engine)
        engine.wait_ready()
        return engine

    def _popen(
        self, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> tuple[Process, Path]:
        log = self._new_log()
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment(**environ),
                pass_fds=pass_fds,
                start_new_session=True,
            )
        return _Spawned(process), log

    def _new_log(self) -> Path:
        return self._logs / f"child-{len(self._children)}.log"


def engine_options(
    model: Path, transfer: Mapping[str, object] | None, **options: object
) -> dict[str, object]:
    """Options under which vLLM's results are the same every time, and its own cache is small."""
    defaults: dict[str, object] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 40,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 512,
        "seed": 0,
        "disable_log_stats": False,
    }
    chosen = {} if transfer is None else {"kv_transfer_config": transfer}
    return defaults | chosen | options


def server_of(model: Path, **settings: object) -> list[str]:
    """The command of vLLM's server with kvstow in it."""
    transfer = json.dumps(stow(**settings))
    module = [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, "--model", str(model), "--kv-transfer-config", transfer]


def _begin(log: Path, target: Callable[..., None], *arguments: object) -> None:
    os.setsid()
    with log.open("ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    target(*arguments)


def _forkserver() -> Any:
    """The context in which processes are forked from one that has vLLM imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_warmup"])
    return context


def start_forkserver() -> None:
    """Start the process that engines are forked from; the environment is copied now."""
    _forkserver()
    multiprocessing.forkserver.ensure_running()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
