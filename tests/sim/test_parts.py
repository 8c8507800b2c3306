"""The simulator's own parts, and that its checks can fail."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from lockstep import Lockstep, scenario_of

from kvstow.clock import ManualClock
from kvstow.layout.geometry import BlockId, GroupId
from kvstow.lifecycle.messages import Fault, RequestId, Tier
from kvstow.metrics import Metric
from kvstow.testing.sim import invariants
from kvstow.testing.sim.clients import Clients
from kvstow.testing.sim.explore import run_scenario, shrink
from kvstow.testing.sim.fibers import FiberExecutor, Fibers
from kvstow.testing.sim.invariants import ViolationError
from kvstow.testing.sim.memory import RankMemory
from kvstow.testing.sim.model import SimModel
from kvstow.testing.sim.oracle import Reading, fold
from kvstow.testing.sim.pool import BlockPool
from kvstow.testing.sim.requests import Prompt
from kvstow.testing.sim.scenario import MODELS, draw_scenario
from kvstow.testing.sim.world import World

GROUP = GroupId(0)


def reading(tokens: list[int], extras: str = "", images: dict[int, str] | None = None) -> Reading:
    made = Reading(extras, images or {})
    made.extend(tokens)
    return made


# ---- the oracle ----------------------------------------------------------------------------


def test_a_tokens_identity_covers_all_before_it_and_what_the_prompt_holds() -> None:
    plain = reading([1, 2, 3]).identities
    assert np.array_equal(plain[:2], reading([1, 2, 9]).identities[:2])
    assert plain[2] != reading([1, 9, 3]).identities[2]
    assert plain[0] != reading([1, 2, 3], "salt").identities[0]
    with_image = reading([1, 2, 3], images={1: "cat"}).identities
    assert with_image[0] == plain[0]
    assert with_image[1] != plain[1]
    assert with_image[2] != reading([1, 2, 3], images={1: "dog"}).identities[2]


def test_twins_differ_in_nothing_but_their_image() -> None:
    clients, rng = Clients(seed=1, documents=1, twins=True), Random(2)
    prompts = {clients.draw(rng, []) for _ in range(60)}
    images = [
        {prompt.image for prompt in prompts if prompt.tokens == tokens}
        for tokens in {prompt.tokens for prompt in prompts}
    ]
    most = max(images, key=len)
    assert {content for _, _, content in most} == {"cat", "dog"}
    assert len({offset for offset, _, _ in most}) == 2
    assert sum(len(of_one) > 1 for of_one in images) > 5
    assert any(draw_scenario(seed).twins for seed in range(20))


def test_no_two_places_of_memory_hold_the_same() -> None:
    model = SimModel(MODELS["all kinds"], 8)
    tokens = reading(list(range(40)))
    frames = [
        RankMemory(model, rank, 4, noise=0).expected_frame(GroupId(group), tokens, first, first + 4)
        for rank in range(2)
        for group in range(3)
        for first in (0, 4, 8)
    ]
    words = b"".join(frames)
    assert len({words[at : at + 8] for at in range(0, len(words), 8)}) == len(words) // 8


def test_the_fold_sees_every_word() -> None:
    words = np.arange(12, dtype=np.uint64).reshape(3, 4)
    for place in np.ndindex(words.shape):
        changed = words.copy()
        changed[place] ^= np.uint64(1 << 40)
        assert fold(changed) != fold(words)


# ---- memory, blocks, fibers ----------------------------------------------------------------


def test_memory_is_wrong_where_a_believed_word_changes_and_only_there() -> None:
    memory = RankMemory(SimModel(MODELS["dense"], 8), 0, 6, noise=1)
    tokens = reading(list(range(12)))
    memory.forward(GROUP, [BlockId(4), BlockId(2), BlockId(5)], tokens, 0, 10)
    assert memory.wrong() == []
    region = memory.region.reshape(6, -1)
    region[3] ^= 1  # nobody's block
    assert memory.wrong() == []
    region[2, 0] ^= 1
    assert memory.wrong() == [2]
    memory.forget([BlockId(2)])
    assert memory.wrong() == []
    assert memory.knows(GROUP, [BlockId(4)], 4)
    assert not memory.knows(GROUP, [BlockId(4), BlockId(2)], 8)


def test_a_block_keeps_its_content_until_it_is_taken_again() -> None:
    pool = BlockPool(3)
    taken = pool.take(2)
    assert taken is not None
    pool.cache((GROUP, 7), taken[0])
    pool.release(taken)
    assert pool.find((GROUP, 7)) == taken[0]
    assert pool.take(4) is None
    assert pool.take(3) is not None
    assert pool.find((GROUP, 7)) is None
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([BlockId(0), BlockId(0)])


def test_a_fiber_that_pauses_lets_others_run_and_goes_on_when_its_time_has_come() -> None:
    clock = ManualClock()
    fibers = Fibers(clock)
    executor = FiberExecutor("readers", fibers, clock, threads=2, queue_max=8)
    told: list[str] = []

    def slow() -> None:
        told.append("slow begins")
        fibers.pause(5.0)
        told.append("slow ends")

    for task in (slow, slow, lambda: told.append("third")):
        assert executor.submit(task)
    executor.run_one()
    executor.run_one()
    assert not executor.can_run  # both threads are taken
    clock.advance(5.0)
    while executor.can_run:
        executor.run_one()
    assert told == ["slow begins", "slow begins", "slow ends", "slow ends", "third"]
    assert executor.is_idle


def test_a_killed_fiber_does_nothing_more() -> None:
    clock = ManualClock()
    fibers = Fibers(clock)
    executor = FiberExecutor("writer", fibers, clock, threads=1, queue_max=8)
    told: list[str] = []

    def slow() -> None:
        try:
            fibers.pause(5.0)
        except Exception:
            told.append("nobody may handle it")
            raise
        told.append("went on")

    executor.submit(slow)
    executor.run_one()
    executor.kill()
    clock.advance(10.0)
    assert not executor.can_run
    assert not executor.submit(slow)
    assert told == []


# ---- the checks can fail -------------------------------------------------------------------


def worked(tmp_path: Path) -> World:
    """A world at rest, in which one request was served."""
    scenario = msgspec.structs.replace(scenario_of("all kinds"), events=0)
    world = World(scenario, tmp_path)
    world.life.engine.add(RequestId("a"), Prompt(tuple(range(20))), outputs_max=1)
    take_turns(world, 6)
    return world


def take_turns(world: World, turns: int) -> None:
    """Everybody does what there is to do, so many times."""
    for _ in range(turns):
        world.send()
        for rank in world.life.ranks:
            while rank.inbox:
                for report in [report for answer in world.life.do_step(rank)[1] for report in answer.reports]:
                    world.life.planner.report(report)
            rank.run_threads()


def violated(world: World) -> set[str]:
    """The invariants that do not hold now."""
    broken = set()
    checks = (*invariants.AFTER_EVERY_EVENT, *invariants.AFTER_EVERY_STEP, *invariants.AT_REST)
    for check in checks:
        try:
            check(world)
        except ViolationError as violation:
            broken.add(violation.invariant)
    return broken


def test_a_world_where_all_is_well_breaks_nothing(tmp_path: Path) -> None:
    assert violated(worked(tmp_path)) == set()


def test_wrong_bytes_in_a_block_are_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.life.engine.add(RequestId("b"), Prompt(tuple(range(20))), outputs_max=1)
    world.send()
    world.life.ranks[0].memory.region[:] ^= 1
    assert "valid_blocks_hold_oracle_bytes" in violated(world)


def test_wrong_bytes_in_a_frame_are_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    directory = world.life.planner.directory
    ref = next(ref for ref in world.expected.frames if directory.slot_of(ref) >= 0)
    world.life.ranks[0].arena.frame(ref.group, directory.slot_of(ref))[4100] ^= 1
    assert violated(world) == {"ready_frames_hold_oracle_bytes"}


def test_a_pin_that_stays_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    chain = Prompt(tuple(range(20))).chain(8)
    chain.extend(range(20))
    assert world.life.planner.directory.pin(chain.ids, 2)
    assert violated(world) == {"everything_comes_back"}


def test_a_block_that_stays_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.life.engine.allocator.pool.take(1)
    assert violated(world) == {"everything_comes_back"}


def test_a_cache_that_hits_nothing_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.life.planner.forget_all()
    take_turns(world, 1)
    assert violated(world) == {"stored_is_hit"}


def test_a_file_that_holds_another_chunk_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    first, second = sorted(path for path in tmp_path.rglob("g0/*/*") if path.is_file())
    first.write_bytes(second.read_bytes())
    assert violated(world) == {"files_hold_oracle_bytes"}


def test_a_file_that_nobody_counts_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    directory = world.life.planner.directory
    ref = next(ref for ref in world.expected.frames if directory.tier_of(ref) is Tier.ARENA)
    directory.drop(ref, Tier.DISK)
    directory.take_removes()
    assert violated(world) == {"files_are_accounted_for"}


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.ABSENT])
def test_a_frame_that_goes_bad_for_no_reason_is_seen(tmp_path: Path, fault: Fault) -> None:
    world = worked(tmp_path)
    world.watches[0].faults[fault] += 1
    assert violated(world) == {"frames_go_bad_for_a_reason"}


def test_a_frame_that_failed_and_is_promised_again_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.watches[0].again.append((1, next(iter(world.expected.frames))))
    assert violated(world) == {"failed_frames_are_not_promised_again"}


def test_a_save_that_cannot_be_done_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.life.ranks[0].recorder.count(Metric.SAVE_FAILED)
    assert violated(world) == {"saves_can_be_done"}


def test_another_answer_than_the_models_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.life.engine.finished[0].tokens[-1] += 1
    assert violated(world) == {"outputs_are_the_models"}


def test_a_load_that_waits_for_ever_is_seen(tmp_path: Path) -> None:
    world = worked(tmp_path)
    world.watches[0].moved_s[7] = world.clock.monotonic_s()
    invariants.promises_end_in_time(world, world.life.ranks[0])
    world.clock.advance(1e9)
    with pytest.raises(ViolationError, match="promises_end_in_time"):
        invariants.promises_end_in_time(world, world.life.ranks[0])


def test_a_failing_schedule_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_aborts(world: World) -> None:
        if world.life.engine.counts["aborted while waiting"]:
            raise ViolationError("nobody_aborts", "somebody did")

    monkeypatch.setattr(invariants, "AFTER_EVERY_EVENT", (nobody_aborts,))
    short = (msgspec.structs.replace(draw_scenario(seed), events=60) for seed in range(40))
    outcome = next(outcome for outcome in map(run_scenario, short) if outcome.failure)
    small = shrink(outcome)
    assert small.failure is not None
    assert small.failure.invariant == "nobody_aborts"
    scenario = small.scenario
    assert scenario.events - len(scenario.skip) <= 5  # one arrives, and is aborted
    assert (scenario.ranks, scenario.faults, scenario.store_faults) == (1, {}, {})
    again = msgspec.json.decode(small.replay_line.split("'")[1], type=type(scenario))
    assert run_scenario(again).failure == small.failure


def test_an_error_in_the_engines_step_is_a_violation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(draw_scenario(3), tmp_path)

    def fails(*_: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(type(world.life.planner), "match", fails)
    with pytest.raises(ViolationError, match=r"no_failure_reaches_the_step.*disk on fire"):
        world.run()


def test_ranks_hold_different_bytes() -> None:
    memories = [RankMemory(SimModel(MODELS["dense"], 8), rank, 1, 0) for rank in range(2)]
    assert len({memory.expected_frame(GROUP, reading([1, 2, 3, 4]), 0, 4) for memory in memories}) == 2


def test_a_run_without_kvstow_asks_nobody(tmp_path: Path) -> None:
    run = Lockstep(scenario_of("dense"), tmp_path, without=True)
    run.serve([Prompt(tuple(range(20)))])
    assert not any(order.loads or order.saves for order in run.orders)
