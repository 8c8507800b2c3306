"""A scenario, event by event: what happens next is drawn, what must hold is checked after each.

Every event has a random generator of its own, made from the seed and its index. So leaving an
event out (`Scenario.skip`) changes what follows only where it must, and a failing schedule can be
shrunk by leaving out as many as possible.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from kvstow.clock import ManualClock
from kvstow.keys.ids import ChunkRef
from kvstow.layout.geometry import GroupId
from kvstow.lifecycle.messages import Report, RequestId
from kvstow.lifecycle.requests import Match, Phase
from kvstow.metrics import Metric
from kvstow.stores.base import FrameName
from kvstow.testing.faulty_store import SeededFaults, StoreFault, StoreOperation
from kvstow.testing.sim import invariants
from kvstow.testing.sim.engine import Step, StepAnswer
from kvstow.testing.sim.events import Events
from kvstow.testing.sim.expected import Expected
from kvstow.testing.sim.fibers import SimulatedKillError
from kvstow.testing.sim.invariants import ViolationError
from kvstow.testing.sim.life import Life
from kvstow.testing.sim.rank import SimRank
from kvstow.testing.sim.requests import Prompt, SimRequest
from kvstow.testing.sim.scenario import Scenario, SimFault
from kvstow.testing.sim.watch import LoadWatch

TRACE_LINES = 400

_BEGAN_S = 1000.0
_REST_ROUNDS_MAX = 3000
# Longer than any bound of the planner's: what it waits for, it has given up by then.
_REST_QUIET_S = 200.0
# In a shorter time threads move only when an event says so.
_LONG_S = 0.1


class DiskFaults:
    """`SeededFaults` that can be ended."""

    def __init__(self, scenario: Scenario) -> None:
        self._seeded = SeededFaults(Random(scenario.seed ^ 0x5EED), scenario.store_faults)
        self.strike = True

    @property
    def counts(self) -> Counter[StoreFault]:
        """What was given out."""
        return self._seeded.counts

    def next_fault(self, operation: StoreOperation, name: FrameName | None) -> StoreFault | None:
        return self._seeded.next_fault(operation, name) if self.strike else None


class World:
    """One schedule. `run` it once.

    Args:
        scenario: what is simulated.
        folder: an empty folder for the disks.

    Attributes:
        life: the engine that lives now.
        clock: simulated time.
        expected: the oracle's answers.
        checked: frames found good since they came into the arena.
        flipped: (rank, group, slot) whose memory a fault has changed.
        prompts: every prompt sent so far.
        served: requests that came to their end in this life.
        faults, transitions, counts: what was covered.
        trace: the last events, in words.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.clock = ManualClock(_BEGAN_S)
        self.expected = Expected(scenario)
        self.checked: set[ChunkRef] = set()
        self.flipped: set[tuple[int, GroupId, int]] = set()
        self.prompts: dict[Prompt, None] = {}
        self.served: list[SimRequest] = []
        self.faults: Counter[str] = Counter()
        self.transitions: Counter[tuple[str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.watches: list[LoadWatch] = []
        self._disk_faults = DiskFaults(scenario)
        self._lives = 0
        self._unchecked = 0
        self._phases: dict[RequestId, Phase | None] = {}
        self._digest = hashlib.sha256()
        self._probes = 0
        self._events = Events(self)
        self.life = self._start_life()

    # ---- running -----------------------------------------------------------------------

    def run(self) -> None:
        """All events, and then the world at rest; raises `ViolationError` at the first that fails."""
        try:
            for index in range(self.scenario.events):
                if index not in self.scenario.skip:
                    rng = Random(self.scenario.seed << 24 | index)
                    self.clock.advance(rng.random() * 0.02)
                    self._events.happen(index, rng)
                    self._after_event()
            self._come_to_rest()
            for check in invariants.AT_REST:
                check(self)
        except ViolationError:
            raise
        except (Exception, SimulatedKillError) as error:
            # Whatever comes out of the engine's calls, an assertion of its own included.
            raise ViolationError("no_failure_reaches_the_step", f"{type(error).__name__}: {error}") from error
        finally:
            self._bury()
            self.faults.update({fault.value: count for fault, count in self._disk_faults.counts.items()})
            self.life.kill()

    @property
    def digest(self) -> str:
        """Names the schedule: the same for the same scenario, on every machine, in every process."""
        return self._digest.hexdigest()

    @property
    def keeps_all(self) -> bool:
        """Whether everything computed in this world must still be found."""
        counted = self.life.recorder.snapshot()
        return (
            self.only_evicts
            and self.scenario.pending_saves_max >= 64
            and not counted[Metric.EVICTED_ARENA]
            and not counted[Metric.SAVE_SKIPPED_NO_SPACE]
        )

    @property
    def only_evicts(self) -> bool:
        """Whether no frame was lost in this world, other than to eviction."""
        counted = self.life.recorder.snapshot()
        return (
            self.scenario.is_fault_free
            and self._lives == 1
            and not self.counts["forget all"]
            and not counted[Metric.SAVE_CANCELLED]
            and not counted[Metric.LOAD_FAILED]
        )

    def look_up(self, prompt: Prompt) -> Match:
        """What the planner would promise a new request with this prompt."""
        self._probes += 1
        probe = RequestId(f"probe-{self._probes}")
        chain = prompt.chain(self.scenario.model.chunk_tokens)
        chain.extend(prompt.tokens)
        match = self.life.planner.match(probe, chain.ids, len(prompt.tokens), 0)
        self.life.planner.finished(probe)
        return match

    def newly_served(self) -> Iterator[SimRequest]:
        """Requests that came to their end since this was last asked."""
        while self._unchecked < len(self.life.engine.finished):
            request = self.life.engine.finished[self._unchecked]
            self._unchecked += 1
            self.served.append(request)
            yield request

    def note(self, words: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.clock.monotonic_s() - _BEGAN_S:9.3f} s  {words}")
        self._digest.update(self.trace[-1].encode())

    # ---- the engine's steps ------------------------------------------------------------

    def send(self) -> None:
        """The engine schedules a step and sends it to every rank."""
        step = self.life.send()
        self.expected.note(step)
        order = msgspec.json.encode(step.order)
        if step.work or step.order.loads or step.order.writes:
            self.note(f"     step {step.number}: {_told(step)}")
        self._digest.update(order)
        invariants.orders_keep_promises(self, step)
        invariants.resume_leaves_a_token(self, step)

    def step(self, rank: SimRank, rng: Random) -> None:
        """One rank does its oldest step."""
        self.pass_time((0.7 + 0.3 * rng.random()) * self.scenario.step_s)
        self._do_step(rank, rng)

    def _do_step(self, rank: SimRank, rng: Random) -> None:
        step = rank.inbox[0]
        known = self.life.engine.counts.copy()
        answer, answers = self.life.do_step(rank)
        self.watches[rank.rank].note(step, answer, self.clock.monotonic_s())
        invariants.promises_end_in_time(self, rank)
        invariants.holds_end_in_time(self, rank)
        self._deliver(answers, rng)
        for words, count in (self.life.engine.counts - known).items():
            self.note(f"     {count} {words}")
        for check in invariants.AFTER_EVERY_STEP:
            check(self)

    def _deliver(self, answers: list[StepAnswer], rng: Random) -> None:
        reports = [report for answer in answers for report in answer.reports]
        if reports and self._strikes_now(SimFault.REPORTS_REORDERED, rng):
            rng.shuffle(reports)
        for report in reports:
            if self._strikes_now(SimFault.REPORT_LOST, rng):
                self.note(f"     lost: {report}")
            elif self._strikes_now(SimFault.REPORT_LATE, rng):
                self.life.late_reports.append(report)
            else:
                self.life.planner.report(report)
                if self._strikes_now(SimFault.REPORT_TWICE, rng):
                    self._deliver_again(report)

    def _deliver_again(self, report: Report) -> None:
        before = self.life.in_use()
        self.life.planner.report(report)
        invariants.late_reports_change_nothing(before, self.life.in_use())

    def deliver_late(self, rng: Random) -> None:
        """A report that was held back comes in."""
        late = self.life.late_reports
        self.life.planner.report(late.pop(rng.randrange(len(late))))

    def _evicts_between(self) -> bool:
        promises = self.life.engine.counts["promises"]
        return self._strikes_now(SimFault.EVICTED_BETWEEN, Random(self.scenario.seed ^ promises))

    def _strikes_now(self, fault: SimFault, rng: Random) -> bool:
        strikes = self._disk_faults.strike and rng.random() < self.scenario.faults.get(fault, 0.0)
        self.faults[fault] += strikes
        return strikes

    # ---- lives -------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, and a new engine over the same disk."""
        self._bury()
        self.life.kill()
        self.life = self._start_life()

    def restart(self) -> None:
        """The engine is stopped in order and started again."""
        self._bury()
        self.life.shutdown()
        self.life = self._start_life()

    def _start_life(self) -> Life:
        life = Life(self.scenario, self._lives, self.folder, self._disk_faults, self.clock)
        life.evicts_between = self._evicts_between
        self._lives += 1
        self._unchecked = 0
        self._phases = {}
        self.served = []
        self.checked.clear()
        self.flipped.clear()
        self.expected.forget_images()
        self.watches = [LoadWatch(self.clock.monotonic_s()) for _ in life.ranks]
        return life

    def _bury(self) -> None:
        """Add up what this life has counted."""
        self.counts.update(self.life.engine.counts)
        self.counts["lives"] += 1
        recorders = [("planner", self.life.recorder)]
        recorders += [("worker", rank.recorder) for rank in self.life.ranks]
        for who, recorder in recorders:
            self.counts.update(
                {f"{who} {metric}": int(value) for metric, value in recorder.snapshot().items() if value}
            )

    # ---- time and rest -----------------------------------------------------------------

    def pass_time(self, for_s: float) -> None:
        """Let time pass; in a long time every thread that lives does what it can."""
        until_s = self.clock.monotonic_s() + for_s
        if for_s > _LONG_S:
            ranks = [rank for rank in self.life.ranks if not rank.is_stuck]
            for rank in ranks:
                rank.run_threads()
            while (wake_s := min((rank.wake_s for rank in ranks), default=until_s)) < until_s:
                self.clock.advance(max(0.0, wake_s - self.clock.monotonic_s()))
                for rank in ranks:
                    rank.run_threads()
        self.clock.advance(max(0.0, until_s - self.clock.monotonic_s()))

    def _come_to_rest(self) -> None:
        """No fault strikes any more; everything that is under way gets the time it needs."""
        self.note("rest")
        self._disk_faults.strike = False
        for rank in self.life.ranks:
            rank.is_stuck = False
        quiet_since_s = self.clock.monotonic_s()
        for _ in range(_REST_ROUNDS_MAX):
            if not self._rest_round():
                quiet_since_s = self.clock.monotonic_s()
            elif self.clock.monotonic_s() - quiet_since_s > _REST_QUIET_S:
                return
        raise ViolationError("everything_comes_back", f"not at rest after {_REST_ROUNDS_MAX} rounds")

    def _rest_round(self) -> bool:
        """One step of everybody; whether there was nothing to do."""
        life, rng = self.life, Random(0)
        if life.engine.can_schedule:
            self.send()
        for rank in life.ranks:
            while rank.inbox:
                self._do_step(rank, rng)
        while life.late_reports:
            self.deliver_late(rng)
        moved = sum(rank.run_threads() for rank in life.ranks)
        self._after_event()
        busy = moved or not life.engine.is_idle or life.planner.wants_steps
        self.clock.advance(0.5 if moved else 5.0)
        return not busy and all(rank.wake_s == float("inf") for rank in life.ranks)

    def _after_event(self) -> None:
        for request_id, phase in self.life.phases().items():
            was = self._phases.get(request_id)
            if was is not phase:
                self.transitions[_name(was), _name(phase)] += 1
                self._phases[request_id] = phase
        for check in invariants.AFTER_EVERY_EVENT:
            check(self)


def _name(phase: Phase | None) -> str:
    return phase.value if phase is not None else "-"


def _told(step: Step) -> str:
    order = step.order
    work = ", ".join(f"{work.request} [{work.first}, {work.stop})" for work in step.work)
    loads = ", ".join(f"{load.request} {len(load.items)} frames" for load in order.loads)
    saves = sum(len(save.items) for save in (*order.saves, *order.snapshots))
    return (
        f"{work or 'nothing'}; loads {loads or 'none'}; {saves} frames to save, {len(order.writes)} to write"
    )
