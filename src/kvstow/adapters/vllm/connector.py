"""``StowConnector``: the class that vLLM makes, once for its scheduler and once for each worker.

Nothing is decided here; each hook goes to `SchedulerHalf` or `WorkerHalf`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvstow.adapters.vllm.compat import adapter_identity_of, check_version, log_with_vllm
from kvstow.adapters.vllm.scheduler import SchedulerHalf
from kvstow.adapters.vllm.setup import (
    check_engine,
    check_model,
    hash_tokens_of,
    keep_images,
    read_settings,
    recomputes_last,
    rules_of,
)
from kvstow.adapters.vllm.stats import StatsFeed, StowPromMetrics, StowStats
from kvstow.adapters.vllm.transport import StowHandshake, StowMetadata, StowWorkerMetadata
from kvstow.adapters.vllm.worker import WorkerHalf
from kvstow.errors import InvariantError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class StowConnector(KVConnectorBase_V1, SupportsHMA):
    """kvstow as a vLLM KV connector.

    Raises:
        ConfigError: at start, for settings, a model or an engine that kvstow cannot serve.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        check_version()
        check_model(vllm_config, kv_cache_config)
        settings = read_settings(vllm_config, kv_cache_config)
        check_engine(vllm_config, kv_cache_config, settings)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            keep_images(vllm_config, kv_cache_config, settings)
            rules = rules_of(kv_cache_config, settings.chunk_tokens)
            half = SchedulerHalf(
                settings,
                rules,
                hash_tokens_of(vllm_config, kv_cache_config),
                adapter_identity_of(vllm_config),
                recomputes_last(vllm_config, rules),
            )
            self._scheduler_half = half
            self._stats = StatsFeed(half.recorder)
        else:
            worker = WorkerHalf(vllm_config, kv_cache_config, settings)
            self._worker_half = worker
            self._stats = StatsFeed(worker.recorder)

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise InvariantError("a scheduler's hook was called on a worker's connector")
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise InvariantError("a worker's hook was called on the scheduler's connector")
        return self._worker_half

    # ---- worker ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StowMetadata)
        self._worker.fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StowMetadata)
        self._worker.begin(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only once its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves copy whole chunks after the forward, not layer by layer."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StowMetadata)
        self._worker.copy_snapshots(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = self._worker.take_reports()
        return StowWorkerMetadata(list(reports)) if reports else None

    def shutdown(self) -> None:
        if self._worker_half is not None:
            self._worker_half.shutdown()
        if self._scheduler_half is not None:
            self._scheduler_half.shutdown()

    # ---- scheduler ---------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a later miss, nothing worse."""
        return False

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.open(
            {rank: hello for rank, hello in metadata.items() if isinstance(hello, StowHandshake)}
        )

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.worker_output(connector_output)

    def reset_cache(self) -> bool | None:
        """Forget everything; for vLLM's reset of the connector's cache."""
        return self._scheduler.forget()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.planner.holds_blocks

    def has_pending_push_work(self) -> bool:
        return self._scheduler.planner.wants_steps

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    # ---- numbers -----------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler_half is not None:
            self._scheduler_half.measure()
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return StowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return StowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
