"""vLLM in this process, by the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import tiny
from gates import Gates
from inprocess import BLOCK, CHUNK, Engine, running
from vllm.v1.request import Request, RequestStatus

from kvstow.errors import StoreUnavailableError
from kvstow.stores.disk import DiskStore
from kvstow.testing.engine_bench import bench_engine
from kvstow.testing.engine_contract import EngineContract
from kvstow.testing.engine_under_test import Answer, Tokens, damage_frames_under

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS = 40
COOL_DOWN_S = 31.0
"""A little more than a disk that failed is left alone, by default."""


class VllmEngine:
    """An `Engine` after another over one disk, behind gates.

    Args:
        model: folder.
        folder: for the disk.
        gates: in front of every engine's executors.
    """

    chunk_tokens = CHUNK
    resume_tokens = CHUNK
    vocabulary = range(10, tiny.VOCABULARY)
    room_tokens = BLOCKS * BLOCK

    def __init__(self, model: Path, folder: Path, gates: Gates) -> None:
        self._model = model
        self._folder = folder
        self._gates = gates
        self._life = ExitStack()
        self._broken = pytest.MonkeyPatch()
        self._start()

    @property
    def num_free_blocks(self) -> int:
        return self._engine.free_blocks

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self._requests)

    # ---- requests ----------------------------------------------------------------------

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        self._engine.submit(prompt, name=name, max_tokens=outputs, salt=salt or None)
        request: Request = self._engine.request(name)
        self._requests.append(request)
        # vLLM takes them off the request with its first token.
        self._hits[name] = request.prefill_stats

    def abort(self, name: str) -> None:
        self._engine.abort(name)

    def finish(self, names: Sequence[str]) -> list[Answer]:
        answers = self._engine.answers
        self._engine.step_until(lambda: all(answers[name].finish is not None for name in names))
        return [
            Answer(
                tuple(answers[name].tokens),
                own_hit=self._hits[name].num_local_cached_tokens,
                loaded=self._hits[name].num_external_cached_tokens,
            )
            for name in names
        ]

    def recompute(self, prompt: Tokens, outputs: int, salt: str = "") -> Tokens:
        answer = self._engine.ask(prompt, max_tokens=outputs, salt=salt or None, uses_caches=False)
        assert answer.cached == 0
        return tuple(answer.tokens)

    # ---- the engine's life -------------------------------------------------------------

    def settle(self) -> None:
        # A copy that has ended is known to the planner after a step, and may order a write.
        self._engine.settle()
        self._gates.wait_idle()
        self._engine.settle()
        self._gates.wait_idle()

    def forget_own_cache(self) -> None:
        self.settle()
        self._engine.clear_own_cache()

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._life.close()

    def _start(self) -> None:
        stow = {"disk_path": str(self._folder)}
        options = {"max_num_seqs": 8, "num_gpu_blocks_override": BLOCKS}
        self._engine: Engine = self._life.enter_context(running(self._model, stow, **options))
        self._requests: list[Request] = []
        self._hits = {}

    # ---- abilities ---------------------------------------------------------------------

    def hold_loads(self) -> AbstractContextManager[None]:
        return self._gates.shut("load", "read")

    def hold_saves(self) -> AbstractContextManager[None]:
        return self._gates.shut("save")

    def wait_loading(self, name: str) -> None:
        request = self._engine.request(name)
        self._engine.step_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)

    def break_disk(self) -> None:
        def fail(*_: object) -> None:
            raise StoreUnavailableError("at /nowhere: EIO (Input/output error)")

        for operation in ("get_into", "put", "remove", "contains"):
            self._broken.setattr(DiskStore, operation, fail)

    def mend_disk(self) -> None:
        self.settle()
        self._broken.undo()
        self._gates.clock.jump(COOL_DOWN_S)

    def damage_frames(self) -> int:
        self.settle()
        return damage_frames_under(self._folder)


@pytest.fixture(scope="module")
def engine(gates: Gates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    # More spread would make near ties out of what steps and batches change in the last bits.
    model = tiny.make_llama(tmp_path_factory.mktemp("attentive"), spread=0.1)
    engine = VllmEngine(model, tmp_path_factory.mktemp("disk"), gates)
    yield engine
    engine.stop()


class TestVllm(EngineContract):
    pass


def test_the_bench_of_engines(engine: VllmEngine) -> None:
    figures = bench_engine(engine, tuple(range(10, 410)), rounds=2)
    assert [figure.operation for figure in figures] == ["cold", "own hit", "DRAM", "disk"]
    assert [figure.reused_tokens for figure in figures] == [0, 384, 384, 384]
    assert all(figure.median_s > 0 for figure in figures)
