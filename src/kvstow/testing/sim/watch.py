"""How long each load and each hold of one rank has waited, and of what its loads have failed."""

from __future__ import annotations

from collections import Counter

from kvstow.keys.ids import ChunkRef
from kvstow.lifecycle.messages import Fault, JobId, LoadItem, RequestId
from kvstow.testing.sim.engine import Step, StepAnswer


class LoadWatch:
    """What the invariants need to know of one rank, from its orders and answers alone.

    Attributes:
        moved_s: by load under way, in dispatch order: when it was ordered, or when one ordered
            before it ended, whichever came last.
        held_s: by finished request whose blocks are held: since when.
        longest_gap_s: the longest time between two polls.
        faults: of what frames could not be loaded; a report that is sent again counts again.
        again: (serial of the request, frame) that was ordered once more after it had failed.
    """

    def __init__(self, now_s: float) -> None:
        self.moved_s: dict[JobId, float] = {}
        self.held_s: dict[RequestId, float] = {}
        self.longest_gap_s = 0.0
        self.faults: Counter[Fault] = Counter()
        self.again: list[tuple[int, ChunkRef]] = []
        self._items: dict[JobId, tuple[int, tuple[LoadItem, ...]]] = {}
        self._failed: set[tuple[int, ChunkRef]] = set()
        self._jobs: dict[RequestId, JobId] = {}
        self._polled_s = now_s

    def note(self, step: Step, answer: StepAnswer, now_s: float) -> None:
        """The rank has done a step."""
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._polled_s)
        self._polled_s = now_s
        for load in step.order.loads:
            self.moved_s[load.job] = now_s
            self._jobs[load.request] = load.job
        self._note_faults(step, answer)
        for hold in step.order.holds:
            self.held_s[hold.request] = now_s
        for request_id in answer.sent:
            del self.held_s[request_id]
        for request_id, _ in answer.loads:
            job = self._jobs.pop(request_id)
            del self.moved_s[job]
            for other in self.moved_s:
                if other > job:
                    self.moved_s[other] = now_s

    def _note_faults(self, step: Step, answer: StepAnswer) -> None:
        serials = {promise.request.request_id: promise.request.serial for promise in step.promises}
        for load in step.order.loads:
            serial = serials[load.request]
            self._items[load.job] = (serial, load.items)
            ordered = [(serial, item.ref) for item in load.items]
            self.again += [frame for frame in ordered if frame in self._failed]
        for report in answer.reports:
            for ended in report.loads:
                serial, items = self._items[ended.job]
                for failed in ended.failed:
                    self.faults[failed.fault] += 1
                    if failed.fault is not Fault.CANCELLED:
                        self._failed.add((serial, items[failed.item].ref))
