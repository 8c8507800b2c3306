"""How long each load and each hold of one rank has waited."""

from __future__ import annotations

from kvstow.lifecycle.messages import JobId, RequestId
from kvstow.testing.sim.engine import Step, StepAnswer


class LoadWatch:
    """What the invariants about time need to know of one rank, from its orders and answers alone.

    Attributes:
        moved_s: by load under way, in dispatch order: when it was ordered, or when one ordered
            before it ended, whichever came last.
        held_s: by finished request whose blocks are held: since when.
        longest_gap_s: the longest time between two polls.
    """

    def __init__(self, now_s: float) -> None:
        self.moved_s: dict[JobId, float] = {}
        self.held_s: dict[RequestId, float] = {}
        self.longest_gap_s = 0.0
        self._jobs: dict[RequestId, JobId] = {}
        self._polled_s = now_s

    def note(self, step: Step, answer: StepAnswer, now_s: float) -> None:
        """The rank has done a step."""
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._polled_s)
        self._polled_s = now_s
        for load in step.order.loads:
            self.moved_s[load.job] = now_s
            self._jobs[load.request] = load.job
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
