"""The disk store among processes: who may use a root, and what a killed writer leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstow.clock import ManualClock
from kvstow.errors import InvariantError, StoreUnavailableError
from kvstow.keys.ids import Rank
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.stores.framing import open_frame
from kvstow.testing.samples import (
    NAMESPACE,
    blank_frame,
    opened,
    sample_frame,
    sample_identity,
    sample_name,
    sample_payload,
)

if TYPE_CHECKING:
    from conftest import Child, Fork, Say

KILLS = 20
BIG_BYTES = 1 << 20


def claim(path: Path, instance: str, rank: int = 0) -> DiskRoot:
    return DiskRoot.open(
        path,
        instance=instance,
        rank=Rank(rank),
        world_size=2,
        budget_bytes=1 << 32,
        clock=ManualClock(),
    )


def holder(fork: Fork, path: Path, instance: str, rank: int = 0) -> Child:
    """A child that has claimed a rank and lives until it is killed."""

    def work(say: Say) -> None:
        claim(path, instance, rank)
        say(b"+")
        signal.pause()

    child = fork(work)
    assert child.hear(1) == b"+"
    return child


def drafts_under(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.name.startswith(".")]


def test_another_engine_is_refused_and_told_who_holds_the_root(tmp_path: Path, fork: Fork) -> None:
    child = holder(fork, tmp_path, "theirs", rank=1)
    with pytest.raises(StoreUnavailableError, match=rf"'theirs', rank 1, pid {child.pid} .* root of its own"):
        claim(tmp_path, "ours")


def test_a_root_is_free_once_its_holder_was_killed(tmp_path: Path, fork: Fork) -> None:
    holder(fork, tmp_path, "theirs").kill()
    claim(tmp_path, "ours").close()


def test_ranks_of_one_engine_share_a_root(tmp_path: Path, fork: Fork) -> None:
    child = holder(fork, tmp_path, "ours", rank=1)
    root = claim(tmp_path, "ours", rank=0)
    with pytest.raises(StoreUnavailableError, match=f"'ours', rank 1, pid {child.pid}"):
        claim(tmp_path, "ours", rank=1)
    child.kill()
    claim(tmp_path, "ours", rank=1).close()
    root.close()


def test_a_root_stays_held_while_one_rank_lives(tmp_path: Path, fork: Fork) -> None:
    first, second = (holder(fork, tmp_path, "theirs", rank) for rank in range(2))
    first.kill()
    with pytest.raises(StoreUnavailableError, match=f"rank 1, pid {second.pid}"):
        claim(tmp_path, "ours")
    second.kill()
    claim(tmp_path, "ours").close()


def test_close_frees_the_root_even_if_a_child_was_forked_meanwhile(tmp_path: Path, fork: Fork) -> None:
    root = claim(tmp_path, "ours")
    child = fork(lambda say: (say(b"+"), signal.pause())[1])
    assert child.hear(1) == b"+"
    root.close()
    root.close()
    claim(tmp_path, "another").close()


def test_one_of_many_claimants_wins(tmp_path: Path, fork: Fork) -> None:
    def work_of(instance: str) -> Callable[[Say], None]:
        def work(say: Say) -> None:
            try:
                claim(tmp_path, instance)
            except StoreUnavailableError:
                say(b"-")
            else:
                say(b"+")
            signal.pause()

        return work

    children = [fork(work_of(f"engine {number}")) for number in range(6)]
    assert sorted(child.hear(1) for child in children) == [b"+"] + [b"-"] * 5


def test_a_record_that_was_edited_does_not_open_the_root(tmp_path: Path, fork: Fork) -> None:
    holder(fork, tmp_path, "theirs")
    (tmp_path / "lock.r0").write_bytes(b"{")
    with pytest.raises(StoreUnavailableError, match="held by engine instance 'unknown'"):
        claim(tmp_path, "ours")


def test_a_rank_outside_the_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="rank=2 is not one of world_size=2"):
        claim(tmp_path, "ours", rank=2)


@pytest.mark.slow
def test_a_claimant_that_is_stopped_is_not_waited_for_forever(tmp_path: Path) -> None:
    tmp_path.joinpath("lock").touch()
    with tmp_path.joinpath("lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match="another claim has lasted over 2 s"):
            claim(tmp_path, "ours")


def test_a_killed_writer_leaves_whole_frames_and_nothing_else(tmp_path: Path, fork: Fork) -> None:
    neighbour = tmp_path / "neighbour"
    neighbour.write_bytes(b"not ours")
    store = DiskStore(claim(tmp_path, "ours"), NAMESPACE)
    kept = sample_name(5000)
    store.put(kept, sample_frame(kept))
    store.close()
    for kill in range(KILLS):

        def work(say: Say, kill: int = kill) -> None:
            frames = [sample_frame(sample_name(kill * 100 + index), BIG_BYTES) for index in range(4)]
            store = DiskStore(claim(tmp_path, f"engine {kill}"), NAMESPACE)
            for index, frame in enumerate(frames):
                say(b"+")
                store.put(sample_name(kill * 100 + index), frame)
            signal.pause()

        child = fork(work)
        child.hear(1 + kill % 4)
        child.kill()
        # Before anybody cleans up: an unnamed file goes with its writer.
        assert drafts_under(tmp_path) == []
        store = DiskStore(claim(tmp_path, "ours"), NAMESPACE)
        done = [stored.ref.index for stored in store.scan() if stored.ref.index // 100 == kill]
        assert set(done) >= {kill * 100 + index for index in range(kill % 4)}
        for index in done:
            name, target = sample_name(index), blank_frame(BIG_BYTES)
            assert store.get_into(name, target)
            payload = open_frame(target, sample_identity(name, BIG_BYTES))
            assert payload == sample_payload(name, BIG_BYTES)
        target = blank_frame()
        assert store.get_into(kept, target)
        assert opened(target, kept) == sample_payload(kept)
        store.remove([sample_name(index) for index in done])
        store.close()
    assert neighbour.read_bytes() == b"not ours"


def test_named_drafts_of_a_killed_writer_are_removed_by_the_next(
    tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_rename = os.open, os.rename

    def no_unnamed(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *rest, **more)

    def work(say: Say) -> None:
        store = DiskStore(claim(tmp_path, "theirs"), NAMESPACE)
        store.put(sample_name(0), sample_frame(sample_name(0)))

        def stop(source: str, target: str) -> None:
            say(b"+")
            signal.pause()
            real_rename(source, target)

        os.rename = stop
        store.put(sample_name(1), sample_frame(sample_name(1)))

    monkeypatch.setattr(os, "open", no_unnamed)
    child = fork(work)
    assert child.hear(1) == b"+"
    child.kill()
    assert len(drafts_under(tmp_path)) == 1
    store = DiskStore(claim(tmp_path, "ours"), NAMESPACE)
    assert drafts_under(tmp_path) == []
    assert [stored.ref.index for stored in store.scan()] == [0]
    assert store.used_bytes == len(sample_frame(sample_name(0)))
    store.close()
