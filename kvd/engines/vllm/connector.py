"""The hooks that vLLM calls. The work is in `scheduler`, `worker` and `cache`."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd.client import Worker
from kvd.engines.kernels import Kernels, record
from kvd.engines.pool import attach, pool_tensor
from kvd.engines.vllm.cache.config import check_supported, windows, worker_cache
from kvd.engines.vllm.cache.memory import PoolAllocation, check_views, warn_of_restarts
from kvd.engines.vllm.cache.parallel import has_replicas, is_replica, rank_of, ranks_of
from kvd.engines.vllm.cache.spec import cache_spec
from kvd.engines.vllm.metadata import RankEndpoint, StepMetadata
from kvd.engines.vllm.plugin import register
from kvd.engines.vllm.replica import ReplicaSide
from kvd.engines.vllm.scheduler import SchedulerSide
from kvd.engines.vllm.settings import read_settings
from kvd.engines.vllm.stats import KvdPromMetrics, KvdStats
from kvd.engines.vllm.turns.scheduler import TurnPolicy
from kvd.engines.vllm.worker import WorkerSide
from kvd.errors import ErrorCode, refusal

_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

register()  # also where vLLM loads no plugins (`VLLM_PLUGINS`) and was given `kv_connector_module_path`


@dataclass
class KvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to every worker, once a step. VLLM carries it and the two below, pickled, between its processes."""

    metadata: StepMetadata


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker to the scheduler, once at start."""

    rank: int
    endpoint: RankEndpoint


@dataclass
class KvdWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to the scheduler, by rank, after steps in which one of these changed, or a turn's offer ended."""

    endpoints: dict[int, RankEndpoint] = field(default_factory=dict)
    unsent: dict[int, bool] = field(default_factory=dict)
    """Whether orders wait to be sent."""
    turn_ends: list[tuple[str, str]] = field(default_factory=list)
    """Offers of turns that have ended on a rank, and why: an entry for each rank."""

    def aggregate(self, other: Any) -> "KvdWorkerMeta":
        """What both workers say."""
        return KvdWorkerMeta(
            {**self.endpoints, **other.endpoints},
            {**self.unsent, **other.unsent},
            self.turn_ends + other.turn_ends,
        )


class KvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill/decode disaggregation of vLLM through kvd daemons: the scheduler's half or a worker's, by role."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        ranks, parallel = ranks_of(vllm_config), vllm_config.parallel_config
        self._rank = rank_of(vllm_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config, ranks)
        self._settings = settings.filled(rank=self._rank, dp_rank=parallel.data_parallel_index)
        self._scheduler: Any = None
        self._worker: Any = None
        self._allocation: PoolAllocation | None = None
        self._is_replica = is_replica(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                windows(vllm_config, kv_cache_config),
                ranks,
                vllm_config.num_prefill_lookahead_tokens,
                adapter_paths=not settings.model,
                alone=parallel.prefill_context_parallel_size == 1
                and (parallel.data_parallel_size == 1 or parallel.data_parallel_external_lb),
                grows=not has_replicas(vllm_config),
                turns=TurnPolicy(
                    ttl=settings.turn_ttl,
                    share=settings.turn_share,
                    every=settings.every_turn,
                    recompute=self._kv_transfer_config.kv_load_failure_policy == "recompute",
                    copies=has_replicas(vllm_config),
                ),
            )
        elif self._is_replica:
            self._worker = ReplicaSide()
        else:
            self._attach()

    def _attach(self) -> None:
        settings = self._settings
        self._cache = worker_cache(self._vllm_config, self._kv_cache_config, settings.model, settings.drafter)
        spec = cache_spec(self._cache)
        client = attach(Worker.attach, settings.socket, settings.worker, spec, settings.attach_timeout)
        self._pool = pool_tensor(client)
        warn_of_restarts(client.device, self._vllm_config.cache_config)
        self._worker = WorkerSide(
            client,
            settings.worker,
            spec,
            offer_ttl=settings.offer_ttl,
            pull_timeout=settings.pull_timeout,
            kernels=Kernels(record if client.device else None),
        )

    # --- the engine's configuration ---------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout with the longest contiguous runs: heads, which ranks split, outside of tokens.

        MultiConnector starts only if its parts agree, and shows none of them the others: there it is the layout that
        all of vLLM's own connectors ask for, in which runs end with a layer's block.
        """
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        alone = _MULTI not in sys.modules  # vLLM imports it only where it is used
        return "BLHNC" if alone and not current_platform.is_cpu() else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """No (vLLM asks since 0.33): the pool is the daemon's, which may be reading it, and sleep would free none."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats:
        """What `get_kv_connector_stats` sent, as received."""
        return KvdStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvdPromMetrics:
        """The connector's Prometheus metrics."""
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler --------------------------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        """All groups."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KvdHandshake]) -> None:
        """The endpoints of all ranks, once at the start."""
        self._scheduler.set_endpoints({handshake.rank: handshake.endpoint for handshake in metadata.values()})

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """VLLM's blocks: some are kept for the next turns of conversations, those of failed loads are freed."""
        super().bind_kv_cache_manager(kv_cache_manager)
        config = self._vllm_config.scheduler_config
        tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self._scheduler.bind(kv_cache_manager, tokens, self._vllm_config.num_lookahead_tokens)

    def on_new_request(self, request: Any) -> None:
        """VLLM added a request."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens a pull will bring, None if that is not known yet, and whether it does so between steps."""
        tokens = self._scheduler.external(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """VLLM gave the request its blocks."""
        self._scheduler.allocated(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvdMetadata:
        """What the workers are to do in this step."""
        self._scheduler.scheduled(scheduler_output)
        return KvdMetadata(self._scheduler.take_metadata())

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did in this step."""
        self._scheduler.received(connector_output.finished_recving or (), connector_output.failed_recving)
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            self._scheduler.set_endpoints(meta.endpoints)
            self._scheduler.set_unsent(meta.unsent)
            self._scheduler.turns.kept.ended(meta.turn_ends)

    def has_pending_block_frees(self) -> bool:
        """A running request lacks a block: whether waiting helps, before vLLM preempts one."""
        frees: bool = self._scheduler.turns.kept.frees()
        return frees

    def reset_cache(self) -> None:
        """Gives up what is kept for next turns; its blocks are free some steps later."""
        self._scheduler.turns.kept.clear()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to make steps though it has no requests: a worker could not send all orders yet."""
        unsent: bool = self._scheduler.unsent
        return unsent

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for a cache of one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the request's blocks, and what it returns to the router."""
        params = self._scheduler.finished(request, block_ids)
        if params is not None:
            return True, params
        return False, self._scheduler.answered(request, block_ids)

    # --- worker -----------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The context in which vLLM allocates its KV cache: it gets the pool."""
        if self._is_replica:
            return None
        self._allocation = PoolAllocation(self._cache.nbytes, lambda: self._pool)
        return self._allocation

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Checks that the KV cache lies in the pool as declared."""
        if self._is_replica:
            return
        if self._allocation is None or not self._allocation.answered:
            text = f"vLLM allocated no buffer of {self._cache.nbytes} bytes inside the memory context"
            raise refusal(ErrorCode.INTERNAL, text)
        check_views(self._cache, self._pool, kv_caches)

    def get_handshake_metadata(self) -> KvdHandshake | None:
        """Where consumers find this rank."""
        if self._is_replica:
            return None
        return KvdHandshake(self._rank, self._worker.changed_endpoint() or self._worker.endpoint)

    def bind_connector_metadata(self, connector_metadata: KvdMetadata) -> None:
        """A step begins. Sends pulls now, before the forward pass; `start_load_kv` may come after it."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata.metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the cache is in the pool."""

    def wait_for_save(self) -> None:
        """The step's kernels are under way; nothing is waited for."""
        self._worker.launched()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """A step ends: the requests whose pull or offer has ended."""
        results = self._worker.end()
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> KvdWorkerMeta | None:
        """Where consumers find this rank and whether orders wait to be sent, if that changed; turns that ended."""
        endpoint, unsent = self._worker.changed_endpoint(), self._worker.changed_unsent()
        turn_ends = self._worker.take_turn_ends()
        if endpoint is None and unsent is None and not turn_ends:
            return None
        endpoints = {} if endpoint is None else {self._rank: endpoint}
        return KvdWorkerMeta(endpoints, {} if unsent is None else {self._rank: unsent}, turn_ends)

    def get_kv_connector_stats(self) -> KvdStats | None:
        """What this half counted since the last call."""
        half = self._worker or self._scheduler.turns
        stats = KvdStats(asdict(half.take_counts()))
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Ends the session with the daemon; what is offered can still be read."""
        if self._worker is not None:
            self._worker.close()
