"""Framing and the disk store through any history, with a model that knows nothing of either.

The model is a dictionary: for each name the bytes that its file must have. It is told of every put
and of all that is done to the files behind the store's back. Then whatever opens must be what was put
under this very name, bit for bit; all else is absent or refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstow.clock import ManualClock
from kvstow.errors import CorruptFrameError, NoSpaceError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.stores.base import FrameName
from kvstow.stores.disk import DiskRoot, DiskStore
from kvstow.stores.framing import FrameIdentity, FrameKind, open_frame, payload_of, seal
from kvstow.testing.samples import blank_frame, sample_name, sample_payload

PAYLOAD_BYTES = 5000
FRAME_BYTES = 4096 + 8192
RANK = Rank(0)
NAMESPACES = (NamespaceDigest(b"\1" * 32), NamespaceDigest(b"\2" * 32))

NAMES_MAX = 5
NAMES = st.integers(0, NAMES_MAX - 1)
VERSIONS = st.integers(0, 2)
RECOUNT_PAUSE_S = 60.0
# From one frame to more than both namespaces have; never a whole number of frames.
BUDGETS = st.integers(1, 12).map(lambda frames: frames * FRAME_BYTES + 100)


def identity(namespace: NamespaceDigest, name: FrameName) -> FrameIdentity:
    return FrameIdentity(FrameKind.CHUNK, name.key, namespace, RANK, PAYLOAD_BYTES)


@dataclass
class File:
    """What the model knows of one file: its bytes now, and when it was last put or read."""

    content: bytes
    touched_s: float


class DiskMachine(RuleBasedStateMachine):
    """One folder, one rank, and two namespaces that take turns on it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvstow-disk-machine-"))
        self.clock = ManualClock(1000.0)
        self.files: dict[tuple[NamespaceDigest, int], File] = {}
        # All that was ever put under a name, with the payload's version: what a file may hold and open.
        self.put_before: dict[tuple[NamespaceDigest, int], dict[bytes, int]] = defaultdict(dict)

    # ---- the store's own verbs -------------------------------------------------------------

    @initialize(budget_bytes=BUDGETS)
    def begin(self, budget_bytes: int) -> None:
        self._open(NAMESPACES[0], budget_bytes)

    @rule(versions=st.lists(VERSIONS, min_size=NAMES_MAX, max_size=NAMES_MAX))
    def put_all(self, versions: list[int]) -> None:
        for index, version in enumerate(versions):
            self.put(index, version)

    @rule(index=NAMES, version=VERSIONS)
    def put(self, index: int, version: int) -> None:
        name, at = sample_name(index), (self.namespace, index)
        self.clock.advance(1.0)
        frame = blank_frame(PAYLOAD_BYTES)
        payload_of(frame, PAYLOAD_BYTES)[:] = sample_payload(name, PAYLOAD_BYTES, version)
        seal(frame, identity(self.namespace, name))
        if self._make_room():
            self.store.put(name, frame)
            self.files[at] = File(bytes(frame), self._now())
            self.put_before[at][bytes(frame)] = version
        else:
            with pytest.raises(NoSpaceError):
                self.store.put(name, frame)

    @rule(index=NAMES)
    def get(self, index: int) -> None:
        self._check_get(index)

    @rule(index=NAMES)
    def contains(self, index: int) -> None:
        assert self.store.contains(sample_name(index)) == ((self.namespace, index) in self.files)

    @rule(indices=st.lists(NAMES, max_size=2))
    def remove(self, indices: list[int]) -> None:
        self.store.remove(sample_name(index) for index in indices)
        for index in indices:
            self.files.pop((self.namespace, index), None)

    @rule(budget_bytes=BUDGETS)
    def reopen(self, budget_bytes: int) -> None:
        self.store.close()
        self._open(self.namespace, budget_bytes)

    @rule(budget_bytes=BUDGETS)
    def change_model(self, budget_bytes: int) -> None:
        self.store.close()
        self._open(self._other(), budget_bytes)

    @rule(by_s=st.sampled_from([RECOUNT_PAUSE_S / 2, RECOUNT_PAUSE_S]))
    def wait(self, by_s: float) -> None:
        self.clock.advance(by_s)

    # ---- what others do to the files -------------------------------------------------------

    def mine(self) -> list[int]:
        """Names whose files the store in use has."""
        return sorted(index for namespace, index in self.files if namespace == self.namespace)

    @precondition(mine)
    @rule(data=st.data(), place=st.integers(0, FRAME_BYTES - 1), bit=st.integers(0, 7))
    def flip(self, data: st.DataObject, place: int, bit: int) -> None:
        index = data.draw(st.sampled_from(self.mine()))
        content = bytearray(self.files[self.namespace, index].content)
        if place < len(content):
            content[place] ^= 1 << bit
            self._overwrite(index, bytes(content))

    @precondition(mine)
    @rule(data=st.data(), size=st.integers(0, FRAME_BYTES) | st.sampled_from([0, 4096, 8192]))
    def truncate(self, data: st.DataObject, size: int) -> None:
        index = data.draw(st.sampled_from(self.mine()))
        self._overwrite(index, self.files[self.namespace, index].content[:size])

    @precondition(mine)
    @rule(data=st.data(), tail=st.sampled_from([1, 512, 4096]))
    def extend(self, data: st.DataObject, tail: int) -> None:
        index = data.draw(st.sampled_from(self.mine()))
        self._overwrite(index, self.files[self.namespace, index].content + bytes(tail))

    @precondition(mine)
    @rule(data=st.data(), cut=st.integers(0, FRAME_BYTES // 512))
    def tear(self, data: st.DataObject, cut: int) -> None:
        index = data.draw(st.sampled_from(self.mine()))
        content = self.files[self.namespace, index].content
        self._overwrite(index, content[: cut * 512].ljust(len(content), b"\0"))

    @precondition(lambda self: len(self.mine()) > 1)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        first, second = data.draw(st.permutations(self.mine()))[:2]
        contents = [self.files[self.namespace, index].content for index in (first, second)]
        self._overwrite(first, contents[1])
        self._overwrite(second, contents[0])

    def in_both(self) -> list[int]:
        """Names whose files both namespaces have."""
        return [index for index in self.mine() if (self._other(), index) in self.files]

    @precondition(in_both)
    @rule(data=st.data())
    def bring_from_another_model(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.in_both()))
        self._overwrite(index, self.files[self._other(), index].content)

    @precondition(mine)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.mine()))
        self._path(self.namespace, index).unlink()
        self.drift_bytes += len(self.files.pop((self.namespace, index)).content)

    @precondition(mine)
    @rule(data=st.data(), size=st.integers(0, FRAME_BYTES))
    def leave_a_draft(self, data: st.DataObject, size: int) -> None:
        folder = self._path(self.namespace, data.draw(st.sampled_from(self.mine()))).parent
        (folder / f".draft-1-{size}").write_bytes(bytes(size))

    # ---- what must hold --------------------------------------------------------------------

    @invariant()
    def a_scan_lists_the_files_of_this_namespace(self) -> None:
        found = {stored.ref.index: (stored.size_bytes, stored.touched_s) for stored in self.store.scan()}
        assert found == {
            index: (len(file.content), file.touched_s)
            for (namespace, index), file in self.files.items()
            if namespace == self.namespace
        }

    @invariant()
    def every_file_has_the_models_bytes_and_no_other_is_there(self) -> None:
        on_disk = sorted(path.read_bytes() for path in self._frames())
        assert on_disk == sorted(file.content for file in self.files.values())

    @invariant()
    def what_is_used_is_counted_and_within_the_budget(self) -> None:
        on_disk = sum(path.stat().st_size for path in self._frames())
        # What others do to files is found out at the next start, or when there is no room otherwise.
        assert self.store.used_bytes == on_disk + self.drift_bytes
        assert self.store.used_bytes <= max(self.budget_bytes, self.used_at_count)

    def teardown(self) -> None:
        self.store.close()
        for namespace in NAMESPACES:
            self._open(namespace, 1 << 30)
            assert self.store.used_bytes == sum(len(file.content) for file in self.files.values())
            for index in range(NAMES_MAX):
                self._check_get(index)
            self.store.close()
        assert not list(self.folder.rglob(".draft-*"))
        shutil.rmtree(self.folder)

    # ---- the model -------------------------------------------------------------------------

    def _open(self, namespace: NamespaceDigest, budget_bytes: int) -> None:
        root = DiskRoot.open(
            self.folder,
            instance="ours",
            rank=RANK,
            world_size=1,
            budget_bytes=budget_bytes,
            clock=self.clock,
        )
        self.store = DiskStore(root, namespace)
        self.namespace, self.budget_bytes, self.drift_bytes = namespace, budget_bytes, 0
        while self._used() > budget_bytes and self._evict_other_namespace():
            pass
        self._note_count()

    def _note_count(self) -> None:
        # Frames in use are the directory's to evict, also those over a budget that has shrunk.
        self.used_at_count, self.counted_s = self._used(), self.clock.monotonic_s()

    def _make_room(self) -> bool:
        """Whether one more frame fits, without the oldest frames of the other namespace."""
        while self._used() + FRAME_BYTES > self.budget_bytes:
            if self._evict_other_namespace():
                continue
            if self.clock.monotonic_s() - self.counted_s < RECOUNT_PAUSE_S:
                return False
            self.drift_bytes = 0
            self._note_count()
        return True

    def _evict_other_namespace(self) -> bool:
        others = [(file.touched_s, at) for at, file in self.files.items() if at[0] != self.namespace]
        if others:
            del self.files[min(others)[1]]
        return bool(others)

    def _used(self) -> int:
        return sum(len(file.content) for file in self.files.values()) + self.drift_bytes

    def _check_get(self, index: int) -> None:
        """Get a frame and open it: exactly what was put, a miss, or refused."""
        # No two files are touched at once: which of them goes first would be anybody's guess.
        self.clock.advance(1.0)
        name, target = sample_name(index), blank_frame(PAYLOAD_BYTES)
        file = self.files.get((self.namespace, index))
        if file is None:
            assert self.store.get_into(name, target) is False
            assert target == blank_frame(PAYLOAD_BYTES)
        elif len(file.content) != FRAME_BYTES:
            with pytest.raises(CorruptFrameError):
                self.store.get_into(name, target)
        else:
            assert self.store.get_into(name, target)
            file.touched_s = self._now()
            assert target == file.content
            version = self.put_before[self.namespace, index].get(file.content)
            if version is not None:
                payload = open_frame(target, identity(self.namespace, name))
                assert payload == sample_payload(name, PAYLOAD_BYTES, version)
            else:
                with pytest.raises(CorruptFrameError):
                    open_frame(target, identity(self.namespace, name))

    def _overwrite(self, index: int, content: bytes) -> None:
        """Give a file other bytes, as a bad disk does: without a trace in its times."""
        file, path = self.files[self.namespace, index], self._path(self.namespace, index)
        path.write_bytes(content)
        os.utime(path, (file.touched_s, file.touched_s))
        self.drift_bytes += len(file.content) - len(content)
        file.content = content
        self._check_get(index)

    def _path(self, namespace: NamespaceDigest, index: int) -> Path:
        (path,) = (self.folder / namespace.hex()[:32]).rglob(f"{index}-*")
        return path

    def _frames(self) -> Iterable[Path]:
        return (path for path in self.folder.rglob("*-*") if path.is_file() and path.name[0] != ".")

    def _other(self) -> NamespaceDigest:
        return NAMESPACES[self.namespace is NAMESPACES[0]]

    def _now(self) -> float:
        return self.clock.wall_s()


TestDiskMachine = pytest.mark.slow(DiskMachine.TestCase)
TestDiskMachine.settings = settings(
    settings.get_profile("kvstow"),
    max_examples=100,
    stateful_step_count=40,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
