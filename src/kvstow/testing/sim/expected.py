"""What must be: the content of every frame, what a served prompt must hit, and what the model says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstow.keys.ids import ROOT_CHUNK, ChunkId, ChunkRef
from kvstow.layout.geometry import GroupId, GroupKind
from kvstow.testing.sim.engine import Step
from kvstow.testing.sim.memory import RankMemory
from kvstow.testing.sim.oracle import Reading, next_token
from kvstow.testing.sim.rank import VOCABULARY
from kvstow.testing.sim.requests import Prompt, SimRequest
from kvstow.testing.sim.scenario import Scenario

FrameOracle = Callable[[RankMemory], bytes]


class Expected:
    """The oracle's answers about one world, from what the engine was seen to compute.

    Attributes:
        frames: what every frame that could be stored must hold, on a rank's memory.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.frames: dict[ChunkRef, FrameOracle] = {}
        self._model = scenario.model
        self._min_load_tokens = scenario.min_load_tokens
        self._imaged: set[ChunkId] = set()
        self._outputs: dict[tuple[Prompt, int], list[int]] = {}

    def note(self, step: Step) -> None:
        """The engine computes this step."""
        chunk = self._model.chunk_tokens
        for work in step.work:
            self._know(work.request)
            if work.stop % chunk == 0:
                self._imaged.add(work.request.chain.ids[work.stop // chunk - 1])

    def forget_images(self) -> None:
        """Another life: images that were taken before are not at hand."""
        self._imaged.clear()

    def hit_of(self, request: SimRequest) -> int:
        """Tokens of a served request's prompt that must be found if nothing was evicted."""
        chunk = self._model.chunk_tokens
        boundary = (len(request.prompt.tokens) - 1) // chunk
        if self._model.state_tokens:
            while boundary and request.chain.ids[boundary - 1] not in self._imaged:
                boundary -= 1
        return boundary * chunk if boundary * chunk >= self._min_load_tokens else 0

    def outputs_of(self, request: SimRequest, memory: RankMemory) -> list[int]:
        """What the model says to the request's prompt, from the oracle alone."""
        key = (request.prompt, request.num_outputs)
        if key not in self._outputs:
            reading = request.prompt.reading()
            reading.extend(request.prompt.tokens)
            self._outputs[key] = list(self._say(reading, request.num_outputs, memory))
        return self._outputs[key]

    def _know(self, request: SimRequest) -> None:
        """Note what every frame of the request must hold."""
        ids = request.chain.ids
        for index in range(len(ids) - 1, -1, -1):
            parent = ids[index - 1] if index else ROOT_CHUNK
            if ChunkRef(GroupId(0), index, ids[index], parent) in self.frames:
                return
            stop = (index + 1) * self._model.chunk_tokens
            for number, group in enumerate(self._model.groups):
                kept = self._model.chunk_tokens
                if group.kind is GroupKind.WINDOW:
                    kept = min(kept, -(-group.window_tokens // group.block_tokens) * group.block_tokens)
                ref = ChunkRef(GroupId(number), index, ids[index], parent)
                self.frames[ref] = _frame_oracle(ref.group, request.reading, stop - kept, stop)

    def _say(self, reading: Reading, outputs: int, memory: RankMemory) -> Iterator[int]:
        for _ in range(outputs):
            folded = [
                memory.fold_expected(GroupId(group), reading, len(reading))
                for group in range(len(self._model.groups))
            ]
            token = next_token(folded, VOCABULARY)
            reading.extend([token])
            yield token


def _frame_oracle(group: GroupId, reading: Reading, first: int, stop: int) -> FrameOracle:
    return lambda memory: memory.expected_frame(group, reading, first, stop)
