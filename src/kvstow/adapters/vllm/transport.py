"""kvstow's messages in the envelopes that vLLM carries between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow.lifecycle.messages import Hello, Report, WorkOrder


@dataclass
class StowHandshake(KVConnectorHandshakeMetadata):
    """A worker's hello, collected by the engine before the first request."""

    hello: Hello


@dataclass
class StowMetadata(KVConnectorMetadata):
    """One step's orders, the same for every worker.

    Attributes:
        order: what to do.
        is_idle: the step computes nothing: the engine only waits for loads.
    """

    order: WorkOrder
    is_idle: bool


@dataclass
class StowWorkerMetadata(KVConnectorWorkerMetadata):
    """The reports of one step, of all workers that have something to say."""

    reports: list[Report] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StowWorkerMetadata)
        return StowWorkerMetadata(self.reports + other.reports)
