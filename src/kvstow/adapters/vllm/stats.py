"""kvstow's numbers on vLLM's ``/metrics``, as ``kvstow_*`` with vLLM's own labels.

Workers and the scheduler each send what was counted since the last step; vLLM adds the parts up
and hands them to the process that serves ``/metrics``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstow.metrics import GAUGES, SPECS, Metric, Recorder


@dataclass
class StowStats(KVConnectorStats):
    """Counter increments and gauge values since the last step, by metric name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = dict(self.data)
        for name, value in other.data.items():
            # Gauges come from the scheduler only; the later one holds.
            merged[name] = value if Metric(name) in GAUGES else merged.get(name, 0) + value
        return StowStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in sorted(self.data.items()) if value}

    def is_empty(self) -> bool:
        return not self.data


class StatsFeed:
    """Turns a recorder's totals into what changed since the last call."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sent: dict[str, float] = {}

    def take(self) -> StowStats | None:
        """What changed, or None if nothing did."""
        totals = self._recorder.snapshot()
        changed: dict[str, float] = {}
        for name, value in totals.items():
            if value == self._sent.get(name, 0):
                continue
            is_gauge = Metric(name) in GAUGES
            changed[name] = value if is_gauge else value - self._sent.get(name, 0)
        self._sent = totals
        return StowStats(data=changed) if changed else None


class StowPromMetrics(KVConnectorPromMetrics):
    """Registers every metric of kvstow with vLLM's Prometheus registry.

    A process may start one engine after another. vLLM then drops the metrics of its own that the
    earlier one registered; these are dropped here.
    """

    _registered: ClassVar[list[Any]] = []

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._unregister_earlier()
        self._by_engine: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        families: dict[str, Any] = {}
        for metric, spec in SPECS.items():
            make = self._gauge_cls if metric in GAUGES else self._counter_cls
            labels = [*labelnames, "tier"] if spec.tier else labelnames
            if spec.family not in families:
                families[spec.family] = make(
                    name=f"kvstow_{spec.family}", documentation=spec.help, labelnames=labels
                )
                self._registered.append(families[spec.family])
            for engine, values in per_engine_labelvalues.items():
                sample = [*values, spec.tier] if spec.tier else values
                self._by_engine[engine][metric.value] = families[spec.family].labels(*sample)

    @classmethod
    def _unregister_earlier(cls) -> None:
        for family in cls._registered:
            # Not every kind of metric is in this registry: Ray keeps its own.
            with suppress(KeyError):
                REGISTRY.unregister(family)
        cls._registered.clear()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        metrics = self._by_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if Metric(name) in GAUGES:
                metrics[name].set(value)
            else:
                metrics[name].inc(value)
