"""The demo's story: which servers, which questions, in which order."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstow.cli.demo.client import Client
from kvstow.cli.demo.document import CountTokens, Document, make_document, make_filler
from kvstow.cli.demo.server import Server, ServerPlan
from kvstow.cli.demo.verdict import Measured, Stage
from kvstow.clock import Clock

Step = Callable[[str], AbstractContextManager[None]]
"""Shows a step by name while it lasts, and how long it took."""

SERVED_NAME = "demo"
DOCUMENT_TOKENS_MIN = 6600
ANSWER_TOKENS = 40
BLOCK_TOKENS = 32
ENGINE_BLOCKS = 300
# One block, so that a reload ends where the engine's own hit ends and the same tokens are left to
# compute. Without any connector, in bfloat16, vLLM's answers depend on where a prefill is split: two
# candidates for the next token tie in this document, and a split 32 tokens earlier turns the tie.
CHUNK_TOKENS = BLOCK_TOKENS
FILLERS = 3
# So that the fillers alone fill the engine's own cache: attention makes one long filler dearer.
FILLER_TOKENS_MIN = ENGINE_BLOCKS * BLOCK_TOKENS // FILLERS + BLOCK_TOKENS

_OPTIONS: Mapping[str, str | None] = {
    "--arena-gib": "1",
    "--disk-gib": "2",
    "--dtype": "bfloat16",
    "--max-model-len": "8192",
    "--block-size": str(BLOCK_TOKENS),
    "--num-gpu-blocks-override": str(ENGINE_BLOCKS),
    # One at a time, and no compiled graphs: batching and graphs may change the last bits.
    "--max-num-seqs": "1",
    "--enforce-eager": None,
    "--seed": "0",
}


@dataclass(frozen=True)
class Scene:
    """What the story needs.

    Attributes:
        model: folder of the model.
        disk: folder for the disk tier; not there yet.
        log: file for the servers' output.
        environ: the servers' environment.
        count_tokens: the model's tokenizer.
        clock: the clock of all measurements.
        step: shows progress.
    """

    model: Path
    disk: Path
    log: Path
    environ: Mapping[str, str]
    count_tokens: CountTokens
    clock: Clock
    step: Step


def server_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The servers' environment: the caller's, without settings that would change the story."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("KVSTOW_", "VLLM_"))}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "KVSTOW_CHUNK_TOKENS": str(CHUNK_TOKENS),
    }


def play(scene: Scene) -> dict[Stage, Measured]:
    """Ask the same questions with the document held in each place in turn; blocks for minutes.

    Raises:
        DemoError: a server did not start or stop, or its counters make no sense.
    """
    document = make_document(scene.count_tokens, DOCUMENT_TOKENS_MIN)
    measured: dict[Stage, Measured] = {}

    with _server(scene, "start vLLM with kvstow (about 25 s)") as client:
        with scene.step("read the document cold (about 15 s)"):
            measured[Stage.COLD] = _ask_all(client, document)
        with scene.step("ask again: the engine's own prefix hit"):
            # The faster of two: it is what kvstow is compared with, and may not look slow by chance.
            hits = [_ask_all(client, document) for _ in range(2)]
            measured[Stage.ENGINE] = min(hits, key=lambda hit: hit.ttft_s)
        with scene.step(f"{FILLERS} other long prompts, until the engine has lost it (about 15 s)"):
            for index in range(FILLERS):
                client.ask(make_filler(index, scene.count_tokens, FILLER_TOKENS_MIN), tokens_max=1)
        with scene.step("ask again: restored from DRAM"):
            measured[Stage.ARENA] = _ask_all(client, document)
    with (
        _server(scene, "start it again: DRAM is empty, the disk is not (about 25 s)") as client,
        scene.step("ask again: restored from disk"),
    ):
        measured[Stage.DISK] = _ask_all(client, document)
    with scene.step("remove the disk folder"):
        shutil.rmtree(scene.disk)
    with (
        _server(scene, "start it again: nothing is held (about 25 s)") as client,
        scene.step("ask again: computed (about 15 s)"),
    ):
        measured[Stage.RECOMPUTE] = _ask_all(client, document)
    return measured


@contextmanager
def _server(scene: Scene, name: str) -> Iterator[Client]:
    plan = ServerPlan(
        model=scene.model,
        served_name=SERVED_NAME,
        disk=scene.disk,
        log=scene.log,
        options=tuple(word for pair in _OPTIONS.items() for word in pair if word is not None),
        environ=scene.environ,
    )
    server = Server(plan, scene.clock)
    with scene.step(name):
        server.start()
    try:
        client = Client(server.url, SERVED_NAME, scene.clock)
        # The first request of a server pays for warming up; it is not what is measured here.
        client.ask("Good morning.", tokens_max=4)
        yield client
    except BaseException:
        server.kill()
        raise
    with scene.step("stop the server"):
        server.stop()


def _ask_all(client: Client, document: Document) -> Measured:
    """Ask every question; the first brings the document in and is the one that is measured."""
    first, counted = client.ask_counted(document.questions[0], ANSWER_TOKENS)
    others = [client.ask(question, ANSWER_TOKENS) for question in document.questions[1:]]
    return Measured(
        ttft_s=first.ttft_s,
        prompt_tokens=first.prompt_tokens,
        counted=counted,
        answers=(first.text, *(answer.text for answer in others)),
    )
