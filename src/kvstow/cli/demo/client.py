"""Asking the server as any client would, and reading the counters it publishes."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from kvstow.cli.demo.errors import DemoError
from kvstow.clock import Clock

_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_QUERIES = "vllm:prefix_cache_queries_total"
_SETTLE_TRIES = 200


@dataclass(frozen=True)
class Counters:
    """vLLM's own counts of prompt tokens, by where their keys and values came from.

    Attributes:
        seen: prompt tokens looked up in the engine's own cache.
        engine: found there.
        arena: restored from kvstow's DRAM.
        disk: restored from kvstow's disk.
        unknown: restored from a place that the connector did not name.
    """

    seen: int
    engine: int
    arena: int
    disk: int
    unknown: int

    def since(self, before: Counters) -> Counters:
        """What was counted after ``before``."""
        return Counters(
            seen=self.seen - before.seen,
            engine=self.engine - before.engine,
            arena=self.arena - before.arena,
            disk=self.disk - before.disk,
            unknown=self.unknown - before.unknown,
        )

    @property
    def restored(self) -> int:
        """Tokens that kvstow brought back, from wherever."""
        return self.arena + self.disk + self.unknown


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: all of it.
        ttft_s: from sending the request to the first piece of text, on the client's clock.
        prompt_tokens: length of the prompt as the server counted it.
    """

    text: str
    ttft_s: float
    prompt_tokens: int


class Client:
    """A streaming client of the OpenAI API. Used by one thread; every call blocks."""

    def __init__(self, url: str, model: str, clock: Clock, timeout_s: float = 300.0) -> None:
        self._url = url
        self._model = model
        self._clock = clock
        self._api = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s)

    def ask(self, prompt: str, tokens_max: int) -> Answer:
        """Ask greedily, with a fixed seed; the same prompt has the same answer."""
        begun_s = self._clock.monotonic_s()
        first_s: float | None = None
        pieces: list[str] = []
        prompt_tokens = 0
        stream = self._api.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.0,
            seed=0,
            max_tokens=tokens_max,
            stream=True,
            stream_options={"include_usage": True},
        )
        for event in stream:
            if event.usage is not None:
                prompt_tokens = event.usage.prompt_tokens
            if event.choices and event.choices[0].delta.content:
                first_s = first_s if first_s is not None else self._clock.monotonic_s()
                pieces.append(event.choices[0].delta.content)
        ended_s = self._clock.monotonic_s() if first_s is None else first_s
        return Answer(text="".join(pieces), ttft_s=ended_s - begun_s, prompt_tokens=prompt_tokens)

    def ask_counted(self, prompt: str, tokens_max: int) -> tuple[Answer, Counters]:
        """Ask, and say what the server counted for this one request.

        Raises:
            DemoError: the counts are not those of one request with this prompt.
        """
        before = self.counters()
        answer = self.ask(prompt, tokens_max)
        counted = self.counters().since(before)
        # The server publishes a step's counts after it streams that step's text.
        for _ in range(_SETTLE_TRIES):
            if counted.seen >= answer.prompt_tokens:
                break
            counted = self.counters().since(before)
        if counted.seen < answer.prompt_tokens:
            raise DemoError(
                f"the server counted {counted.seen} prompt tokens after a prompt of {answer.prompt_tokens}; "
                "is another client using it?"
            )
        return answer, counted

    def counters(self) -> Counters:
        """The counters as they are now."""
        return parse_counters(httpx.get(f"{self._url}/metrics", timeout=10.0).raise_for_status().text)


def parse_counters(exposition: str) -> Counters:
    """Read `Counters` from the text of ``/metrics``; a counter that is not there yet is 0."""
    seen = 0
    sources: dict[str, int] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == _QUERIES:
                seen += int(sample.value)
            elif sample.name == _BY_SOURCE:
                source = sample.labels["source"]
                sources[source] = sources.get(source, 0) + int(sample.value)
    return Counters(
        seen=seen,
        engine=sources.pop("device", 0),
        arena=sources.pop("host", 0),
        disk=sources.pop("disk", 0),
        unknown=sum(sources.values()),
    )
