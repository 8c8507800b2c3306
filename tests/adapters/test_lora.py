from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstow.adapters.vllm import lora
from kvstow.adapters.vllm.lora import Adapter, AdapterCheck, AdapterDigests, AdapterState
from kvstow.clock import ManualClock

BOUND_S = 30.0


def make_adapter(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.bin").write_bytes(content)
    return str(folder)


def answered(check: AdapterCheck) -> AdapterCheck:
    """Wait for the thread; fails if it never answers."""
    changed = threading.Event()
    for _ in range(500):
        if check.state is not AdapterState.READING:
            return check
        changed.wait(0.01)
    raise AssertionError("no answer")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def digests(clock: ManualClock) -> Iterator[AdapterDigests]:
    made = AdapterDigests(clock, BOUND_S)
    yield made
    made.close()


@pytest.fixture
def hung(digests: AdapterDigests, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that hangs until the event is set."""
    may_go = threading.Event()
    monkeypatch.setattr(lora, "adapter_digest", lambda path: (may_go.wait(), b"d" * 32)[1])
    yield may_go
    may_go.set()


def test_content_decides_not_name_or_number(digests: AdapterDigests, tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "one", b"1" * 100)
    same = make_adapter(tmp_path / "same", b"1" * 100)
    two = make_adapter(tmp_path / "two", b"2" * 100)
    found = [answered(digests.check((str(index),), path)) for index, path in enumerate((one, same, two))]
    assert [check.state for check in found] == [AdapterState.KNOWN] * 3
    assert found[0].digest == found[1].digest != found[2].digest


def test_files_that_change_in_use_make_it_unusable(digests: AdapterDigests, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", b"1" * 100)
    first = answered(digests.check(("a", path), path))
    assert (first.state, first.is_replaced) == (AdapterState.KNOWN, False)
    make_adapter(tmp_path / "a", b"22" * 100)
    for _ in range(2):
        assert answered(digests.check(("a", path), path)).state is AdapterState.UNUSABLE
    # What was decided stays; what it computes from now on is doubtful.
    assert (first.state, first.is_replaced) == (AdapterState.KNOWN, True)


def test_what_the_engine_takes_for_the_same_is_replaced_by_another_folder(
    digests: AdapterDigests, tmp_path: Path
) -> None:
    one, two = make_adapter(tmp_path / "one", b"1"), make_adapter(tmp_path / "two", b"2")
    first = answered(digests.check(("a",), one))
    other = answered(digests.check(("b",), one))
    assert answered(digests.check(("a",), two)).state is AdapterState.UNUSABLE
    assert answered(digests.check(("a",), one)).state is AdapterState.UNUSABLE
    assert (first.is_replaced, other.is_replaced) == (True, False)


def test_a_folder_that_is_not_there_is_unusable(digests: AdapterDigests, tmp_path: Path) -> None:
    assert answered(digests.check(("a",), str(tmp_path / "none"))).state is AdapterState.UNUSABLE


@pytest.mark.usefixtures("hung")
def test_an_adapter_that_is_never_read_is_given_up_in_bounded_time(
    digests: AdapterDigests, clock: ManualClock, tmp_path: Path
) -> None:
    stuck = digests.check(("a",), make_adapter(tmp_path / "a", b"1"))
    behind = digests.check(("b",), make_adapter(tmp_path / "b", b"2"))
    clock.advance(BOUND_S)
    assert {stuck.state, behind.state} == {AdapterState.READING}
    clock.advance(0.1)
    assert {stuck.state, behind.state} == {AdapterState.UNUSABLE}


def test_a_late_answer_changes_nothing() -> None:
    clock = ManualClock()
    check = AdapterCheck(clock, BOUND_S)
    clock.advance(BOUND_S + 0.1)
    assert check.state is AdapterState.UNUSABLE
    check.accept(Adapter("", (), b"d" * 32))
    assert check.state is AdapterState.UNUSABLE


def test_more_questions_than_may_wait_are_refused(
    hung: threading.Event, digests: AdapterDigests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "CHECKS_MAX", 1)
    path = make_adapter(tmp_path / "a", b"1")
    checks = [digests.check((str(index),), path) for index in range(4)]
    assert checks[-1].state is AdapterState.UNUSABLE
    hung.set()
    assert answered(checks[0]).state is AdapterState.KNOWN
