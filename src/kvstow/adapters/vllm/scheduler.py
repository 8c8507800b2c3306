"""The scheduler's half of the connector: vLLM's events to the planner's, and its answers back.

Runs in the engine-core process, on its thread. Does no I/O.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.request import RequestStatus

from kvstow.adapters.vllm.compat import (
    NULL_BLOCK,
    AdapterIdentity,
    block_hashes_are_stable,
    block_tables,
    boundary_states,
    hit_sources,
)
from kvstow.adapters.vllm.lora import AdapterCheck, AdapterDigests, AdapterState
from kvstow.adapters.vllm.request_keys import RequestKeys
from kvstow.adapters.vllm.transport import StowHandshake, StowMetadata, StowWorkerMetadata
from kvstow.clock import SystemClock
from kvstow.config.settings import Settings
from kvstow.keys.digest import DIGEST_BYTES
from kvstow.layout.geometry import NO_BLOCK, BlockId, GroupId, GroupKind
from kvstow.layout.resume import ResumeRule
from kvstow.lifecycle.limits import BlockTables, PlannerLimits
from kvstow.lifecycle.messages import ImageOffer, RequestId
from kvstow.lifecycle.planner import Planner
from kvstow.lifecycle.requests import Lookup, Phase
from kvstow.metrics import Metric, OnceLogger, Recorder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class _Known:
    """A live request and its chunk ids, once they can be made."""

    __slots__ = ("adapter", "computed", "is_stale", "keys", "request")

    def __init__(self, request: Request, adapter: AdapterCheck | None) -> None:
        self.request = request
        self.adapter = adapter
        self.keys: RequestKeys | None = None
        self.computed: int | None = None  # the engine's own hit, until the lookup is counted
        self.is_stale = False  # what it has computed is older than the last reset


class SchedulerHalf:
    """Feeds the planner.

    Args:
        settings: what the user chose.
        rules: what a resume needs, by group.
        hash_tokens: tokens that one of the engine's block hashes covers.
        adapter_identity: by what the engine's own caches tell LoRA adapters apart.
        recomputes_last: whether the last token of a hit is left to compute: a draft's entry for it is made
            from the token after it, which the hit's chunks do not name.
    """

    def __init__(
        self,
        settings: Settings,
        rules: tuple[ResumeRule, ...],
        hash_tokens: int,
        adapter_identity: AdapterIdentity,
        recomputes_last: bool = False,
    ) -> None:
        self._settings = settings
        self._hash_tokens = hash_tokens
        self._adapter_identity = adapter_identity
        self._left = 1 if recomputes_last else 0
        self.recorder = Recorder()
        limits = PlannerLimits(
            chunk_tokens=settings.chunk_tokens,
            rules=rules,
            loads=settings.loads,
            saves=settings.saves,
            min_load_tokens=settings.load_tokens_min,
            load_timeout_s=settings.load_timeout_s,
            pending_loads_max=settings.pending_loads_max,
            pending_saves_max=settings.pending_saves_max,
            pending_writes_max=settings.pending_writes_max if settings.disk_path else 0,
            disk_cooldown_s=settings.disk_cooldown_s,
        )
        clock = SystemClock()
        self.planner = Planner(limits, clock, self.recorder)
        self._failures = OnceLogger(logger, clock)
        self._known: dict[str, _Known] = {}
        self._adapters = AdapterDigests(clock, settings.load_timeout_s)
        self._cache_manager: KVCacheManager | None = None
        self._use_engine_hashes: bool | None = None
        self._era = b""
        # What a chunk takes on all ranks together, by group.
        self._arena_frame_bytes: list[int] = []
        self._disk_frame_bytes: list[int] = []
        # Their tables have null blocks: outside of windows, and between states.
        self._has_nulls = [rule.kind is not GroupKind.PAGED for rule in rules]
        self._takes_snapshots = settings.saves and any(self._has_nulls)

    # ---- start -------------------------------------------------------------------------

    def open(self, handshakes: Mapping[Any, StowHandshake]) -> None:
        """Take the workers' hellos; raises ConfigError if they disagree."""
        hellos = [handshake.hello for handshake in handshakes.values()]
        self._arena_frame_bytes = _summed([hello.arena_frame_bytes for hello in hellos])
        self._disk_frame_bytes = _summed([hello.disk_frame_bytes for hello in hellos])
        self.planner.open(hellos)
        directory = self.planner.directory
        for group in directory.group_ids:
            logger.info(
                "kvstow: group %d: chunk of %d tokens = %d bytes a frame on rank 0; arena holds %d chunks; "
                "disk holds %d, %d found there",
                group,
                self._settings.chunk_tokens,
                hellos[0].arena_frame_bytes[group],
                directory.arena_slots(group),
                min(hello.disk_frames[group] for hello in hellos),
                directory.disk_in_use(group),
            )

    def bind_cache_manager(self, manager: KVCacheManager) -> None:
        """Keep the engine's cache manager, to ask it for block tables."""
        self._cache_manager = manager

    # ---- the engine's events -----------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """A request arrived."""
        adapter = None
        lora = request.lora_request
        if lora is not None:
            adapter = self._adapters.check(self._adapter_identity(lora), lora.lora_path)
        self._known[request.request_id] = _Known(request, adapter)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed`` to load, and whether loading is asynchronous; polled."""
        if request.skip_reading_prefix_cache or _wants_every_token(request):
            return 0, False
        known = self._known.get(request.request_id)
        if known is None or not self._is_cacheable(known):
            return 0, False
        keys = self._keys(known)
        if keys is None:
            return None, False
        match = self.planner.match(
            RequestId(request.request_id), keys.update(request), request.num_tokens, computed
        )
        if match.lookup is Lookup.PENDING:
            return None, False
        known.computed = computed
        # All of the chunk is loaded; what the engine computes again it writes where that lies.
        return max(0, match.tokens - self._left), match.lookup is Lookup.HIT

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The engine gave the request blocks and expects ``external`` tokens to be loaded."""
        self._count_lookup(request, external)
        tables = self._tables(blocks.get_block_ids()) if external else ()
        self.planner.allocated(RequestId(request.request_id), tables, external and external + self._left)

    def hit_sources(self, request: Request, external: int) -> dict[CacheHitSource, int]:
        """Which tier the promised tokens come from."""
        tokens = self.planner.promised_by_tier(RequestId(request.request_id))
        left = self._left
        for tier, count in tokens.items():
            tokens[tier] = max(0, count - left)
            left -= count - tokens[tier]
        return hit_sources(tokens, external)

    def build_metadata(self, output: SchedulerOutput) -> StowMetadata:
        """Note what the step means for saves, and take the planner's orders."""
        find_table = block_tables(output, self._cache_manager)

        def tables(request_id: str) -> BlockTables:
            return self._tables(find_table(request_id))

        self._note_preemptions(output)
        for request_id in output.num_scheduled_tokens:
            known = self._known.get(request_id)
            if known is not None:
                self._note_progress(known, partial(tables, request_id))
        if self._takes_snapshots:
            self._note_snapshots(output, tables)
        return StowMetadata(self.planner.step(), is_idle=output.total_num_scheduled_tokens == 0)

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Reports came back from the workers."""
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, StowWorkerMetadata):
            for report in metadata.reports:
                self.planner.report(report)

    def finished(self, request: Request, blocks: tuple[list[int], ...]) -> bool:
        """The request ended; whether its blocks must wait for a save."""
        self._note_error(request)
        known = self._known.pop(request.request_id, None)
        if known is not None and blocks:
            self._note_progress(known, lambda: self._tables(blocks))
        return self.planner.finished(RequestId(request.request_id))

    def forget(self) -> bool:
        """Find nothing again that was saved until now; whether no copy out of blocks is in flight.

        vLLM asks for it when weights were changed in place, too, and tells nobody. So from here on chunks
        have names of their own: what is in flight cannot be hit, and a later start, with the weights
        that the files hold, does not find what these have computed.
        """
        self._era = secrets.token_bytes(DIGEST_BYTES)
        for known in self._known.values():
            known.is_stale = known.request.num_computed_tokens > 0
            known.keys = None
        self.planner.forget_all()
        return not self.planner.saves_in_flight

    def shutdown(self) -> None:
        """End what runs beside the scheduler's thread."""
        self._adapters.close()

    def measure(self) -> None:
        """Set the gauges of what is in use."""
        directory = self.planner.directory
        arena = disk = 0
        for group in directory.group_ids:
            arena += directory.arena_in_use(group) * self._arena_frame_bytes[group]
            disk += directory.disk_in_use(group) * self._disk_frame_bytes[group]
        self.recorder.gauge(Metric.ARENA_USED_BYTES, arena)
        self.recorder.gauge(Metric.DISK_USED_BYTES, disk)

    # ---- inside ------------------------------------------------------------------------

    def _note_error(self, request: Request) -> None:
        """Say so where a load that failed has become an error to the client."""
        phase = self.planner.phase_of(RequestId(request.request_id))
        if request.status is RequestStatus.FINISHED_ERROR and phase in (Phase.LOADING, Phase.FAILED):
            self._failures.error(
                "kv_load_failure_policy",
                f"request {request.request_id} failed and could recompute: kv_load_failure_policy='fail' "
                "holds, set by what is around this connector; set it to 'recompute' in --kv-transfer-config, "
                "beside MultiConnector",
            )

    def _count_lookup(self, request: Request, external: int) -> None:
        """Count a lookup when the engine admits the request: until then it is only polled."""
        known = self._known.get(request.request_id)
        if known is None or known.computed is None:
            return
        self.recorder.count(Metric.LOOKUPS)
        self.recorder.count(Metric.LOOKUP_HIT_TOKENS, external)
        self.recorder.count(Metric.LOOKUP_MISS_TOKENS, max(0, request.num_tokens - known.computed - external))
        known.computed = None

    def _note_preemptions(self, output: SchedulerOutput) -> None:
        if not (self.planner.saves_in_flight or self._takes_snapshots):
            return
        reset = output.preempted_req_ids or ()
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id, known in self._known.items():
            if (
                known.request.status is RequestStatus.PREEMPTED
                or request_id in reset
                or request_id in resumed
            ):
                self.planner.preempted(RequestId(request_id))

    def _note_progress(self, known: _Known, blocks: Any) -> None:
        if not self._may_save(known):
            return
        keys = self._keys(known)
        if keys is None:
            return
        request = known.request
        # Tokens of this very step are not computed yet; sampled ones that may still be
        # rejected have no chunk id yet.
        computed = request.num_computed_tokens
        if self._settings.save == "prompt":
            computed = min(computed, request.num_prompt_tokens)
        self.planner.progress(RequestId(request.request_id), keys.update(request), computed, blocks)

    def _note_snapshots(self, output: SchedulerOutput, tables: Callable[[str], BlockTables]) -> None:
        """What this step's forward completes in windows, and the states that it leaves behind."""
        offers = boundary_states(output)
        for request_id in {**output.num_scheduled_tokens, **offers}:
            known = self._known.get(request_id)
            keys = self._keys(known) if known is not None and self._may_save(known) else None
            if known is None or keys is None:
                continue
            request = known.request
            computed = request.num_computed_tokens + output.num_scheduled_tokens.get(request_id, 0)
            # A draft that may still be rejected has no chunk id.
            computed = min(computed, request.num_tokens)
            if self._settings.save == "prompt":
                computed = min(computed, request.num_prompt_tokens)
            images = [
                ImageOffer(GroupId(group), boundary, BlockId(block))
                for group, block, boundary in offers.get(request_id, ())
            ]
            self.planner.snapshot(
                RequestId(request_id), keys.update(request), computed, partial(tables, request_id), images
            )

    def _tables(self, blocks: Sequence[Sequence[int]]) -> BlockTables:
        """The engine's block ids, with no block where it has its null block."""
        return [
            [NO_BLOCK if block == NULL_BLOCK else BlockId(block) for block in table]
            if has_nulls
            else cast("Sequence[BlockId]", table)
            for table, has_nulls in zip(blocks, self._has_nulls, strict=True)
        ]

    @staticmethod
    def _is_cacheable(known: _Known) -> bool:
        return known.adapter is None or known.adapter.state is not AdapterState.UNUSABLE

    def _may_save(self, known: _Known) -> bool:
        is_replaced = known.adapter is not None and known.adapter.is_replaced
        return self._is_cacheable(known) and not is_replaced and not known.is_stale

    def _keys(self, known: _Known) -> RequestKeys | None:
        """The request's chunk ids, or None while its adapter is being read."""
        if known.keys is not None:
            return known.keys
        digest = b""
        if known.adapter is not None:
            if known.adapter.state is AdapterState.READING:
                return None
            digest = known.adapter.digest
        if self._use_engine_hashes is None:
            # The seed is set after the connector was made, before the first request.
            self._use_engine_hashes = block_hashes_are_stable()
        known.keys = RequestKeys(
            known.request,
            chunk_tokens=self._settings.chunk_tokens,
            hash_tokens=self._hash_tokens if self._use_engine_hashes else 0,
            adapter_digest=digest,
            era=self._era,
        )
        return known.keys


def _wants_every_token(request: Request) -> bool:
    """Whether it asks for log-probabilities of its prompt: only tokens that are computed have them.

    vLLM skips caches for such a request by itself, unless the client says otherwise.
    """
    params = request.sampling_params
    return params is not None and (
        params.prompt_logprobs is not None or bool(getattr(params, "prompt_logprob_token_ids", None))
    )


def _summed(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Over all ranks, by group."""
    return [sum(of_group) for of_group in zip(*sizes, strict=True)]
