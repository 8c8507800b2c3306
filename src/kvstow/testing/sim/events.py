"""What may happen next in a world, and how likely each is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kvstow.errors import StoreError
from kvstow.keys.ids import Rank
from kvstow.lifecycle.messages import RequestId, Tier
from kvstow.stores.disk.root import DiskRoot
from kvstow.testing.sim import invariants
from kvstow.testing.sim.clients import OUTPUTS_MAX, Clients
from kvstow.testing.sim.invariants import ViolationError
from kvstow.testing.sim.scenario import SimFault

if TYPE_CHECKING:
    from kvstow.testing.sim.world import World

Act = Callable[[Random], None]
Event = tuple[float, str, Act]
"""Weight, name, and what happens."""

# A fault that was drawn happens next.
_AT_ONCE = 1e6


class Events:
    """Draws events and makes them happen.

    Args:
        world: where.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._clients = Clients(world.scenario.seed, world.scenario.documents, twins=world.scenario.twins)

    def happen(self, index: int, rng: Random) -> None:
        """Let one event happen."""
        events = [*self._ordinary(), *self._strikes(rng)]
        _, name, act = rng.choices(events, [weight for weight, _, _ in events])[0]
        self._world.note(f"{index:4} {name}")
        act(rng)

    # ---- what engines, threads and clients do ------------------------------------------

    def _ordinary(self) -> list[Event]:
        world, life = self._world, self._world.life
        engine = life.engine
        events: list[Event] = [
            (2.0, "arrive", self._arrive),
            (0.3, "time", self._pass_time),
            (0.2, "look up", self._look_up_twice),
            (0.3, "reset the engine's cache", self._drop_cache),
            (0.03, "forget all", self._forget_all),
        ]
        if engine.can_schedule and (not engine.is_idle or life.planner.wants_steps):
            events.append((5.0, "send a step", self._send))
        if engine.requests:
            events.append((0.3, "abort", self._abort))
        for rank in life.ranks:
            if rank.inbox:
                events.append((5.0, f"rank {rank.rank} steps", partial(world.step, rank)))
            for executor in () if rank.is_stuck else rank.executors:
                if executor.can_run:
                    events.append(
                        (6.0, f"rank {rank.rank} {executor.name}", partial(_run_one, executor.run_one))
                    )
        if life.late_reports:
            events.append((1.0, "a late report", world.deliver_late))
        if any(rank.is_stuck for rank in life.ranks):
            events.append((0.3, "a dead rank lives again", self._unstick))
        if world.scenario.restarts:
            events.append((0.2, "restart", self._restart))
        return events

    def _arrive(self, rng: Random) -> None:
        engine = self._world.life.engine
        # Few ids: they are used again and again.
        request_id = RequestId(f"r{rng.randrange(8)}")
        if engine.is_known(request_id):
            return
        prompt = self._clients.draw(rng, engine.finished[-8:], list(self._world.prompts)[-30:])
        self._world.prompts[prompt] = None
        request = engine.add(request_id, prompt, outputs_max=rng.randrange(1, OUTPUTS_MAX + 1))
        self._world.note(f"     {request}: {len(prompt.tokens)} tokens {prompt.salt} {prompt.image or ''}")

    def _pass_time(self, rng: Random) -> None:
        self._world.pass_time(rng.choice([0.5, 2.0, 11.0]))

    def _look_up_twice(self, rng: Random) -> None:
        world = self._world
        if not world.prompts:
            return
        prompt = rng.choice(list(world.prompts))
        before = world.life.in_use()
        first = world.look_up(prompt)
        invariants.lookups_change_nothing(first, world.look_up(prompt), before, world.life.in_use())
        world.counts[f"looked up: {first.lookup.value}"] += 1

    def _drop_cache(self, _: Random) -> None:
        self._world.life.engine.allocator.pool.drop_cache()

    def _forget_all(self, _: Random) -> None:
        self._world.counts["forget all"] += 1
        self._world.life.planner.forget_all()

    def _send(self, _: Random) -> None:
        self._world.send()

    def _abort(self, rng: Random) -> None:
        engine = self._world.life.engine
        engine.abort(rng.choice(list(engine.requests)))

    def _unstick(self, rng: Random) -> None:
        rng.choice(self._world.life.ranks).is_stuck = False

    def _restart(self, _: Random) -> None:
        self._world.restart()

    # ---- what goes wrong ---------------------------------------------------------------

    def _strikes(self, rng: Random) -> list[Event]:
        acts: list[tuple[SimFault, Act]] = [
            (SimFault.RANK_DEAD, self._stick),
            (SimFault.KILLED, self._kill),
            (SimFault.CLOCK_JUMP, self._jump),
            (SimFault.SECOND_ENGINE, self._intrude),
            (SimFault.MEMORY_FLIP, self._flip),
            (SimFault.FILE_GONE, self._remove_file),
        ]
        return [
            (_AT_ONCE, fault.value, partial(self._strike, fault, act))
            for fault, act in acts
            if rng.random() < self._world.scenario.faults.get(fault, 0.0)
        ]

    def _strike(self, fault: SimFault, act: Act, rng: Random) -> None:
        self._world.faults[fault] += 1
        act(rng)

    def _stick(self, rng: Random) -> None:
        """A rank's threads stop; the engine's own thread on that rank goes on."""
        rng.choice(self._world.life.ranks).is_stuck = True

    def _kill(self, _: Random) -> None:
        self._world.kill()

    def _jump(self, rng: Random) -> None:
        """The machine was asleep."""
        self._world.clock.advance(rng.choice([60.0, 5000.0]))

    def _flip(self, rng: Random) -> None:
        """A bit of an arena frame turns over: memory goes bad too."""
        world = self._world
        directory = world.life.planner.directory
        held = [ref for ref in world.expected.frames if directory.tier_of(ref) is Tier.ARENA]
        if not held:
            return
        ref, rank = rng.choice(held), rng.choice(world.life.ranks)
        slot = directory.slot_of(ref)
        seen_by = [rank]
        if rank.shared is not None and ref.group in rank.shared.slots:
            seen_by = world.life.ranks  # the first of which fills it
        frame = seen_by[0].arena.frame(ref.group, slot)
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        world.flipped.update((each.rank, ref.group, slot) for each in seen_by)

    def _remove_file(self, rng: Random) -> None:
        """Somebody deletes a frame's file."""
        files = sorted(
            path for path in self._world.folder.rglob("*") if path.is_file() and "lock" not in path.name
        )
        if files:
            rng.choice(files).unlink()

    def _intrude(self, _: Random) -> None:
        """Another engine wants the same folder: it is refused as long as this one lives."""
        world = self._world
        if all(rank.disk is None for rank in world.life.ranks):
            return
        try:
            DiskRoot.open(
                world.folder,
                instance="intruder",
                rank=Rank(0),
                world_size=1,
                budget_bytes=1 << 20,
                clock=world.clock,
            ).close()
        except StoreError:
            return
        raise ViolationError("one_engine_per_root", "a second engine got a folder that is in use")


def _run_one(run: Callable[[], None], _: Random) -> None:
    run()
