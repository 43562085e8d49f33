"""An engine of connectors: vLLM's configuration, allocator and hooks, with real daemons, and no model.

What vLLM's scheduler and model runner would call is called here, in their order, so that a test can look at bytes.
"""

import contextlib
import copy
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.selector import get_mamba_attn_backend
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

from kvd.engines.vllm import KvdConnector
from kvd.processes import Child, Processes
from tests.engines.vllm.blocks import Manager
from tests.support.patience import NEVER_LOST, PATIENCE

HEADS, HEAD, BLOCK_TOKENS, BLOCKS, LAYERS = 4, 32, 32, 16, 6
WINDOW = 80
LATENT = 576
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "drafted": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "mtp": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "own drafter": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "halves": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "gemma": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "mamba1": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "mamba2": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "delta": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "kda": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD},
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "first_k_dense_replace": LAYERS,
    },
}


DRAFTS = {
    "drafted": (HEADS, [f"model.layers.{LAYERS}.self_attn.attn"]),
    "mtp": (HEADS, ["mtp.layers.0.self_attn.attn"]),
    "own drafter": (2, [f"draft_model.model.layers.{layer}.self_attn.attn" for layer in range(2)]),
}
"""Drafters: their KV heads, and their layers, which vLLM numbers after the model's (EAGLE) or from 0."""

GROUPS = 4
"""Groups of Mamba2's heads."""

_SHAPES: dict[str, Callable[[int], Any]] = {
    "mamba1": lambda tp_size: MambaStateShapeCalculator.mamba1_state_shape(tp_size, 64, 8, 4),
    "mamba2": lambda tp_size: MambaStateShapeCalculator.mamba2_state_shape(tp_size, 64, GROUPS, 4, 16, 8, 4),
    "delta": lambda tp_size: MambaStateShapeCalculator.gated_delta_net_state_shape(tp_size, 4, 4, 16, 8, 4),
    "kda": lambda tp_size: MambaStateShapeCalculator.kda_state_shape(tp_size, 4, 16),
}
SECTIONS = {"mamba1": (64,), "mamba2": (64, 32, 32), "delta": (64, 64, 32), "kda": (64, 64, 64)}
"""Models with recurrent states, and the channels of each section of their convolutions."""

_KINDS = {"mamba1": MambaAttentionBackendEnum.MAMBA1, "mamba2": MambaAttentionBackendEnum.MAMBA2}


def states_spec(kind: str, tp_size: int, page: int) -> MambaSpec:
    """What a layer with recurrent states asks for, as the models of vLLM do."""
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=_SHAPES[kind](tp_size),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_type=_KINDS.get(kind, MambaAttentionBackendEnum.GDN_ATTN),
        mamba_cache_mode="align",
    )


def configuration(kind: str, folder: Path) -> Any:
    """vLLM's own configuration of a small model of this kind."""
    folder.mkdir()
    shape = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 if kind == "deepseek" else HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape | MODELS[kind]))
    transfer = KVTransferConfig(kv_connector="KvdConnector", kv_role="kv_both", kv_connector_extra_config={})
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=16 if kind == "deepseek" else BLOCK_TOKENS,
        disable_hybrid_kv_cache_manager=False,
        num_gpu_blocks_override=BLOCKS,
        kv_transfer_config=transfer,
    ).create_engine_config()
    if kind in DRAFTS:
        heads, names = DRAFTS[kind]
        draft = SimpleNamespace(
            get_total_num_hidden_layers=lambda: len(names),
            get_total_num_kv_heads=lambda: heads,
            hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads}),
            model="drafter",
        )
        config.speculative_config = SimpleNamespace(
            draft_model_config=draft,
            target_model_config=None,
            method="eagle",
            use_eagle=lambda: False,
            use_dspark=lambda: False,
            use_dflash=lambda: False,
            uses_draft_model=lambda: False,
        )
    config.cache_config.kv_cache_layout = "LBNHC" if kind == "deepseek" else "LBHNC"
    return config


def layer_specs(kind: str, tp_size: int, block_tokens: int = BLOCK_TOKENS) -> dict[str, Any]:
    """What the layers of an engine ask for, as the models of vLLM do."""
    shape = {"block_size": block_tokens, "num_kv_heads": max(1, HEADS // tp_size), "head_size": HEAD}
    dense = FullAttentionSpec(**shape, dtype=torch.bfloat16)
    local = SlidingWindowSpec(**shape, dtype=torch.bfloat16, sliding_window=WINDOW)
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16, max_tp_shards=1)
    of_layer: dict[str, Callable[[int], Any]] = {
        "gemma": lambda layer: dense if layer % 3 == 2 else local,
        "halves": lambda layer: dense if layer < LAYERS // 2 else local,
        "deepseek": lambda _: latent,
    }
    if kind in SECTIONS:
        states = states_spec(kind, tp_size, dense.page_size_bytes)
        of_layer[kind] = lambda layer: dense if layer % 3 == 2 else states
    spec_of = of_layer.get(kind, lambda _: dense)
    specs = {f"model.layers.{layer}.self_attn.attn": spec_of(layer) for layer in range(LAYERS)}
    heads, names = DRAFTS.get(kind, (HEADS, []))
    return specs | {name: replace(dense, num_kv_heads=max(1, heads // tp_size)) for name in names}


def _layer(spec: Any, backend: Any) -> Any:
    """What the connector reads of a layer of the model."""
    if isinstance(spec, MambaSpec):
        backend = get_mamba_attn_backend(spec.mamba_type)
    return SimpleNamespace(get_attn_backend=lambda: backend, norm=SimpleNamespace(n_groups=GROUPS))


def _stage_of(specs: dict[str, Any], stage: int, stages: int) -> dict[str, Any]:
    """The layers of one pipeline stage; the last one has the drafter's."""
    first, stop = get_pp_indices(LAYERS, stage, stages)
    names = list(specs)
    return {name: specs[name] for name in names[first : stop if stage < stages - 1 else None]}


@dataclass
class Request:
    """The fields of vLLM's request that the connector reads."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]
    status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    num_in_flight_tokens: int = 0
    max_tokens: int = 1
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    mm_features: tuple[Any, ...] = ()
    lora_request: Any = None
    computed: int | None = None
    """How many tokens of a prefill in chunks are; None: all."""
    num_prompt_tokens: int = field(init=False)
    _all_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens if self.computed is None else self.computed

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


@dataclass
class Chunk:
    """Tokens of a prefill that a step computes, and the request's blocks [group][position] then."""

    request: Request
    tokens: int
    tables: Sequence[list[int]]


class Answered(Request):
    """One that has decoded."""

    @property
    def num_computed_tokens(self) -> int:
        return len(self._all_token_ids) - 1


class Engine:
    """The scheduler's connector and those of its workers: `tp_size` in each of `stages` pipeline stages.

    Of these, `cp_size` deal tokens out among them. There are `copies` of each stage (prefill context parallelism).

    `settings` is `kv_connector_extra_config`, `policy` what becomes of failed loads.
    """

    def __init__(
        self,
        config: Any,
        kind: str,
        settings: dict[str, Any],
        tp_size: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        stages: int = 1,
        cp_size: int = 1,
        copies: int = 1,
        policy: str = "fail",
    ) -> None:
        config = copy.deepcopy(config)
        config.kv_transfer_config.kv_load_failure_policy = policy
        if copies > 1:
            config.parallel_config.prefill_context_parallel_size = copies
            config.kv_transfer_config.kv_role = "kv_producer"
        config.parallel_config.decode_context_parallel_size = cp_size
        config.parallel_config.cp_kv_cache_interleave_size = 16  # of a block, with latent attention
        config.parallel_config.tensor_parallel_size = tp_size
        config.parallel_config.pipeline_parallel_size = stages
        config.kv_transfer_config.kv_connector_extra_config = settings
        specs = layer_specs(kind, tp_size, block_tokens)
        ranks = [_stage_of(specs, stage, stages) for stage in range(stages) for _ in range(copies * tp_size)]
        backend = CPUMLABackend if kind == "deepseek" else CPUAttentionBackend
        self._layers = {name: _layer(spec, backend) for name, spec in specs.items()}
        configs = get_kv_cache_configs(config, ranks, [1 << 30] * len(ranks))
        for of_rank in configs:
            of_rank.kv_cache_layout = config.cache_config.kv_cache_layout
        self.cache_config = configs[0]
        self.scheduler = KvdConnector(config, KVConnectorRole.SCHEDULER, generate_scheduler_kv_cache_config(configs))
        self.scheduler.bind_kv_cache_manager(Manager())
        self.workers: list[KvdConnector] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        for rank, of_rank in enumerate(configs):
            self._add_worker(config, rank, ranks[rank], of_rank)
        places = {divmod(rank, tp_size): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        told = {place: handshake for place, handshake in places.items() if handshake is not None}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(told)
        self._aggregator = KVOutputAggregator(len(ranks))
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self._policy = policy
        self._decoding: dict[str, tuple[Request, tuple[list[int], ...]]] = {}
        """Requests that have blocks, and these."""

    def _add_worker(self, config: Any, rank: int, layers: dict[str, Any], cache_config: Any) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {name: self._layers[name] for name in layers}
        worker = KvdConnector(config, KVConnectorRole.WORKER, cache_config)
        self.workers.append(worker)
        layout = KVCacheLayout[cache_config.kv_cache_layout]
        with worker.get_mem_pool_context() or contextlib.nullcontext():
            caches = allocate_kv_cache(cache_config, torch.device("cpu"), layout)
        worker.register_kv_caches(caches)
        self.caches.append(caches)

    @property
    def groups(self) -> int:
        return len(self.cache_config.kv_cache_groups)

    def step(self, chunk: Chunk | None = None, preempted: str = "") -> None:
        """One step of the engine without a forward pass; its outcome is joined over the ranks by vLLM itself.

        It computes a chunk, or preempts a request.
        """
        tokens = {chunk.request.request_id: chunk.tokens} if chunk else {}
        tables = {chunk.request.request_id: tuple(chunk.tables)} if chunk else {}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=tokens,
            preempted_req_ids={preempted} - {""},
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        metadata = self.scheduler.build_connector_meta(scheduled)
        if chunk:
            assert chunk.request.computed is not None
            chunk.request.computed += chunk.tokens
        outputs = [SimpleNamespace(kv_connector_output=_step(worker, metadata)) for worker in self.workers]
        joined = self._aggregator.aggregate(outputs).kv_connector_output
        if self._policy == "fail":
            for name in joined.failed_recving & self._decoding.keys():
                request, tables = self._decoding.pop(name)
                request.status = RequestStatus.FINISHED_ERROR
                self.scheduler.request_finished_all_groups(request, tables)
        self.scheduler.update_connector_output(joined)
        sent, received = joined.finished_sending or set(), joined.finished_recving or set()
        again = sent & self.sent | received & self.received
        assert not again, f"{again} are reported a second time, at which vLLM's engine ends"
        self.sent |= sent
        self.received |= received
        self.failed |= joined.failed_recving

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Steps until `ended()`, or fails the test."""
        until = time.monotonic() + PATIENCE
        while not ended():
            assert time.monotonic() < until, f"sent {self.sent}, received {self.received}, failed {self.failed}"
            self.step()
            time.sleep(0.001)

    def prefilled(
        self, name: str, prompt: Sequence[int], tables: Sequence[list[int]], consumers: int = 1
    ) -> dict[str, Any]:
        """A request whose prefill has ended with these block tables; returns what the router gets."""
        request = Request(name, list(prompt), {"do_remote_decode": True, "kvd_consumers": consumers})
        self.scheduler.on_new_request(request)
        self.step()  # in which the prefill is computed
        keep, params = self.scheduler.request_finished_all_groups(request, tuple(tables))
        assert keep
        assert params is not None
        return params

    def answered(self, name: str, sequence: Sequence[int], asked: int, manager: Manager) -> dict[str, Any]:
        """A turn that has ended: of `sequence` the first `asked` tokens were its prompt, the last one was not computed.

        Its blocks are those that it has of `manager`. Returns what the next turn's prefill gets.
        """
        request = Answered(name, list(sequence[:asked]), {"do_remote_prefill": True, "kvd_turn": True})
        request._all_token_ids = list(sequence)
        tables = tuple([block.block_id for block in group] for group in manager.tables[name])
        keep, params = self.scheduler.request_finished_all_groups(request, tables)
        assert not keep
        assert params is not None
        manager.end(name)
        return params

    def decode(
        self, name: str, prompt: Sequence[int], params: dict[str, Any], tables: Sequence[list[int]], computed: int = 0
    ) -> Request:
        """A request that has its blocks, the first `computed` tokens of them from the prefix cache (of one group)."""
        request = self.queue(name, prompt, params)
        self.allocate(request, tables, computed)
        return request

    def queue(self, name: str, prompt: Sequence[int], params: dict[str, Any]) -> Request:
        """A request that has come, and has no blocks yet."""
        request = Request(name, list(prompt), params)
        self.scheduler.on_new_request(request)
        return request

    def allocate(self, request: Request, tables: Sequence[list[int]], computed: int = 0) -> None:
        """Gives a queued request its blocks."""
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request, computed)
        cached = computed // BLOCK_TOKENS
        blocks = [
            [
                SimpleNamespace(block_id=block, is_null=block == 0, block_hash=b"hash" if i < cached else None)
                for i, block in enumerate(table)
            ]
            for table in tables
        ]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), tokens)
        self._decoding[request.request_id] = request, tuple(tables)

    def fill(self, seed: int) -> None:
        """Other bytes in every layer's cache of every rank."""
        generator = torch.Generator().manual_seed(seed)
        for caches in self.caches:
            for name in sorted(caches):
                cache = caches[name]
                most = 9000 if cache.is_floating_point() else 120  # a state is bytes
                cache.copy_(torch.randint(-most, most, cache.shape, generator=generator).to(cache.dtype))

    def state(self, kind: str, name: str, block: int) -> list[torch.Tensor]:
        """The sections of a convolution's inputs and the state, over all ranks, as vLLM's kernels see them."""
        ranks = []
        for caches in self.caches:
            layer: Any = SimpleNamespace(
                get_state_shape=lambda: _SHAPES[kind](len(self.caches)),
                get_state_dtype=lambda: (torch.bfloat16, torch.float32),
            )
            MambaBase.bind_kv_cache(layer, caches[name])
            conv, state = (cache[block] for cache in layer.kv_cache)
            widths = [channels // len(self.caches) for channels in SECTIONS[kind]]
            ranks.append([*conv.split(widths, dim=1), state])
        *sections, states = zip(*ranks, strict=True)
        return [*(torch.cat(section, dim=1) for section in sections), torch.cat(states)]

    def close(self) -> None:
        self.caches.clear()
        for worker in self.workers:
            worker.shutdown()


def _step(worker: KvdConnector, metadata: Any) -> KVConnectorOutput:
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    return output


class Daemons:
    """Daemons by name; `settings` are those of all, from their next start on."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.settings = {"claim_wait": "60", **NEVER_LOST}
        self._processes = processes
        self._folder = folder
        self._running: dict[str, Child] = {}

    def start(self, *names: str) -> None:
        """Starts daemons (again); returns when all of them listen."""
        for name in names:
            settings = {"name": name, "socket": self.socket(name), **self.settings}
            arguments = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
            self._running[name] = self._processes.start(name, "kvd.cli.main", "serve", *arguments)
        until = time.monotonic() + PATIENCE
        while not all(_listens(self.socket(name)) for name in names):
            assert time.monotonic() < until, f"not all of the daemons {names} listen"
            time.sleep(0.02)

    def socket(self, name: str) -> str:
        """The session socket of a daemon."""
        return str(self._folder / f"{name}.sock")

    def kill(self, name: str) -> None:
        """As `kill -9`."""
        os.kill(self._running[name].pid, signal.SIGKILL)
        assert self._running[name].wait(PATIENCE)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
