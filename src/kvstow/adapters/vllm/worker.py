"""A worker's half of the connector: builds one rank's tiers, then passes orders and reports.

Runs in the worker process, on its thread; all I/O is on the threads of `lifecycle.worker`.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvstow import __version__
from kvstow.adapters.vllm.caches import agreed_digest, attention_backends, engine_layout
from kvstow.adapters.vllm.compat import worker_grace_s
from kvstow.adapters.vllm.identity import namespace_parts
from kvstow.adapters.vllm.setup import block_tokens_of
from kvstow.adapters.vllm.transport import StowHandshake, StowMetadata
from kvstow.clock import SystemClock
from kvstow.codec.select import make_codec
from kvstow.config.settings import GIB, Settings, resolve_arena_bytes
from kvstow.errors import StoreError
from kvstow.keys.ids import NamespaceDigest, Rank
from kvstow.keys.namespace import explain, namespace_digest, rank_namespace
from kvstow.layout.discover import describe
from kvstow.layout.fingerprint import layout_digest
from kvstow.layout.geometry import GroupId, Layout
from kvstow.lifecycle.executors import ThreadExecutor
from kvstow.lifecycle.messages import Held, Hello, Report
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena, slots_for
from kvstow.stores.disk.root import DiskRoot
from kvstow.stores.disk.store import DiskStore
from kvstow.stores.framing import frame_bytes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

PREFAULT_STEP_BYTES = 8 << 20
EXIT_S = 1.0
"""What a worker keeps of vLLM's patience at shutdown, to say what it dropped and to end."""
IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for a load to end, instead of spinning."""


class WorkerHalf:
    """One rank.

    Args:
        vllm_config: the engine's configuration.
        kv_cache_config: the engine's groups.
        settings: what the user chose.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._clock = SystemClock()
        self.recorder = Recorder()
        self._worker: Worker | None = None
        self._hello: Hello | None = None
        self._arena: Arena | None = None
        self._reports: tuple[Report, ...] = ()
        self._is_idle = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Measure the layout, make the tiers, start the threads.

        Raises:
            ConfigError: the layout, the budgets or the model cannot be served.
        """
        self.shutdown()  # the engine may register anew: nothing of the old tensors stays in use
        parallel = self._vllm_config.parallel_config
        rank, world_size = Rank(parallel.rank), parallel.world_size
        layout, regions = engine_layout(self._kv_cache_config, kv_caches, self._settings.chunk_tokens)
        for line in describe(layout):
            logger.info("kvstow: rank %d layout: %s", rank, line)
        agreed, own = self._namespaces(rank, layout)
        codecs = [
            make_codec(group, regions, threads=self._settings.copy_threads, prefer=self._settings.codec)
            for group in layout.groups
        ]
        frames = tuple(
            frame_bytes(layout.payload_bytes(GroupId(index))) for index in range(len(layout.groups))
        )
        arena_bytes = resolve_arena_bytes(self._settings, psutil.virtual_memory().available) // world_size
        slots = slots_for(arena_bytes, frames, self._settings.disk_readers)
        self._arena = Arena(slots, frames, self._settings.disk_readers)
        self._arena.prefault(PREFAULT_STEP_BYTES)
        disk_bytes = int(self._settings.disk_gib * GIB) // world_size
        disk = self._open_disk(rank, world_size, disk_bytes, own)
        disk_frames = disk_bytes // sum(frames) if disk is not None else 0
        held = () if disk is None else tuple(Held(item.ref, item.touched_s) for item in disk.scan())
        self._hello = Hello(
            rank=rank,
            world_size=world_size,
            namespace=agreed,
            chunk_tokens=layout.chunk_tokens,
            rules=layout.rules,
            frame_bytes=frames,
            arena_slots=slots,
            disk_frames=(disk_frames,) * len(frames),
            inventory=held,
            version=__version__,
        )
        self._worker = Worker(
            rank,
            own,
            layout,
            codecs,
            self._arena,
            disk,
            WorkerLimits(
                load_timeout_s=self._settings.load_timeout_s,
                save_timeout_s=self._settings.save_timeout_s,
                shutdown_s_max=self._shutdown_bound_s(rank),
                load_parts=self._settings.load_threads,
            ),
            self._executors(rank),
            self._clock,
            self.recorder,
        )
        logger.info(
            "kvstow: rank %d of %d: codec %s, arena %.2f GiB (%d chunks), disk %s (%d chunks, %d found)",
            rank,
            world_size,
            codecs[0].name,
            self._arena.size_bytes / GIB,
            slots[0],
            self._settings.disk_path if disk is not None else "off",
            disk_frames,
            len(held),
        )

    def handshake(self) -> StowHandshake | None:
        """The rank's hello."""
        return StowHandshake(self._hello) if self._hello is not None else None

    def fence(self, metadata: StowMetadata) -> None:
        """Before the forward: no copy reads blocks that the engine took back."""
        if self._worker is not None:
            self._worker.fence(metadata.order.fences)

    def begin(self, metadata: StowMetadata) -> None:
        """After the forward: begin what the step orders."""
        self._is_idle = metadata.is_idle
        if self._worker is not None:
            self._worker.submit(metadata.order)

    def results(self) -> KVConnectorTransferResults:
        """What ended; the reports for the planner wait in `take_reports`."""
        if self._worker is None:
            return KVConnectorTransferResults()
        if self._is_idle:
            self._worker.wait_for_news(IDLE_WAIT_S)
        self._reports, loads, sent = self._worker.poll()
        return KVConnectorTransferResults(
            finished_sending=set(sent),
            finished_recving={request for request, _ in loads},
            failed_recving={request for request, loaded in loads if not loaded},
        )

    def take_reports(self) -> tuple[Report, ...]:
        """The step's reports, once."""
        reports, self._reports = self._reports, ()
        return reports

    def shutdown(self) -> None:
        """Stop the threads, let queued writes finish within their bound, free the arena."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._arena is not None:
            self._arena.close()
        self._worker, self._arena = None, None

    # ---- inside ------------------------------------------------------------------------

    def _namespaces(self, rank: Rank, layout: Layout) -> tuple[NamespaceDigest, NamespaceDigest]:
        parts = namespace_parts(
            self._vllm_config,
            self._settings,
            block_tokens_of(self._kv_cache_config),
            agreed_digest(layout),
            attention_backends(self._vllm_config, self._kv_cache_config),
        )
        logger.info("kvstow: rank %d %s", rank, explain(parts))
        agreed = namespace_digest(parts)
        return agreed, rank_namespace(agreed, rank, layout_digest(layout))

    def _open_disk(
        self, rank: Rank, world_size: int, budget_bytes: int, namespace: NamespaceDigest
    ) -> DiskStore | None:
        """The disk tier, or None with one line that says why and what to do."""
        if self._settings.disk_path is None:
            return None
        parallel = self._vllm_config.parallel_config
        root = Path(self._settings.disk_path)
        if parallel.data_parallel_index:
            # Each replica is an engine, with a folder and budgets of its own. vLLM tells dense
            # replicas apart by this index only.
            root /= f"dp{parallel.data_parallel_index}"
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        try:
            claimed = DiskRoot.open(
                root,
                instance=str(transfer.engine_id),
                rank=rank,
                world_size=world_size,
                budget_bytes=budget_bytes,
                clock=self._clock,
            )
            return DiskStore(claimed, namespace)
        except StoreError as error:
            logger.error(
                "kvstow: rank %d runs without a disk tier: %s; give this engine a disk_path of its own",
                rank,
                error,
            )
            return None

    def _shutdown_bound_s(self, rank: Rank) -> float:
        """How long queued writes may take at the end: vLLM's patience is a bound too."""
        chosen_s = self._settings.shutdown_s_max
        grace_s = worker_grace_s(self._vllm_config.parallel_config.distributed_executor_backend)
        if grace_s is None or chosen_s + EXIT_S <= grace_s:
            return chosen_s
        bound_s = max(0.0, grace_s - EXIT_S)
        logger.info(
            "kvstow: rank %d: at shutdown queued writes get %g s, not shutdown_s_max=%g: vLLM kills a worker "
            "%g s after it asked it to end; set VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=%d for more",
            rank,
            bound_s,
            chosen_s,
            grace_s,
            math.ceil(chosen_s + EXIT_S),
        )
        return bound_s

    def _executors(self, rank: Rank) -> Executors:
        settings = self._settings
        # Reads are queued frame by frame: a load of a long prompt is many of them.
        frames_max = settings.pending_loads_max * 1024
        return Executors(
            saver=ThreadExecutor(f"kvstow-{rank}-save", 1, settings.pending_saves_max),
            loader=ThreadExecutor(
                f"kvstow-{rank}-load",
                settings.load_threads,
                settings.pending_loads_max * settings.load_threads,
            ),
            readers=ThreadExecutor(f"kvstow-{rank}-read", settings.disk_readers, frames_max),
            # One writer: a removal and a later write of one name must not pass each other.
            writer=ThreadExecutor(f"kvstow-{rank}-write", 1, 2 * settings.pending_writes_max),
        )
