"""A worker's half of the connector: builds one rank's tiers, then passes orders and reports.

Runs in the worker process, on its thread; all I/O is on the threads of `lifecycle.worker`.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvstow import __version__
from kvstow.adapters.vllm.blocks import TensorBlocks
from kvstow.adapters.vllm.caches import agreed_digest, attention_backends, engine_layout, group_tensors
from kvstow.adapters.vllm.compat import worker_grace_s
from kvstow.adapters.vllm.identity import namespace_parts
from kvstow.adapters.vllm.scales import Scales, find_scales
from kvstow.adapters.vllm.setup import block_tokens_of, replicated_groups
from kvstow.adapters.vllm.tiers import Namespaces, open_tiers
from kvstow.adapters.vllm.transport import StowHandshake, StowMetadata
from kvstow.clock import SystemClock
from kvstow.codec.select import make_codec
from kvstow.config.settings import GIB, Settings
from kvstow.errors import ConfigError, StoreError
from kvstow.keys.ids import Rank
from kvstow.keys.namespace import explain, namespace_digest, rank_namespace
from kvstow.layout.discover import describe
from kvstow.layout.fingerprint import layout_digest
from kvstow.layout.geometry import Layout
from kvstow.lifecycle.executors import ThreadExecutor
from kvstow.lifecycle.messages import Held, Hello, Report
from kvstow.lifecycle.self_test import SELF_TEST_S_MAX, SelfTest
from kvstow.lifecycle.worker import Executors, Worker, WorkerLimits
from kvstow.metrics import Recorder
from kvstow.stores.arena import Arena
from kvstow.stores.base import Store

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

_TRIAL_LIMITS = WorkerLimits(
    load_timeout_s=SELF_TEST_S_MAX, save_timeout_s=SELF_TEST_S_MAX, shutdown_s_max=0.0, load_parts=1
)
"""Those of a self-test: no setting makes it fail."""


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
        self._all_registered = False
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
        scales = find_scales(self._vllm_config, self._kv_cache_config, kv_caches)
        layout, regions = engine_layout(
            self._kv_cache_config, kv_caches, self._settings.chunk_tokens, scales.carried
        )
        layout = _with_replicas(layout, replicated_groups(self._vllm_config, self._kv_cache_config))
        for line in describe(layout):
            logger.info("kvstow: rank %d layout: %s", rank, line)
        namespaces = self._namespaces(rank, layout, scales)
        codecs = [
            make_codec(group, regions, threads=self._settings.copy_threads, prefer=self._settings.codec)
            for group in layout.groups
        ]
        tiers = open_tiers(
            self._vllm_config, self._kv_cache_config, self._settings, layout, namespaces, self._clock
        )
        self._arena = tiers.arena
        if self._all_registered:
            self._arena.prefault(PREFAULT_STEP_BYTES)
        executors = self._executors(rank)
        make_worker = partial(
            Worker,
            rank,
            namespaces.own,
            layout,
            codecs,
            disk=tiers.disk,
            executors=executors,
            clock=self._clock,
            first_namespace=namespaces.first,
        )
        self._worker = make_worker(arena=tiers.arena, limits=self._limits(rank), recorder=self.recorder)
        if self._settings.self_test:
            # Slots that this rank does not fill are the first rank's to test: it uses some of its own.
            arena = tiers.arena
            if not all(map(arena.fills, layout.replicated)):
                arena = Arena((1,) * len(layout.groups), tiers.frame_bytes, 1)
            # On a worker of its own: what it reports and counts is for nobody else.
            trial = make_worker(arena=arena, limits=_TRIAL_LIMITS, recorder=Recorder())
            tensors = group_tensors(self._kv_cache_config, kv_caches, scales.carried)
            blocks = TensorBlocks(tensors, regions, self._kv_cache_config.num_blocks)
            names = [codec.name for codec in codecs]
            test = SelfTest(trial, layout, blocks, arena, executors.writer, names, self._clock)
            self._run_self_test(
                rank, test, with_disk=tiers.disk is not None and self._settings.saves and not tiers.elsewhere
            )
        # After the self-test, which removes what one before it may have left.
        held = self._inventory(rank, tiers.disk)
        # What cannot be listed is not asked for anything.
        disk_frames = tiers.disk_frames if held is not None else (0,) * len(layout.groups)
        self._hello = Hello(
            rank=rank,
            world_size=world_size,
            namespace=namespaces.agreed,
            chunk_tokens=layout.chunk_tokens,
            rules=layout.rules,
            arena_frame_bytes=tiers.arena_frame_bytes,
            disk_frame_bytes=tiers.disk_frame_bytes,
            arena_slots=tiers.arena_slots,
            disk_frames=disk_frames,
            inventory=held or (),
            version=__version__,
        )
        logger.info(
            "kvstow: rank %d of %d: codec %s, arena %.2f GiB (%s frames by group), disk %s (%s, %d found)",
            rank,
            world_size,
            codecs[0].name,
            tiers.arena.size_bytes / GIB,
            " ".join(map(str, tiers.arena_slots)),
            self._settings.disk_path if held is not None else "off",
            " ".join(map(str, disk_frames)),
            len(held or ()),
        )

    def handshake(self) -> StowHandshake | None:
        """The rank's hello; the engine asks for it when all ranks have registered.

        From here on the arena's pages are brought in. Earlier, a rank that is later than others would
        measure the memory that they have left, and hold the engine's whole budget against it.
        """
        if self._arena is not None and not self._all_registered:
            self._all_registered = True
            self._arena.prefault(PREFAULT_STEP_BYTES)
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

    def copy_snapshots(self, metadata: StowMetadata) -> None:
        """After the forward, and before the next: copy what that may change.

        Other saves are kept by the planner's holds and fences; nobody waits for them here.
        """
        if self._worker is not None:
            self._worker.copy_snapshots(metadata.order)

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

    def _run_self_test(self, rank: Rank, test: SelfTest, *, with_disk: bool) -> None:
        """Refuse the start if bytes do not come back as they were."""
        try:
            tested = test.run(with_disk=with_disk)
        except ConfigError:
            self.shutdown()
            raise
        logger.info(
            "kvstow: rank %d self-test: %d frames there and back through %s, %d bytes in all groups, %.3f s",
            rank,
            tested.frames,
            "arena and disk" if tested.disk else "the arena",
            tested.payload_bytes,
            tested.took_s,
        )

    def _namespaces(self, rank: Rank, layout: Layout, scales: Scales) -> Namespaces:
        parts = namespace_parts(
            self._vllm_config,
            self._settings,
            block_tokens_of(self._kv_cache_config),
            agreed_digest(layout),
            attention_backends(self._vllm_config, self._kv_cache_config),
        )
        logger.info("kvstow: rank %d %s", rank, explain(parts))
        agreed = namespace_digest(parts)
        inside = scales.into(layout_digest(layout))
        own, first = rank_namespace(agreed, rank, inside), rank_namespace(agreed, Rank(0), inside)
        return Namespaces(agreed, own, first)

    def _inventory(self, rank: Rank, disk: Store | None) -> tuple[Held, ...] | None:
        """What is on disk; None without a disk, or with one line if it cannot be listed."""
        if disk is None:
            return None
        try:
            return tuple(Held(item.ref, item.touched_s) for item in disk.scan())
        except StoreError as error:
            logger.error(
                "kvstow: rank %d runs without a disk tier: %s; repair the folder, and restart", rank, error
            )
            return None

    def _limits(self, rank: Rank) -> WorkerLimits:
        return WorkerLimits(
            load_timeout_s=self._settings.load_timeout_s,
            save_timeout_s=self._settings.save_timeout_s,
            shutdown_s_max=self._shutdown_bound_s(rank),
            load_parts=self._settings.load_threads,
        )

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


def _with_replicas(layout: Layout, replicated: frozenset[int]) -> Layout:
    groups = tuple(
        msgspec.structs.replace(group, replicated=group.group in replicated) for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups)
