"""What is counted, and how a failure is logged: once with its facts, then in summaries.

Every number has a name in `Metric` and a help text in `SPECS`; docs/metrics.md lists them. A
`Recorder` holds them for one process. The Prometheus client is imported only by
`prometheus_collector`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as PrometheusMetric
    from prometheus_client.registry import Collector


class Metric(StrEnum):
    """The names of all numbers. A counter only grows; a gauge is set."""

    LOOKUPS = "lookups"
    LOOKUP_HIT_TOKENS = "lookup_hit_tokens"
    LOOKUP_MISS_TOKENS = "lookup_miss_tokens"
    PROMISED_TOKENS = "promised_tokens"
    REFUSED_PROMISES = "refused_promises"
    LOADED_TOKENS_ARENA = "loaded_tokens_arena"
    LOADED_TOKENS_DISK = "loaded_tokens_disk"
    LOAD_FAILED = "load_failed"
    LOAD_FAILED_TOKENS = "load_failed_tokens"
    LOAD_TIMEOUTS = "load_timeouts"
    LATE_REPORTS = "late_reports"
    SAVES = "saves"
    SAVED_BYTES = "saved_bytes"
    SAVE_FAILED = "save_failed"
    SAVE_SKIPPED_NO_SPACE = "save_skipped_no_space"
    SAVE_CANCELLED = "save_cancelled"
    IMAGES_SKIPPED = "images_skipped"
    DISK_READS = "disk_reads"
    DISK_WRITES = "disk_writes"
    DISK_WRITE_FAILED = "disk_write_failed"
    DISK_WRITE_SKIPPED = "disk_write_skipped"
    DISK_DEGRADED = "disk_degraded"
    CORRUPT_FRAMES = "corrupt_frames"
    EVICTED_ARENA = "evicted_arena"
    EVICTED_DISK = "evicted_disk"
    ARENA_USED_BYTES = "arena_used_bytes"
    DISK_USED_BYTES = "disk_used_bytes"


class MetricKind(StrEnum):
    """How a number may change."""

    COUNTER = "counter"
    GAUGE = "gauge"


class MetricSpec(msgspec.Struct, frozen=True):
    """What a number means.

    Attributes:
        kind: how it may change.
        help: one sentence for people.
        family: its name in an exposition, without prefix; several metrics may share it.
        tier: the label that tells the members of a family apart, or "".
    """

    kind: MetricKind
    help: str
    family: str
    tier: str = ""


def _counter(metric: Metric, text: str) -> tuple[Metric, MetricSpec]:
    return metric, MetricSpec(MetricKind.COUNTER, text, metric.value)


def _gauge(metric: Metric, text: str) -> tuple[Metric, MetricSpec]:
    return metric, MetricSpec(MetricKind.GAUGE, text, metric.value)


def _counter_of_tier(metric: Metric, tier: str, text: str) -> tuple[Metric, MetricSpec]:
    return metric, MetricSpec(MetricKind.COUNTER, text, metric.value.removesuffix(f"_{tier}"), tier)


SPECS: Mapping[Metric, MetricSpec] = dict(
    [
        _counter(Metric.LOOKUPS, "Prompts looked up in the directory."),
        _counter(Metric.LOOKUP_HIT_TOKENS, "Tokens looked up that a tier held beyond the engine's own hit."),
        _counter(Metric.LOOKUP_MISS_TOKENS, "Tokens looked up that no tier held."),
        _counter(Metric.PROMISED_TOKENS, "Tokens the planner told the engine it would load."),
        _counter(
            Metric.REFUSED_PROMISES, "Promises that could not be issued after all, and ended as a recompute."
        ),
        _counter_of_tier(Metric.LOADED_TOKENS_ARENA, "arena", "Tokens brought back into blocks, by tier."),
        _counter_of_tier(Metric.LOADED_TOKENS_DISK, "disk", "Tokens brought back into blocks, by tier."),
        _counter(Metric.LOAD_FAILED, "Loads that ended as a recompute, for whatever reason."),
        _counter(Metric.LOAD_FAILED_TOKENS, "Tokens promised and then recomputed by the engine."),
        _counter(Metric.LOAD_TIMEOUTS, "Loads that failed because they passed load_timeout_s."),
        _counter(Metric.LATE_REPORTS, "Reports for a job that had already ended; they change nothing."),
        _counter(Metric.SAVES, "Frames copied out of blocks into the arena."),
        _counter(Metric.SAVED_BYTES, "Payload bytes copied out of blocks into the arena."),
        _counter(Metric.SAVE_FAILED, "Frames whose copy out of blocks failed."),
        _counter(Metric.SAVE_SKIPPED_NO_SPACE, "Frames not saved because nothing could be evicted for them."),
        _counter(Metric.SAVE_CANCELLED, "Frames whose save was cancelled before its copy began."),
        _counter(
            Metric.IMAGES_SKIPPED,
            "Images offered and not taken: off the chunk grid, or too many saves in flight.",
        ),
        _counter(Metric.DISK_READS, "Frames read from disk."),
        _counter(Metric.DISK_WRITES, "Frames written to disk."),
        _counter(Metric.DISK_WRITE_FAILED, "Frames whose write to disk failed."),
        _counter(Metric.DISK_WRITE_SKIPPED, "Frames not written to disk: full queue, no space, cool-down."),
        _gauge(Metric.DISK_DEGRADED, "1 while the disk cools down after a time-out or an error, else 0."),
        _counter(Metric.CORRUPT_FRAMES, "Frames whose header or checksum did not match; they were removed."),
        _counter_of_tier(Metric.EVICTED_ARENA, "arena", "Frames evicted to make room, by tier."),
        _counter_of_tier(Metric.EVICTED_DISK, "disk", "Frames evicted to make room, by tier."),
        _gauge(Metric.ARENA_USED_BYTES, "Bytes of the arena that hold frames."),
        _gauge(Metric.DISK_USED_BYTES, "Bytes of the disk budget that hold frames."),
    ]
)
"""Every metric's meaning, in the order of `Metric`."""

GAUGES = frozenset(metric for metric, spec in SPECS.items() if spec.kind is MetricKind.GAUGE)


class Recorder:
    """The numbers of one process. Any thread may call any method; none blocks on I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, float] = dict.fromkeys(SPECS, 0)

    def count(self, name: Metric, by: float = 1) -> None:
        """Add ``by`` (>= 0) to a counter.

        Raises:
            ValueError: ``name`` is a gauge or unknown, or ``by`` is negative.
        """
        # A gauge, and a string that is no metric's name, must not open a new entry.
        if by < 0 or name in GAUGES or name not in SPECS:
            raise ValueError(f"count({name!r}, by={by}): want a counter of Metric and by >= 0")
        with self._lock:
            self._values[name] += by

    def gauge(self, name: Metric, value: float) -> None:
        """Set a gauge.

        Raises:
            ValueError: ``name`` is not a gauge.
        """
        if name not in GAUGES:
            raise ValueError(f"gauge({name!r}): not a gauge; use count() or one of {sorted(GAUGES)}")
        with self._lock:
            self._values[name] = value

    def snapshot(self) -> dict[str, float]:
        """All numbers by name at one moment, zeros included; the caller owns the dictionary."""
        with self._lock:
            return {metric.value: value for metric, value in self._values.items()}


def prometheus_collector(recorder: Recorder, labels: Mapping[str, str] | None = None) -> Collector:
    """Make a `prometheus_client` collector that reads ``recorder`` at every scrape.

    Args:
        recorder: read, never changed.
        labels: put on every sample, such as the engine's id and the rank.

    Returns:
        A collector to register; its samples are named ``kvstow_<family>`` and members of a
        family carry the label ``tier``.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    fixed = dict(labels or {})

    class RecorderCollector(Collector):
        def collect(self) -> Iterator[PrometheusMetric]:
            values = recorder.snapshot()
            families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
            for metric, spec in SPECS.items():
                names = [*fixed, *(["tier"] if spec.tier else [])]
                kind = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
                family = families.get(spec.family)
                if family is None:
                    family = families[spec.family] = kind(f"kvstow_{spec.family}", spec.help, labels=names)
                sample = [*fixed.values(), *([spec.tier] if spec.tier else [])]
                family.add_metric(sample, values[metric.value])
            yield from families.values()

    return RecorderCollector()


class _Monotonic(Protocol):
    """The part of `kvstow.clock.Clock` used here; this layer imports no sibling."""

    def monotonic_s(self) -> float: ...


class OnceLogger:
    """Logs the first failure of each kind in full, and the rest as one line per interval.

    The first message of a kind carries the facts: the thing, the sizes, the next step. Later
    ones are only counted, and written together at most once per ``interval_s``, on the next
    call after it has passed (or by `flush`). Any thread may call any method.
    """

    KINDS_MAX = 64
    """Further kinds share the kind ``other``: a kind must be a word, never a key or an id."""

    def __init__(self, logger: logging.Logger, clock: _Monotonic, interval_s: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._unsaid: dict[str, int] = {}
        self._summary_due_s = clock.monotonic_s() + interval_s

    def warn(self, kind: str, message: str) -> None:
        """Something went wrong and kvstow went on as planned (a recompute, a skipped save)."""
        self._log(logging.WARNING, kind, message)

    def error(self, kind: str, message: str) -> None:
        """Something went wrong that a person should look at (a bad disk, a bug)."""
        self._log(logging.ERROR, kind, message)

    def flush(self) -> None:
        """Write what was counted and not yet said; at shutdown."""
        with self._lock:
            summary = self._take_summary()
        if summary:
            self._logger.warning(summary)

    def _log(self, level: int, kind: str, message: str) -> None:
        with self._lock:
            if kind not in self._unsaid and len(self._unsaid) >= self.KINDS_MAX:
                kind = "other"
            is_first = kind not in self._unsaid
            if is_first:
                self._unsaid[kind] = 0
            else:
                self._unsaid[kind] += 1
            is_due = self._clock.monotonic_s() >= self._summary_due_s
            summary = self._take_summary() if is_due else ""
        # Outside the lock: a handler may be slow.
        if is_first:
            self._logger.log(level, "%s: %s", kind, message)
        if summary:
            self._logger.warning(summary)

    def _take_summary(self) -> str:
        self._summary_due_s = self._clock.monotonic_s() + self._interval_s
        more = {kind: count for kind, count in self._unsaid.items() if count}
        self._unsaid = dict.fromkeys(self._unsaid, 0)
        if not more:
            return ""
        counts = ", ".join(f"{kind} x{count}" for kind, count in sorted(more.items()))
        return f"more of what was logged before: {counts}; see the counters (docs/metrics.md)"
