"""The disk store by its front door, on whatever file system pytest's folder is."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_folders import FRAME_BYTES, OLD_NAMESPACE, files_under, fill, held, open_store, stored_file, without
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.clock import ManualClock
from kvstow.errors import CorruptFrameError, NoSpaceError, StoreUnavailableError
from kvstow.keys.ids import Rank
from kvstow.stores.base import FrameName, Store
from kvstow.stores.disk import DiskStore
from kvstow.stores.framing import HEADER_BYTES
from kvstow.testing.samples import (
    blank_frame,
    opened,
    sample_frame,
    sample_name,
    sample_payload,
)
from kvstow.testing.store_contract import StoreContract


@pytest.fixture(params=["all abilities", "no unnamed files", "no O_DIRECT", "O_DIRECT fails late"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that can do less than the one under the tests."""
    real_write, real_read = os.pwrite, os.preadv

    def refuse_direct(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")

    def write(descriptor: int, content: memoryview, offset: int) -> int:
        refuse_direct(descriptor)
        return real_write(descriptor, content, offset)

    def read(descriptor: int, targets: list[memoryview], offset: int) -> int:
        refuse_direct(descriptor)
        return real_read(descriptor, targets, offset)

    if request.param == "no unnamed files":
        monkeypatch.setattr(os, "open", without(os.O_TMPFILE, errno.EOPNOTSUPP))
    elif request.param == "no O_DIRECT":
        monkeypatch.setattr(os, "open", without(os.O_DIRECT, errno.EINVAL))
    elif request.param == "O_DIRECT fails late":
        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "preadv", read)
    return str(request.param)


class TestDiskStoreContract(StoreContract):
    budget_frames = 64

    def damage(self, store: Store, name: FrameName, content: bytes) -> None:
        assert isinstance(store, DiskStore)
        stored_file(Path(store.root.path), name.ref.index).write_bytes(content)

    @pytest.fixture
    def store(self, tmp_path: Path, file_system: str) -> Iterator[Store]:
        store = open_store(tmp_path, budget_bytes=self.budget_frames * FRAME_BYTES)
        yield store
        store.close()
        assert not [name for name in files_under(tmp_path) if name.startswith(".")]


# What is stored may be damaged.


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    store, name, target = open_store(tmp_path), sample_name(0), blank_frame()
    store.put(name, sample_frame(name))
    file = stored_file(tmp_path, 0)
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 1234] ^= 1
    file.write_bytes(content)
    assert store.get_into(name, target)
    with pytest.raises(CorruptFrameError, match="payload checksum"):
        opened(target, name)
    store.close()


@pytest.mark.parametrize("size", [0, 100, FRAME_BYTES - 4096, FRAME_BYTES - 1, FRAME_BYTES + 1])
def test_a_file_of_another_length_is_corrupt_and_can_be_removed(tmp_path: Path, size: int) -> None:
    store, name = open_store(tmp_path), sample_name(0)
    store.put(name, sample_frame(name))
    os.truncate(stored_file(tmp_path, 0), size)
    with pytest.raises(CorruptFrameError, match=f"{size} bytes on disk .* {FRAME_BYTES} wanted"):
        store.get_into(name, blank_frame())
    store.remove([name])
    assert not store.get_into(name, blank_frame())
    store.close()


def test_two_swapped_files_are_found(tmp_path: Path) -> None:
    store, target = open_store(tmp_path), blank_frame()
    fill(store, range(2))
    first, second, aside = stored_file(tmp_path, 0), stored_file(tmp_path, 1), tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    for index in range(2):
        assert store.get_into(sample_name(index), target)
        with pytest.raises(CorruptFrameError, match=r"^key: "):
            opened(target, sample_name(index))
    store.close()


def test_foreign_files_are_counted_and_neither_listed_nor_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(1))
    store.close()
    folder = stored_file(tmp_path, 0).parent
    (folder / "notes.txt").write_text("mine")
    (folder / "1-aa-bb").write_text("mine")
    (tmp_path / "README").write_text("mine")
    (tmp_path / "other folder").mkdir()
    store = open_store(tmp_path)
    assert held(store) == [0]
    assert store.used_bytes == FRAME_BYTES + 8
    store.close()
    assert {name for name in files_under(tmp_path) if not name.startswith("0-")} == {
        "notes.txt",
        "1-aa-bb",
        "README",
    }


def test_files_and_folders_are_the_owners_only(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    store = open_store(root)
    fill(store, range(1))
    modes = {oct(path.stat().st_mode & 0o777) for path in [root, *root.rglob("*")] if path.is_dir()}
    assert modes == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in root.rglob("*") if path.is_file()} == {"0o600"}
    store.close()


# The device may fail.


def test_short_writes_and_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    store, name, target = open_store(tmp_path), sample_name(0), blank_frame()
    # 5000 is no multiple of a sector: O_DIRECT cannot go on from there.
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[: 4096 if at else 5000], at))
    monkeypatch.setattr(
        os, "preadv", lambda fd, into, at: real_read(fd, [into[0][: 4096 if at else 5000]], at)
    )
    store.put(name, sample_frame(name))
    assert store.get_into(name, target)
    assert opened(target, name) == sample_payload(name)
    store.close()


def test_a_write_that_the_system_cuts_off_leaves_nothing(tmp_path: Path) -> None:
    store, name = open_store(tmp_path), sample_name(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FRAME_BYTES // 2, hard))
    try:
        with pytest.raises(StoreUnavailableError, match=f"put of {FRAME_BYTES} bytes .* EFBIG"):
            store.put(name, sample_frame(name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.used_bytes == 0
    assert files_under(tmp_path) == {}
    store.close()


@pytest.mark.parametrize("call", ["pwrite", "link", "utime"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EIO, StoreUnavailableError),
        (errno.EROFS, StoreUnavailableError),
        (errno.EACCES, StoreUnavailableError),
    ],
)
def test_a_failed_put_keeps_the_older_frame_and_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, error: type[Exception]
) -> None:
    store, name, target = open_store(tmp_path), sample_name(0), blank_frame()
    store.put(name, sample_frame(name, version=1))

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(error, match=f"put of {FRAME_BYTES} bytes at .*: {errno.errorcode[code]}"):
        store.put(name, sample_frame(name, version=2))
    monkeypatch.undo()
    assert store.used_bytes == FRAME_BYTES
    assert list(files_under(tmp_path).values()) == [FRAME_BYTES]
    assert store.get_into(name, target)
    assert opened(target, name) == sample_payload(name, version=1)
    store.close()


def test_a_read_that_fails_is_not_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = open_store(tmp_path), sample_name(0)
    store.put(name, sample_frame(name))

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreUnavailableError, match="EIO"):
        store.get_into(name, blank_frame())
    store.close()


def test_a_read_serves_when_the_time_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name, target = open_store(tmp_path), sample_name(0), blank_frame()
    store.put(name, sample_frame(name))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "utime", fail)
    assert store.get_into(name, target)
    assert opened(target, name) == sample_payload(name)
    store.close()


def test_a_full_disk_is_no_space_and_serves_on(small_disk: Path) -> None:
    store = open_store(small_disk)
    with pytest.raises(NoSpaceError, match="the file system is full below the budget"):
        fill(store, range(100))
    stored = held(store)
    assert len(stored) >= 8
    assert store.used_bytes == sum(files_under(small_disk).values()) == len(stored) * FRAME_BYTES
    store.close()
    # A full disk can be opened, read and made room on.
    store, target = open_store(small_disk), blank_frame()
    assert store.get_into(sample_name(3), target)
    assert opened(target, sample_name(3)) == sample_payload(sample_name(3))
    store.remove([sample_name(0), sample_name(1)])
    fill(store, range(200, 201))
    store.close()


def test_a_read_only_disk_is_unavailable(read_only_disk: Path) -> None:
    with pytest.raises(StoreUnavailableError, match=f"open disk root at {read_only_disk}.*EROFS"):
        open_store(read_only_disk)


def test_a_file_in_place_of_a_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match=r"file: EEXIST"):
        open_store(tmp_path / "file")
    with pytest.raises(StoreUnavailableError, match=r"file/root: ENOTDIR"):
        open_store(tmp_path / "file" / "root")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store, name = open_store(tmp_path), sample_name(0)
    store.close()
    for use in (
        lambda: store.put(name, sample_frame(name)),
        lambda: store.get_into(name, blank_frame()),
        lambda: store.contains(name),
        lambda: store.remove([name]),
        lambda: list(store.scan()),
    ):
        with pytest.raises(StoreUnavailableError, match="is closed"):
            use()


# The budget is hard.


def test_the_budget_holds_across_restarts(tmp_path: Path) -> None:
    budget = 3 * FRAME_BYTES
    store = open_store(tmp_path, budget_bytes=budget)
    fill(store, range(3))
    with pytest.raises(NoSpaceError, match=f"{budget} of {budget} bytes used, {FRAME_BYTES} more wanted"):
        fill(store, range(3, 4))
    store.close()
    store = open_store(tmp_path, budget_bytes=budget)
    assert store.used_bytes == budget
    with pytest.raises(NoSpaceError):
        fill(store, range(3, 4))
    store.remove([sample_name(1)])
    fill(store, range(3, 4))
    assert held(store) == [0, 2, 3]
    store.close()


def test_writers_together_do_not_pass_the_budget(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=10 * FRAME_BYTES)

    def try_put(index: int) -> bool:
        try:
            fill(store, range(index, index + 1))
        except NoSpaceError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        stored = sum(threads.map(try_put, range(40)))
    assert stored == len(held(store)) == 10
    assert store.used_bytes == 10 * FRAME_BYTES
    store.close()


def test_replacing_counts_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=2 * FRAME_BYTES)
    for _ in range(5):
        fill(store, range(1))
    assert store.used_bytes == FRAME_BYTES
    store.close()


def test_puts_and_removes_of_one_name_keep_the_count(tmp_path: Path) -> None:
    store, name, frame = open_store(tmp_path), sample_name(0), sample_frame(sample_name(0))

    def churn(_: int) -> None:
        for _ in range(50):
            store.put(name, frame)
            store.remove([name])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(churn, range(4)))
    assert store.used_bytes == sum(files_under(tmp_path).values())
    store.close()


def test_other_namespaces_go_first_and_the_oldest_of_them(tmp_path: Path) -> None:
    clock, budget = ManualClock(1000.0), 4 * FRAME_BYTES
    old = open_store(tmp_path, namespace=OLD_NAMESPACE, budget_bytes=budget, clock=clock)
    for index in range(4):
        fill(old, range(index, index + 1))
        clock.advance(10.0)
    # Reading makes the first the youngest.
    assert old.get_into(sample_name(0), blank_frame())
    old.close()
    store = open_store(tmp_path, budget_bytes=budget, clock=clock)
    assert held(store) == []
    assert store.used_bytes == budget
    left = []
    for index in range(10, 14):
        fill(store, range(index, index + 1))
        left.append(sorted(int(name.partition("-")[0]) for name in files_under(tmp_path)))
    assert left == [[0, 2, 3, 10], [0, 3, 10, 11], [0, 10, 11, 12], [10, 11, 12, 13]]
    assert not (tmp_path / OLD_NAMESPACE.hex()[:32]).exists()
    with pytest.raises(NoSpaceError):
        fill(store, range(14, 15))
    assert held(store) == [10, 11, 12, 13]
    store.close()


def test_a_smaller_budget_trims_other_namespaces_at_start(tmp_path: Path) -> None:
    old = open_store(tmp_path, namespace=OLD_NAMESPACE)
    fill(old, range(5))
    old.close()
    store = open_store(tmp_path, budget_bytes=2 * FRAME_BYTES)
    assert store.used_bytes == sum(files_under(tmp_path).values()) == 2 * FRAME_BYTES
    store.close()


def test_ranks_have_shares_of_their_own(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, rank=Rank(r), world_size=2, budget_bytes=FRAME_BYTES) for r in range(2)]
    fill(stores[0], range(1))
    assert held(stores[1]) == []
    fill(stores[1], range(5, 6))
    assert [held(store) for store in stores] == [[0], [5]]
    for store in stores:
        store.close()


def test_shares_of_ranks_that_are_no_more_are_counted_and_go_first(tmp_path: Path) -> None:
    large = open_store(tmp_path, rank=Rank(3), world_size=4)
    fill(large, range(2))
    large.close()
    stores = [
        open_store(tmp_path, rank=Rank(r), world_size=2, budget_bytes=2 * FRAME_BYTES) for r in range(2)
    ]
    assert [store.used_bytes for store in stores] == [0, 2 * FRAME_BYTES]
    fill(stores[1], range(10, 12))
    assert len(files_under(tmp_path)) == 2
    for store in stores:
        store.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove", "get", "reopen"]), st.integers(0, 5)), max_size=25)
)
def test_any_history_agrees_with_a_dictionary(tmp_path: Path, history: list[tuple[str, int]]) -> None:
    budget = 4 * FRAME_BYTES
    store = open_store(tmp_path, budget_bytes=budget)
    store.remove([sample_name(index) for index in held(store)])
    model: set[int] = set()
    for verb, index in history:
        name = sample_name(index)
        if verb == "put" and len(model) < 4:
            store.put(name, sample_frame(name))
            model.add(index)
        elif verb == "put":
            with pytest.raises(NoSpaceError):
                store.put(name, sample_frame(name))
        elif verb == "remove":
            store.remove([name])
            model.discard(index)
        elif verb == "get":
            assert store.get_into(name, blank_frame()) == store.contains(name) == (index in model)
        else:
            store.close()
            store = open_store(tmp_path, budget_bytes=budget)
        assert held(store) == sorted(model)
        assert store.used_bytes == len(model) * FRAME_BYTES
    store.close()


@pytest.mark.slow
def test_a_hundred_thousand_files_are_found_quickly_at_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(1))
    share = stored_file(tmp_path, 0).parent.parent
    for fan in range(256):
        (share / f"{fan:02x}").mkdir(mode=0o700, exist_ok=True)
    for number in range(99_999):
        fan = number % 256
        os.close(os.open(share / f"{fan:02x}" / f"{number}-{fan:02x}{number:062x}-{0:064x}", os.O_CREAT))
    store.close()
    before = os.times()
    store = open_store(tmp_path)
    assert sum(1 for _ in store.scan()) == 100_000
    after = os.times()
    assert after.user + after.system - before.user - before.system < 3.0
    store.close()
    # pytest keeps the folders of its last runs.
    shutil.rmtree(share)
