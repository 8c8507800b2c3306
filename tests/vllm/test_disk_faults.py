"""A disk that lies, hangs or is full, under a real engine: the text stays right and the engine goes on.

The arena is too small for what the tests save, so fillers push everything out to disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import Gates, kvstow_log
from inprocess import BLOCK, CHUNK, Answer, Engine, prompt, running

from kvstow.errors import NoSpaceError, StoreUnavailableError
from kvstow.lifecycle import saver as lifecycle_saver
from kvstow.lifecycle.messages import RequestId
from kvstow.lifecycle.requests import Phase
from kvstow.stores.base import FrameName
from kvstow.stores.disk import DiskStore

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL_ARENA_GIB = 0.002
LENGTH = 320
HIT = 256
CHUNKS = 5
BOUND_S = 31.0
"""A little more than the default bound on a load, and than the disk's cool-down after a fault."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(llama: Path, folder: Path, gates: Gates) -> Iterator[Engine]:
    with running(llama, {"disk_path": str(folder), "arena_gib": SMALL_ARENA_GIB}) as engine:
        yield engine


def frames(folder: Path) -> set[Path]:
    """Every frame's file under a disk root."""
    return {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock")}


def push_out(engine: Engine, gates: Gates, seed: int) -> None:
    """Leave in the arena nothing that was saved before, and in the engine nothing at all."""
    gates.wait_idle()
    slots = engine.planner.directory.arena_slots(0)
    for index in range(2 + slots * CHUNK // 960):
        engine.ask(prompt(960, seed=1_000_000 + 100 * seed + index))
    engine.clear_own_cache()
    gates.wait_idle()


class OnDisk:
    """A prompt whose chunks are on disk only, with what the engine answered and computed for it."""

    def __init__(self, engine: Engine, gates: Gates, folder: Path, seed: int) -> None:
        others = frames(folder)
        self.prompt = prompt(LENGTH, seed)
        self.answer: Answer = engine.ask(self.prompt, logprobs=True)
        self.bytes = engine.kv_bytes(self.answer.blocks)[: LENGTH // BLOCK]
        engine.settle()
        gates.wait_idle()
        ours = frames(folder) - others
        assert len(ours) == CHUNKS
        # By the index that a name begins with.
        self.files = sorted(ours, key=lambda path: int(path.name.split("-")[0]))
        push_out(engine, gates, seed)


@pytest.fixture
def kept(engine: Engine, gates: Gates, folder: Path, request: pytest.FixtureRequest) -> OnDisk:
    return OnDisk(engine, gates, folder, seed=abs(hash_of(request.node.name)))


def hash_of(name: str) -> int:
    """A seed that is another for each test and the same every time."""
    return int.from_bytes(name.encode()[-6:], "little")


def check_recomputed(
    engine: Engine, gates: Gates, kept: OnDisk, before: dict[str, float]
) -> dict[str, float]:
    """The prompt is computed and right, kvstow counted it, and the next time it is a hit again."""
    answer = engine.ask(kept.prompt, logprobs=True)
    assert answer.tokens == kept.answer.tokens
    assert engine.kv_bytes(answer.blocks)[: LENGTH // BLOCK] == kept.bytes
    engine.settle()
    gates.wait_idle()
    counted = engine.counted_since(before)
    assert counted["load_failed"] == 1
    assert counted["load_failed_tokens"] == HIT
    engine.clear_own_cache()
    again = engine.ask(kept.prompt)
    assert (again.cached, again.tokens) == (HIT, kept.answer.tokens)
    assert engine.kv_bytes(again.blocks)[: HIT // BLOCK] == kept.bytes[: HIT // BLOCK]
    engine.expect_baseline()
    return counted


def test_a_sound_disk_is_a_hit(engine: Engine, gates: Gates, kept: OnDisk) -> None:
    """The oracle of this file: without a fault the same steps end in a load from disk."""
    before = engine.counters()
    answer = engine.ask(kept.prompt)
    assert engine.counted_since(before)["loaded_tokens_disk"] == HIT
    assert (answer.cached, answer.tokens) == (HIT, kept.answer.tokens)
    assert engine.kv_bytes(answer.blocks)[: HIT // BLOCK] == kept.bytes[: HIT // BLOCK]
    engine.expect_baseline()


@pytest.mark.parametrize("where", ["header", "payload", "last byte"])
def test_a_flipped_byte(engine: Engine, gates: Gates, kept: OnDisk, where: str) -> None:
    bad = kept.files[2]
    good = bad.read_bytes()
    content = bytearray(good)
    at = {"header": 40, "payload": len(content) // 2, "last byte": len(content) - 1}[where]
    content[at] ^= 0x10
    bad.write_bytes(content)
    before = engine.counters()
    # Said in full the first time, and counted every time.
    counted = check_recomputed(engine, gates, kept, before)
    assert counted["corrupt_frames"] == 1
    # The bad file is gone: what lies there now, if anything, is the recomputed chunk.
    assert not bad.exists() or bad.read_bytes() == good


def test_a_truncated_file(engine: Engine, gates: Gates, kept: OnDisk) -> None:
    bad = kept.files[1]
    good = bad.read_bytes()
    os.truncate(bad, len(good) // 2)
    counted = check_recomputed(engine, gates, kept, engine.counters())
    assert counted["corrupt_frames"] == 1
    assert not bad.exists() or bad.read_bytes() == good


def test_two_files_that_changed_places(engine: Engine, gates: Gates, kept: OnDisk) -> None:
    one, two = kept.files[1], kept.files[2]
    good = one.read_bytes(), two.read_bytes()
    assert len(good[0]) == len(good[1])
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    counted = check_recomputed(engine, gates, kept, engine.counters())
    assert counted["corrupt_frames"] >= 1
    bad = [
        path
        for path, content in zip((one, two), good, strict=True)
        if path.exists() and path.read_bytes() != content
    ]
    # Readers run side by side: once one of the two was found bad, the other need not be read.
    assert len(bad) == 2 - counted["corrupt_frames"]


def test_a_file_that_is_gone(engine: Engine, gates: Gates, kept: OnDisk) -> None:
    kept.files[0].unlink()
    counted = check_recomputed(engine, gates, kept, engine.counters())
    assert "corrupt_frames" not in counted


def test_a_device_that_fails_to_read(
    engine: Engine, gates: Gates, kept: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: DiskStore, name: FrameName, target: memoryview) -> bool:
        raise StoreUnavailableError("get at /nowhere: EIO (Input/output error)")

    before = engine.counters()
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "get_into", fail)
        answer = engine.ask(kept.prompt)
    assert (answer.cached, answer.tokens) == (0, kept.answer.tokens)
    assert engine.counted_since(before)["load_failed"] == 1
    assert engine.kv_bytes(answer.blocks)[: LENGTH // BLOCK] == kept.bytes
    check_cool_down(engine, gates, kept)


def check_cool_down(engine: Engine, gates: Gates, kept: OnDisk) -> None:
    """Nothing is promised from a disk that failed, until it has had time to come back."""
    push_out(engine, gates, seed=len(engine.answers))
    before = engine.counters()
    assert before["disk_degraded"] == 1
    assert engine.ask(kept.prompt).cached == 0
    assert "promised_tokens" not in engine.counted_since(before)
    push_out(engine, gates, seed=len(engine.answers))
    gates.clock.jump(BOUND_S)
    assert engine.ask(kept.prompt).cached == HIT
    assert engine.counters()["disk_degraded"] == 0
    engine.expect_baseline()


def test_a_read_that_never_ends(
    engine: Engine, gates: Gates, kept: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request recomputes; the reader that comes back later writes nothing."""
    reading, come_back = threading.Event(), threading.Event()
    real = DiskStore.get_into

    def hang(store: DiskStore, name: FrameName, target: memoryview) -> bool:
        reading.set()
        assert come_back.wait(60), "the test never let the reader go"
        return real(store, name, target)

    before = engine.counters()
    with monkeypatch.context() as patch, kvstow_log() as log:
        patch.setattr(DiskStore, "get_into", hang)
        try:
            name = engine.submit(kept.prompt)
            engine.step_until(reading.is_set)
            loading = engine.block_ids(name)
            engine.step()
            assert engine.planner.phase_of(RequestId(name)) is Phase.LOADING
            gates.clock.jump(BOUND_S)
            engine.step_until(lambda: engine.answers[name].finish is not None)
            answer = engine.answers[name]
            assert answer.tokens == kept.answer.tokens
            counted = engine.counted_since(before)
            assert (counted["load_failed"], counted["load_timeouts"]) == (1, 1)
            assert engine.kv_bytes(answer.blocks)[: LENGTH // BLOCK] == kept.bytes

            # The blocks of the load are other requests' while the readers still hang.
            others = [engine.ask(prompt(960, seed=seed)).blocks for seed in (5, 6)]
            assert set(loading) <= {block for blocks in others for block in blocks}
            held = engine.kv_bytes(range(60))
        finally:
            come_back.set()
        gates.read.wait_idle()
    assert engine.kv_bytes(range(60)) == held
    errors = [record for record in log if record.levelname == "ERROR"]
    assert len(errors) == 1, [record.getMessage() for record in errors]
    assert name in errors[0].getMessage()
    assert "timeout" in errors[0].getMessage()
    engine.expect_baseline()
    check_cool_down(engine, gates, kept)
    # The slots that the readers were filling are free again too.
    assert engine.planner.forget_all()
    assert engine.planner.directory.arena_in_use(0) == 0


@pytest.mark.parametrize("ending", ["done", "aborted", "too late"])
def test_a_twin_waits_for_a_promotion_and_not_longer(
    engine: Engine, gates: Gates, kept: OnDisk, ending: str
) -> None:
    """The same prompt while its chunks are on the way from disk: asked again until they are there."""
    before = engine.counters()
    with gates.shut("read"):
        first = engine.submit(kept.prompt)
        engine.step()
        second = engine.submit(kept.prompt)
        engine.step()
        assert engine.planner.phase_of(RequestId(first)) is Phase.LOADING
        assert engine.planner.phase_of(RequestId(second)) is Phase.MISSED
        assert not engine.block_ids(second)
        if ending == "aborted":
            engine.abort(first)
            engine.step()
        if ending == "too late":
            gates.clock.jump(BOUND_S)
            engine.step_until(lambda: engine.counted_since(before).get("load_timeouts", 0) > 0)
    engine.step_until(lambda: engine.answers[second].finish is not None)
    assert engine.answers[second].tokens == kept.answer.tokens
    if ending != "too late":
        # At least: where the first has run, the engine has a block more.
        assert engine.answers[second].cached >= HIT
        assert "load_failed" not in engine.counted_since(before)
    assert engine.kv_bytes(engine.answers[second].blocks)[: HIT // BLOCK] == kept.bytes[: HIT // BLOCK]
    if ending != "aborted":
        engine.step_until(lambda: engine.answers[first].finish is not None)
        assert engine.answers[first].tokens == kept.answer.tokens
    gates.wait_idle()
    engine.expect_baseline()
    gates.clock.jump(BOUND_S)
    assert engine.planner.forget_all()
    assert engine.planner.directory.arena_in_use(0) == 0


def test_a_load_that_never_begins(engine: Engine, gates: Gates) -> None:
    """Nothing moves in the queue: its bound ends it, and it is not carried out later."""
    tokens = prompt(LENGTH, seed=90)
    first = engine.ask(tokens)
    held = engine.kv_bytes(first.blocks)[: LENGTH // BLOCK]
    engine.clear_own_cache()
    before = engine.counters()
    with gates.shut("load"):
        name = engine.submit(tokens)
        engine.step()
        engine.step()
        assert engine.planner.phase_of(RequestId(name)) is Phase.LOADING
        gates.clock.jump(BOUND_S)
        engine.step_until(lambda: engine.answers[name].finish is not None)
        answer = engine.answers[name]
        assert answer.tokens == first.tokens
        assert engine.kv_bytes(answer.blocks)[: LENGTH // BLOCK] == held
        counted = engine.counted_since(before)
        assert (counted["load_failed"], counted["load_timeouts"]) == (1, 1)
        engine.clear_own_cache()
        everything = engine.kv_bytes(range(60))
    gates.load.wait_idle()
    assert engine.kv_bytes(range(60)) == everything
    again = engine.ask(tokens)
    assert (again.cached, again.tokens) == (HIT, first.tokens)
    engine.expect_baseline()


@pytest.mark.parametrize("error", [NoSpaceError, StoreUnavailableError])
def test_a_disk_that_takes_nothing(
    engine: Engine, gates: Gates, folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(store: DiskStore, name: FrameName, frame: memoryview) -> None:
        raise error("put at /nowhere: no")

    tokens = prompt(LENGTH, seed=77 if error is NoSpaceError else 78)
    held = frames(folder)
    before = engine.counters()
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", refuse)
        first = engine.ask(tokens)
        engine.settle()
        gates.wait_idle()
    engine.settle()
    assert engine.counted_since(before)["disk_write_failed"] == CHUNKS
    assert not frames(folder) - held
    # The arena has them all the same.
    engine.clear_own_cache()
    again = engine.ask(tokens)
    assert (again.cached, again.tokens) == (HIT, first.tokens)
    engine.expect_baseline()


def test_a_save_that_breaks_gives_blocks_and_pins_back(
    engine: Engine, gates: Gates, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in a copy may cost a save, never blocks: an engine without blocks stands still."""

    def broken(frame: memoryview, identity: object) -> None:
        raise RuntimeError("a copy that nobody thought of")

    tokens = prompt(500, seed=40)
    held = frames(folder)
    before = engine.counters()
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle_saver, "seal", broken)
        engine.ask(tokens)
        engine.settle()
        gates.wait_idle()
        engine.expect_baseline()
    counted = engine.counted_since(before)
    assert "saves" not in counted
    assert not frames(folder) - held
    # What was not saved is computed, and saved this time.
    engine.clear_own_cache()
    assert engine.ask(tokens).cached == 0
    engine.clear_own_cache()
    assert engine.ask(tokens).cached == 448
    engine.expect_baseline()
