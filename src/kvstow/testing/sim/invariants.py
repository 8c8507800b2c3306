"""What must hold, as named functions with their reasons; each raises `ViolationError`.

They look at the world through what its parts show to everybody, and at the oracle. Those of
`AFTER_EVERY_EVENT` are cheap; those of `AFTER_EVERY_STEP` read memory; those of `AT_REST` hold
once no fault strikes any more and everything that was under way has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstow.layout.geometry import NO_BLOCK, GroupId, GroupKind
from kvstow.lifecycle.messages import Fault, LoadItem, Tier
from kvstow.lifecycle.requests import Lookup, Match
from kvstow.metrics import Metric
from kvstow.stores.framing import payload_of
from kvstow.testing.faulty_store import StoreFault
from kvstow.testing.sim.scenario import FRAME_FAULTS, FRAME_STORE_FAULTS, SimFault

if TYPE_CHECKING:
    from kvstow.testing.sim.engine import Promise, Step
    from kvstow.testing.sim.rank import SimRank
    from kvstow.testing.sim.world import World


_DAMAGING = FRAME_STORE_FAULTS - {StoreFault.IO_ERROR, StoreFault.LOST}


class ViolationError(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: the name of its function.
    """

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


def valid_blocks_hold_oracle_bytes(world: World) -> None:
    """Never wrong: whatever the engine believes to be in a block is there, on every rank."""
    for rank in world.life.ranks:
        blocks = rank.memory.wrong()
        if blocks:
            raise ViolationError(
                "valid_blocks_hold_oracle_bytes",
                f"rank {rank.rank}: blocks {blocks} hold other bytes than the engine believes",
            )


def ready_frames_hold_oracle_bytes(world: World) -> None:
    """A frame that can be promised holds its chunk: a bad one must not wait for its reader."""
    directory = world.life.planner.directory
    for ref, frame_of in world.expected.frames.items():
        if directory.tier_of(ref) is not Tier.ARENA:
            world.checked.discard(ref)
            continue
        if ref in world.checked:
            continue
        world.checked.add(ref)
        slot = directory.slot_of(ref)
        for rank in world.life.ranks:
            if (rank.rank, ref.group, slot) in world.flipped:
                continue
            payload = payload_of(rank.arena.frame(ref.group, slot), rank.layout.payload_bytes(ref.group))
            if bytes(payload) != frame_of(rank.memory):
                raise ViolationError(
                    "ready_frames_hold_oracle_bytes",
                    f"rank {rank.rank} group {ref.group} chunk {ref.index}: slot {slot} holds other bytes",
                )


def budgets_hold(world: World) -> None:
    """Bounded: slots, places and bytes are never more than what was given."""
    life = world.life
    directory = life.planner.directory
    for index, (slots, frames) in enumerate(zip(life.num_slots, life.num_frames, strict=True)):
        group = GroupId(index)
        if not 0 <= directory.arena_in_use(group) <= slots or not 0 <= directory.disk_in_use(group) <= frames:
            raise ViolationError(
                "budgets_hold",
                f"group {index}: {directory.arena_in_use(group)} of {slots} slots and "
                f"{directory.disk_in_use(group)} of {frames} places in use",
            )
    for rank in life.ranks:
        if rank.disk is not None and not 0 <= rank.disk.used_bytes <= rank.disk_budget_bytes:
            raise ViolationError(
                "budgets_hold",
                f"rank {rank.rank}: {rank.disk.used_bytes} of {rank.disk_budget_bytes} bytes on disk",
            )
    loads = len(life.engine.promises)
    if world.scenario.is_fault_free and loads > life.limits.pending_loads_max:
        raise ViolationError(
            "budgets_hold", f"{loads} of {life.limits.pending_loads_max} loads are in flight"
        )


def orders_keep_promises(world: World, step: Step) -> None:
    """Never promise what is not issued: a promise made in a step is loaded by that step's order.

    Exactly the frames that a resume at the promised boundary needs beyond the floor, into exactly
    the request's blocks, and not one block below the floor, which other requests may share.
    """
    promised = {promise.request.request_id: promise for promise in step.promises}
    loads = {load.request: load for load in step.order.loads}
    if list(promised) != list(loads):
        raise ViolationError("orders_keep_promises", f"promised {list(promised)}, ordered {list(loads)}")
    for request_id, load in loads.items():
        promise = promised[request_id]
        if not load.items and SimFault.EVICTED_BETWEEN in world.scenario.faults:
            continue  # then it is refused, and the load's end says so
        if not load.items:
            raise ViolationError("orders_keep_promises", f"{promise.request}: a fresh promise was refused")
        needed = _needed(world, promise)
        if needed != {(item.ref.group, item.ref.index) for item in load.items}:
            raise ViolationError(
                "orders_keep_promises",
                f"{promise.request} at {promise.boundary} from {promise.floor}: needs {sorted(needed)}, "
                f"ordered {[(item.ref.group, item.ref.index) for item in load.items]}",
            )
        for item in load.items:
            _check_target(world, promise, item)


def resume_leaves_a_token(world: World, step: Step) -> None:
    """At least one token is left to compute, and a boundary is a whole number of chunks."""
    for promise in step.promises:
        known = len(promise.request.tokens)
        if (
            not promise.floor < promise.boundary < known
            or promise.boundary % world.scenario.model.chunk_tokens
        ):
            raise ViolationError(
                "resume_leaves_a_token",
                f"{promise.request}: promised [{promise.floor}, {promise.boundary}) of {known} tokens",
            )


def promises_end_in_time(world: World, rank: SimRank) -> None:
    """Never stuck: a load ends within its bound of when it could begin.

    The bound runs from when the load was ordered, and anew from when its copy begins and from
    when one that was ordered before it ends. A rank notices only when the engine polls it, so two
    intervals between polls are added.
    """
    watch = world.watches[rank.rank]
    bound_s = 2 * world.scenario.limits.load_timeout_s + 2 * watch.longest_gap_s
    for job, moved_s in watch.moved_s.items():
        waited_s = world.clock.monotonic_s() - moved_s
        if waited_s > bound_s + 1e-6:
            raise ViolationError(
                "promises_end_in_time",
                f"rank {rank.rank}: load {job} has waited {waited_s:.1f} s of {bound_s:.1f} s",
            )


def holds_end_in_time(world: World, rank: SimRank) -> None:
    """Never stuck: blocks of a finished request are held for its saves, and those may wait so long.

    Also if the rank's threads do nothing any more; again a rank notices only when it is polled.
    """
    watch = world.watches[rank.rank]
    bound_s = world.scenario.limits.save_timeout_s + 2 * watch.longest_gap_s
    for request_id, held_s in watch.held_s.items():
        waited_s = world.clock.monotonic_s() - held_s
        if waited_s > bound_s + 1e-6:
            raise ViolationError(
                "holds_end_in_time",
                f"rank {rank.rank}: blocks of {request_id} are held for {waited_s:.1f} s of {bound_s:.1f} s",
            )


def lookups_change_nothing(match: Match, again: Match, before: object, after: object) -> None:
    """Lookups are polled every step: they are idempotent and leave the directory as it was."""
    if match != again or before != after:
        raise ViolationError("lookups_change_nothing", f"{match} then {again}; in use {before} then {after}")


def late_reports_change_nothing(before: object, after: object) -> None:
    """A report for a job that ended, or for an older use of a request id, changes nothing."""
    if before != after:
        raise ViolationError("late_reports_change_nothing", f"in use {before} then {after}")


def everything_comes_back(world: World) -> None:
    """At rest: no block is held, no pin outlives its request, no copy is half made, no thread is lost."""
    life = world.life
    problems = []
    if not life.engine.is_idle:
        problems.append(
            f"engine: requests {list(life.engine.requests.values())}, loads {list(life.engine.promises)}"
        )
    free = life.engine.allocator.pool.num_free
    if free != life.engine.allocator.pool.num_blocks:
        problems.append(f"{free} of {life.engine.allocator.pool.num_blocks} blocks are free")
    directory = life.planner.directory
    if directory.pins() or directory.filling():
        problems.append(f"{directory.pins()} pins, {directory.filling()} copies being made")
    if life.planner.saves_in_flight or life.planner.holds_blocks:
        problems.append("the planner waits for saves")
    for rank in life.ranks:
        busy = [executor.name for executor in rank.executors if not executor.is_idle]
        if busy:
            problems.append(f"rank {rank.rank}: {busy} have work")
        lent = _staging_lent(rank, world.scenario.limits.readers)
        if lent:
            problems.append(f"rank {rank.rank}: {lent} staging frames are lent out")
    if problems:
        raise ViolationError("everything_comes_back", "; ".join(problems))


def kept_chunks_can_be_used(world: World) -> None:
    """Eviction never takes what others build on: a chunk without its parents only fills a slot.

    Asked in worlds where no frame goes but by eviction. A place on disk is not asked about: its parent
    may not have come there.
    """
    if not world.only_evicts:
        return
    directory = world.life.planner.directory
    kept = {
        (ref.group, ref.chunk) for ref in world.expected.frames if directory.is_kept(ref.group, ref.chunk)
    }
    for ref in world.expected.frames:
        is_paged = world.scenario.model.groups[ref.group].kind is GroupKind.PAGED
        in_arena = directory.slot_of(ref) >= 0
        if is_paged and ref.index and in_arena and (ref.group, ref.parent) not in kept:
            raise ViolationError(
                "kept_chunks_can_be_used",
                f"group {ref.group} keeps chunk {ref.index} of a prefix, and not the chunk before it",
            )


def slots_are_accounted_for(world: World) -> None:
    """At rest every slot in use holds a frame that can be promised, except those of lost readers."""
    directory = world.life.planner.directory
    for index in range(len(world.scenario.model.groups)):
        group = GroupId(index)
        ready = sum(1 for ref in world.expected.frames if ref.group == group and directory.slot_of(ref) >= 0)
        if directory.arena_in_use(group) != ready:
            raise ViolationError(
                "slots_are_accounted_for",
                f"group {index}: {directory.arena_in_use(group)} slots in use, {ready} hold a frame",
            )


def nothing_stays_pending(world: World) -> None:
    """At rest no lookup answers "ask again": there is nothing left to wait for."""
    for prompt in world.prompts:
        if world.look_up(prompt).lookup is Lookup.PENDING:
            raise ViolationError("nothing_stays_pending", f"{prompt} is PENDING for ever")


def stored_is_hit(world: World) -> None:
    """What was computed, and neither evicted nor lost, is hit: a cache that never hits is wrong too.

    Asked only in worlds where nothing fails and every budget holds all that was ever computed.
    """
    if not world.keeps_all:
        return
    world.counts["kept all"] += 1
    for request in world.served:
        expected = world.expected.hit_of(request)
        world.counts["kept all: had to be hit"] += expected > 0
        match = world.look_up(request.prompt)
        if match.tokens < expected:
            raise ViolationError(
                "stored_is_hit",
                f"{request}: {len(request.prompt.tokens)} tokens were computed, {match.tokens} are found, "
                f"{expected} must be",
            )


def outputs_are_the_models(world: World) -> None:
    """The same requests without kvstow say the same tokens."""
    for request in world.newly_served():
        expected = world.expected.outputs_of(request, world.life.ranks[0].memory)
        said = request.tokens[len(request.prompt.tokens) :]
        if said != expected:
            raise ViolationError(
                "outputs_are_the_models", f"{request} says {said}, the model says {expected}"
            )


def loads_fail_for_a_reason(world: World) -> None:
    """Where nothing goes wrong, every promise is kept: a bound must not run while a job only waits."""
    failed = world.life.engine.counts["loads failed"]
    if failed and world.scenario.is_fault_free and world.scenario.limits.queue_max > 64:
        raise ViolationError("loads_fail_for_a_reason", f"{failed} loads failed where nothing goes wrong")


def frames_go_bad_for_a_reason(world: World) -> None:
    """A promised frame is corrupt or absent only where something damages frames or takes them away.

    Else a slot or a file was given to somebody while it was promised: the load fails, and nobody
    would know.
    """
    scenario = world.scenario
    damaged = SimFault.MEMORY_FLIP in scenario.faults or _DAMAGING & scenario.store_faults.keys()
    lost = SimFault.FILE_GONE in scenario.faults or StoreFault.LOST in scenario.store_faults
    # A frame that one load found bad is taken away under those that were ordered to read it too.
    reasons = {Fault.CORRUPT: damaged, Fault.ABSENT: lost or damaged}
    for rank, watch in zip(world.life.ranks, world.watches, strict=True):
        for fault, reason in reasons.items():
            if watch.faults[fault] and not reason:
                raise ViolationError(
                    "frames_go_bad_for_a_reason",
                    f"rank {rank.rank}: {watch.faults[fault]} promised frames were {fault}, for no reason",
                )


def failed_frames_are_not_promised_again(world: World) -> None:
    """What failed once for a request is not promised to it again: it would fail and ask for ever."""
    for rank, watch in zip(world.life.ranks, world.watches, strict=True):
        if watch.again:
            serial, ref = watch.again[0]
            raise ViolationError(
                "failed_frames_are_not_promised_again",
                f"rank {rank.rank}: chunk {ref.index} of group {ref.group} had failed for request #{serial}",
            )


def saves_can_be_done(world: World) -> None:
    """No save is ordered that a rank cannot do: of blocks that are not there, or into no slot."""
    for rank in world.life.ranks:
        failed = rank.recorder.snapshot()[Metric.SAVE_FAILED]
        if failed:
            raise ViolationError(
                "saves_can_be_done", f"rank {rank.rank}: {failed:.0f} frames could not be copied"
            )


def ready_frames_stay_good(world: World) -> None:
    """At rest every frame is looked at once more: what came back late may have written into its slot."""
    world.checked.clear()
    ready_frames_hold_oracle_bytes(world)


def files_hold_oracle_bytes(world: World) -> None:
    """At rest every file holds its chunk: a frame keeps its slot until it is on disk.

    Asked where nothing damages what is written.
    """
    scenario = world.scenario
    if SimFault.MEMORY_FLIP in scenario.faults or _DAMAGING & scenario.store_faults.keys():
        return
    for rank in world.life.ranks:
        for ref, frame in rank.stored_frames():
            frame_of = world.expected.frames.get(ref)
            payload = payload_of(memoryview(frame), rank.layout.payload_bytes(ref.group))
            if frame_of is None or bytes(payload) != frame_of(rank.memory):
                raise ViolationError(
                    "files_hold_oracle_bytes",
                    f"rank {rank.rank} group {ref.group} chunk {ref.index}: the file holds other bytes",
                )


def files_are_accounted_for(world: World) -> None:
    """At rest every file is one that the directory counts, on every rank: none is left behind.

    Asked where files come and go as they are told to, and where removals find room in their queue.
    """
    scenario = world.scenario
    unsure = FRAME_FAULTS & scenario.faults.keys() or FRAME_STORE_FAULTS & scenario.store_faults.keys()
    if unsure or scenario.limits.queue_max <= 64:
        return
    for rank in world.life.ranks:
        if rank.disk is None:
            continue
        files = Counter(found.ref.group for found in rank.disk.scan())
        for index, group in enumerate(scenario.model.groups):
            counted = world.life.planner.directory.disk_in_use(GroupId(index))
            if group.replicated and rank.rank:
                counted = 0  # the first rank's copy serves all
            if files[GroupId(index)] != counted:
                raise ViolationError(
                    "files_are_accounted_for",
                    f"rank {rank.rank} group {index}: {files[GroupId(index)]} files, {counted} are counted",
                )


AFTER_EVERY_EVENT: tuple[Callable[[World], None], ...] = (budgets_hold, valid_blocks_hold_oracle_bytes)
AFTER_EVERY_STEP: tuple[Callable[[World], None], ...] = (
    loads_fail_for_a_reason,
    frames_go_bad_for_a_reason,
    failed_frames_are_not_promised_again,
    saves_can_be_done,
    kept_chunks_can_be_used,
    ready_frames_hold_oracle_bytes,
    outputs_are_the_models,
)
AT_REST: tuple[Callable[[World], None], ...] = (
    everything_comes_back,
    slots_are_accounted_for,
    ready_frames_stay_good,
    files_hold_oracle_bytes,
    files_are_accounted_for,
    nothing_stays_pending,
    stored_is_hit,
)


def _needed(world: World, promise: Promise) -> set[tuple[GroupId, int]]:
    """The frames that a resume needs beyond the floor, by the definitions of the three kinds."""
    chunk = world.scenario.model.chunk_tokens
    needed: set[tuple[GroupId, int]] = set()
    for index, group in enumerate(world.scenario.model.groups):
        first = promise.floor
        if group.kind is GroupKind.STATE:
            first = promise.boundary - 1
        elif group.kind is GroupKind.WINDOW:
            first = max(first, promise.boundary - group.window_tokens)
        needed |= {(GroupId(index), token // chunk) for token in range(first, promise.boundary)}
    return needed


def _check_target(world: World, promise: Promise, item: LoadItem) -> None:
    model = world.scenario.model
    group = model.groups[item.ref.group]
    table = promise.tables[item.ref.group]
    end = (item.ref.index + 1) * model.chunk_tokens
    stop = end // group.block_tokens
    if tuple(table[stop - len(item.blocks) : stop]) != item.blocks:
        raise ViolationError("orders_keep_promises", f"{promise.request}: {item} is not for its own blocks")
    if group.kind is GroupKind.STATE:
        if item.skip_blocks or item.blocks[0] == NO_BLOCK:
            raise ViolationError("orders_keep_promises", f"{promise.request}: {item} brings no image")
        return
    first = stop - len(item.blocks) + item.skip_blocks
    below = first * group.block_tokens < promise.floor
    if below or NO_BLOCK in item.blocks[item.skip_blocks :]:
        raise ViolationError(
            "orders_keep_promises", f"{promise.request}: {item} reaches below floor {promise.floor}"
        )
    from_token = (
        max(promise.floor, promise.boundary - group.window_tokens) if group.window_tokens else promise.floor
    )
    if first * group.block_tokens > max(from_token, item.ref.index * model.chunk_tokens):
        raise ViolationError(
            "orders_keep_promises", f"{promise.request}: {item} skips blocks that are needed"
        )


def _staging_lent(rank: SimRank, staging_frames: int) -> int:
    """Staging frames that somebody did not give back."""
    got = []
    for _ in range(staging_frames):
        frame = rank.arena.acquire_staging(GroupId(0), 0.0)
        if frame is not None:
            got.append(frame)
    for frame in got:
        frame.release()
    return staging_frames - len(got)
