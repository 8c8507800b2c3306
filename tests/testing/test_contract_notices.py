"""The store contract finds what it is there to find: stores that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from kvstow.clock import ManualClock
from kvstow.errors import CorruptFrameError, StoreUnavailableError
from kvstow.keys.ids import ChunkRef
from kvstow.stores.base import FrameName, StoredFrame
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.samples import PAYLOAD_BYTES
from kvstow.testing.store_contract import FRAME_BYTES, StoreContract

FRAMES = 64


class Contract(StoreContract):
    """The tests alone, to be called by hand."""

    __test__ = False
    budget_frames = FRAMES


class Plain(MemoryStore):
    """Right in every way."""

    def __init__(self) -> None:
        super().__init__(FRAMES * FRAME_BYTES, ManualClock())


class KeepsReferences(Plain):
    """Copies what it was given only when it is asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[ChunkRef, tuple[FrameName, memoryview]] = {}

    def put(self, name: FrameName, frame: memoryview) -> None:
        super().put(name, frame)
        self.given[name.ref] = (name, frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        if name.ref in self.given:
            super().put(*self.given[name.ref])
        return super().get_into(name, target)


class ForgetsGroups(Plain):
    """Takes the same chunk of two groups for one."""

    @staticmethod
    def merged(name: FrameName) -> FrameName:
        ref = name.ref
        return FrameName(name.key, ChunkRef(0, ref.index, ref.chunk, ref.parent))

    def put(self, name: FrameName, frame: memoryview) -> None:
        super().put(self.merged(name), frame)

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        return super().get_into(self.merged(name), target)


class ClearsTargets(Plain):
    """Touches the target of a frame that is absent."""

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        target[:] = b"\xff" * len(target)
        return super().get_into(name, target)


class TakesAnyLength(Plain):
    """Fills as much as fits."""

    def get_into(self, name: FrameName, target: memoryview) -> bool:
        whole = memoryview(bytearray(FRAME_BYTES))
        try:
            found = super().get_into(name, whole)
        except CorruptFrameError:
            return True
        fits = min(len(whole), len(target))
        target[:fits] = whole[:fits]
        return found


class RefusesAbsentNames(Plain):
    """Raises about an absent name in a remove."""

    def remove(self, names: Iterable[FrameName]) -> None:
        for name in names:
            if not self.contains(name):
                raise StoreUnavailableError("absent")
            super().remove([name])


class SoftBudget(Plain):
    """Takes one more than its budget."""

    def __init__(self) -> None:
        MemoryStore.__init__(self, (FRAMES + 1) * FRAME_BYTES, ManualClock())


class LosesTheOldOnFailure(Plain):
    """Makes room for a frame that it then cannot take."""

    def put(self, name: FrameName, frame: memoryview) -> None:
        if self.used_bytes + len(frame) > FRAMES * FRAME_BYTES:
            oldest = next(iter(self.scan()))
            self.remove([FrameName(name.key, oldest.ref)])
        super().put(name, frame)


class ListsGhosts(Plain):
    """Lists what was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: list[StoredFrame] = []

    def remove(self, names: Iterable[FrameName]) -> None:
        listed = list(names)
        self.ghosts += [StoredFrame(name.ref, FRAME_BYTES, 0.0) for name in listed]
        super().remove(listed)

    def scan(self) -> Iterator[StoredFrame]:
        yield from super().scan()
        yield from self.ghosts


Test = Callable[..., None]


@pytest.mark.parametrize(
    ("broken", "test", "arguments"),
    [
        (KeepsReferences, Contract.test_put_keeps_no_reference_to_the_callers_buffer, ()),
        (ForgetsGroups, Contract.test_names_that_differ_in_one_part_are_apart, ()),
        (ClearsTargets, Contract.test_an_absent_frame_is_a_value_and_leaves_the_target_alone, ()),
        (TakesAnyLength, Contract.test_another_length_than_stored_is_corrupt, (PAYLOAD_BYTES + 4096,)),
        (RefusesAbsentNames, Contract.test_remove_takes_many_and_absent_ones, ()),
        (SoftBudget, Contract.test_a_full_store_says_so_and_keeps_what_it_has, ()),
        (SoftBudget, Contract.test_threads_together_do_not_pass_the_budget, ()),
        (LosesTheOldOnFailure, Contract.test_a_full_store_says_so_and_keeps_what_it_has, ()),
        (ListsGhosts, Contract.test_scan_gives_every_reference_and_size, ()),
        (ListsGhosts, Contract.test_readers_of_a_frame_that_is_removed_see_all_of_it_or_nothing, ()),
    ],
)
def test_a_store_that_is_wrong_fails(broken: type[Plain], test: Test, arguments: tuple[int, ...]) -> None:
    test(Contract(), Plain(), *arguments)
    with pytest.raises((AssertionError, CorruptFrameError, StoreUnavailableError, pytest.fail.Exception)):
        test(Contract(), broken(), *arguments)
