"""The engine contract finds what it is there to find: adapters that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sim_engine import SimEngine, WatchedLife, world_of

from kvstow.errors import KvstowError
from kvstow.keys.chain import TokenChain
from kvstow.lifecycle.requests import Lookup, Match
from kvstow.testing.engine_client import Client
from kvstow.testing.engine_contract import EngineContract
from kvstow.testing.engine_under_test import Tokens
from kvstow.testing.sim.scenario import Scenario


class Contract(EngineContract):
    """The tests alone, to be called by hand."""

    __test__ = False


class NeverLoads(SimEngine):
    """A cache that never hits."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        life.planner.match = lambda *_: Match(Lookup.MISS, 0)
        return life


class WantsEveryToken(SimEngine):
    """Asks for a load that leaves nothing to compute."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        match = life.planner.match
        life.planner.match = lambda request, chunks, known, computed: match(
            request, chunks, known + 1, computed
        )
        return life


class ForgetsSalts(SimEngine):
    """Names chunks by their tokens alone."""

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        super().submit(name, prompt, outputs, salt)
        request = self._requests[name]
        request.chain = TokenChain(self.chunk_tokens)
        request.chain.extend(list(prompt))


class ForgetsParents(SimEngine):
    """Names a chunk by its own tokens, not by those before it."""

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        super().submit(name, prompt, outputs, salt)
        request = self._requests[name]
        size = self.chunk_tokens
        for index in range(len(request.chain.ids)):
            alone = TokenChain(size)
            alone.extend(list(prompt[index * size : (index + 1) * size]))
            request.chain.ids[index] = alone.ids[0]


class FreesEarly(SimEngine):
    """Does not keep the blocks of a request whose save waits."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        finished = life.planner.finished
        life.planner.finished = lambda request: finished(request) and False
        return life


class KeepsChains(SimEngine):
    """Keeps what it knows of an id after the request that had it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.chains: dict[str, TokenChain] = {}
        super().__init__(scenario, folder)

    def submit(self, name: str, prompt: Tokens, outputs: int, salt: str = "") -> None:
        super().submit(name, prompt, outputs, salt)
        request = self._requests[name]
        request.chain = self.chains.setdefault(name, request.chain)


class KeepsPreempted(SimEngine):
    """Does not say that a request lost its blocks."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        life.planner.preempted = lambda _: None
        return life


class LosesABlock(SimEngine):
    """Leaks, once for each abort."""

    def abort(self, name: str) -> None:
        super().abort(name)
        self.life.engine.allocator.pool.take(1)


class BelievesFailures(SimEngine):
    """Takes a load that failed for one that went well."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        for rank in life.ranks:
            poll = rank.worker.poll

            def believing(poll: Callable = poll) -> tuple:
                reports, loads, sent = poll()
                return reports, [(request, True) for request, _ in loads], sent

            rank.worker.poll = believing
        return life


class SavesTooSoon(SimEngine):
    """Says that tokens are computed which are about to be, or never are."""

    def start_life(self) -> WatchedLife:
        life = super().start_life()
        progress = life.planner.progress
        life.planner.progress = lambda request, chunks, computed, blocks: progress(
            request, chunks, computed + 1, blocks
        )
        return life


class LosesItsDisk(SimEngine):
    """Starts over another folder."""

    def restart(self) -> None:
        self.folder = self.folder / "other"
        super().restart()


class GivesUpTheDisk(SimEngine):
    """Never comes back to a disk that failed."""

    def mend_disk(self) -> None:
        self.settle()


Test = Callable[..., None]


@pytest.mark.parametrize(
    ("broken", "test", "arguments"),
    [
        (NeverLoads, Contract.test_a_reload_says_what_the_cold_run_and_the_own_hit_say, ()),
        (WantsEveryToken, Contract.test_a_prompt_that_ends_on_a_boundary_leaves_a_token, (3,)),
        (ForgetsSalts, Contract.test_salts_never_meet_and_identical_requests_do, ()),
        (ForgetsParents, Contract.test_a_chunk_is_known_by_all_that_comes_before_it, ()),
        (FreesEarly, Contract.test_blocks_are_kept_for_a_save_that_waits, ()),
        (KeepsChains, Contract.test_an_id_used_again_is_a_new_request, ("said",)),
        (KeepsChains, Contract.test_an_id_used_again_is_a_new_request, ("aborted during a load",)),
        (KeepsPreempted, Contract.test_blocks_that_were_taken_away_are_not_saved, ()),
        (LosesABlock, Contract.test_an_abort_in_the_queue, ()),
        (LosesABlock, Contract.test_an_abort_during_a_load, ()),
        (BelievesFailures, Contract.test_damaged_frames_are_recomputed_and_replaced, ()),
        (
            BelievesFailures,
            Contract.test_a_broken_disk_is_recomputed_and_a_mended_one_is_used_again,
            (),
        ),
        (SavesTooSoon, Contract.test_a_conversation_goes_on_from_what_was_said, ()),
        (LosesItsDisk, Contract.test_what_was_saved_outlives_a_restart, ()),
        (
            GivesUpTheDisk,
            Contract.test_a_broken_disk_is_recomputed_and_a_mended_one_is_used_again,
            (),
        ),
    ],
)
def test_an_adapter_that_is_wrong_fails(
    tmp_path: Path, broken: type[SimEngine], test: Test, arguments: tuple[object, ...]
) -> None:
    run(SimEngine, tmp_path / "right", test, arguments)
    with pytest.raises((AssertionError, KvstowError)):
        run(broken, tmp_path / "wrong", test, arguments)


def run(kind: type[SimEngine], folder: Path, test: Test, arguments: tuple[object, ...]) -> None:
    engine = kind(world_of("dense", 1), folder)
    try:
        client = Client(engine, "by hand")
        test(Contract(), client, *arguments)
        client.expect_baseline()
    finally:
        engine.life.kill()
