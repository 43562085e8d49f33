"""Reads the layout of a vLLM worker's cache from the worker's configuration."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import prepare_kernel_block_sizes

from kvd.engines.identity import KV, LATENT
from kvd.engines.vllm.cache.formats import format_of, identity, order_of
from kvd.engines.vllm.cache.parallel import FULL, check_context_parallel, rank_of, stage_ranks
from kvd.engines.vllm.cache.spec import CacheGroup, Pages, States, WorkerCache
from kvd.engines.vllm.cache.states import bad_spec, check_states, recurrent
from kvd.layout import Chunked, Full, Shard, Sliding, State, Window

_MLA = {KVCacheSpecKind.MLA_ATTENTION}
_DRAFTERS = ("draft_model.", "mtp.")
"""How names of layers begin that vLLM numbers from 0 for a drafter: a model of its own, and Qwen's and others' MTP."""


def check_supported(vllm_config: Any, cache_config: Any) -> None:
    """Refuses, at the start, what kvd does not move.

    Raises:
        BadRequest: `BAD_SPEC`, naming what kvd does not move.

    """
    check_context_parallel(vllm_config, cache_config)
    if vllm_config.aux_output_config.enable_return_routed_experts:
        # vLLM refuses its own connectors for this, by name. From 0.33 on it loads no blocks without their experts.
        text = "--enable-return-routed-experts: which experts a prompt went to is known to the engine that computed it"
        raise bad_spec(f"{text} and does not move; serve without that flag or without kvd")
    groups = cache_config.kv_cache_groups
    if len(cache_config.transfer_group_ids) != len(groups):
        raise bad_spec("vLLM keeps groups of this cache out of transfers; kvd moves all groups or none")
    for group in groups:
        window_of(group.kv_cache_spec)


def windows(vllm_config: Any, cache_config: Any) -> tuple[tuple[Window, int], ...]:
    """The window and the tokens per block of each group: of a block on all ranks that deal its tokens out."""
    ranks = int(vllm_config.parallel_config.decode_context_parallel_size)
    return tuple(
        (window_of(group.kv_cache_spec), int(group.kv_cache_spec.block_size) * ranks)
        for group in cache_config.kv_cache_groups
    )


def window_of(spec: Any) -> Window:
    """Which positions of a sequence a group with this vLLM spec keeps."""
    kind = get_kv_cache_spec_kind(spec)
    first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    if kind in FULL:
        return Full()
    if kind is KVCacheSpecKind.SLIDING_WINDOW:
        return Sliding(first.sliding_window + first.extra_retained_tokens)
    if kind is KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
        return Chunked(first.attention_chunk_size)
    if kind is KVCacheSpecKind.MAMBA:
        check_states(first)
        return State()
    raise bad_spec(f"layers of kind {kind.value!r} are not supported; serve this model without kvd")


def worker_cache(vllm_config: Any, cache_config: Any, model: str = "", drafter: str = "") -> WorkerCache:
    """The worker's cache, which must have passed `check_supported`.

    `model` and `drafter` are told to peers in place of the paths of these.

    Raises:
        BadRequest: `BAD_SPEC`, kvd does not move one of the layers.

    """
    groups = cache_config.kv_cache_groups
    layers = vllm_config.compilation_config.static_forward_context
    attention = [_attention_groups(group, layers) for group in groups]
    kernels = prepare_kernel_block_sizes(cache_config, attention)
    pages: list[list[Pages | States]] = [[] for _ in groups]
    for tensor in cache_config.kv_cache_tensors:
        index = next(i for i, group in enumerate(groups) if tensor.layers[0] in group.layer_names)
        spec = _layer_spec(groups[index], tensor.layers[0])
        if get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MAMBA:
            pages[index].append(_states(vllm_config, tensor, spec))
        else:
            pages[index].extend(_pages(vllm_config, cache_config, groups[index], tensor, kernels[index]))
    return WorkerCache(
        nbytes=cache_config.kv_cache_tensors[0].size if cache_config.kv_cache_tensors else 0,
        num_blocks=cache_config.num_blocks,
        groups=tuple(
            CacheGroup(window=window, block_tokens=block_tokens, pages=tuple(held))
            for (window, block_tokens), held in zip(windows(vllm_config, cache_config), pages, strict=True)
        ),
        shard=_shard(vllm_config),
        identity=identity(vllm_config, *_names(vllm_config, model, drafter)),
    )


def _attention_groups(group: Any, layers: Any) -> list[Any]:
    return [
        SimpleNamespace(backend=layers[name].get_attn_backend(), kv_cache_spec=_layer_spec(group, name))
        for name in group.layer_names
    ]


def _layer_spec(group: Any, name: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _pages(vllm_config: Any, cache_config: Any, group: Any, tensor: Any, kernel_tokens: int) -> Iterator[Pages]:
    """A KV cache tensor, in parts whose layers are of one kind: a drafter's may follow the model's."""
    spec = _layer_spec(group, tensor.layers[0])
    if spec.tokens_per_state != 1:
        raise bad_spec(f"{tensor.layers[0]}: {spec.tokens_per_state} tokens a state; kvd moves caches with one")
    kernel_blocks = spec.block_size // kernel_tokens
    _, _, head_stride, token_stride, _ = compute_layout_strides(
        spec,
        cache_config.num_blocks,
        len(tensor.layers),
        KVCacheLayout[cache_config.kv_cache_layout],
        kernel_tokens,
        fixed_strides=(tensor.layer_stride, tensor.block_stride // kernel_blocks, None, None, None),
    )
    layers = vllm_config.compilation_config.static_forward_context
    known_as = _common_names(vllm_config, group)
    numbered = []
    for place, name in enumerate(tensor.layers):
        component, number = known_as[name]
        backend = layers[name].get_attn_backend().get_name()
        kind = component, _total_heads(vllm_config, spec, name, number), backend
        numbered.append((kind, place, number, name))
    for (component, total_heads, backend), part in itertools.groupby(numbered, key=lambda layer: layer[0]):
        _, places, numbers, names = zip(*part, strict=True)
        yield Pages(
            component=component,
            layers=numbers,
            names=names,
            offset=tensor.offset + places[0] * tensor.layer_stride,
            layer_stride=tensor.layer_stride,
            block_stride=tensor.block_stride,
            head_stride=head_stride,
            token_stride=token_stride,
            heads=spec.num_heads,
            total_heads=total_heads,
            kernel_tokens=kernel_tokens,
            cell_bytes=spec.state_content_size_bytes,
            dtype=format_of(vllm_config, spec, backend, kernel_tokens),
            order=order_of(vllm_config, spec, backend, kernel_tokens),
            element_bytes=spec.dtype.itemsize,
        )


def _states(vllm_config: Any, tensor: Any, spec: Any) -> States:
    """A KV cache tensor whose layers keep recurrent states; a drafter has none."""
    layers = vllm_config.compilation_config.static_forward_context
    (component, *others), numbers = zip(*(_component(vllm_config, spec, name) for name in tensor.layers), strict=True)
    if {component} < {component, *others}:
        raise bad_spec(f"states of {component} and of {others} lie in one tensor; kvd knows tensors of one kind")
    layer = layers[tensor.layers[0]]
    # Mamba2's groups are fewer than ranks only if there is one, which every rank then holds.
    groups = layer.norm.n_groups if spec.mamba_type.name == "MAMBA2" else 0
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return States(
        component=component,
        layers=numbers,
        names=tuple(tensor.layers),
        offset=tensor.offset,
        layer_stride=tensor.layer_stride,
        block_stride=tensor.block_stride,
        state=recurrent(spec, ranks, groups, channels_first=is_conv_state_dim_first()),
        nbytes=spec.state_content_size_bytes,
        dtype=_state_format(spec, layer.get_attn_backend().get_name()),
    )


def _state_format(spec: Any, backend: str) -> str:
    """What the bytes of a state mean: kernels of a kind of processor agree on it."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    kernels = [str(current_platform.device_type)]
    if current_platform.is_cpu():
        # Each instruction set has kernels of its own, of which only those for the same are known to agree.
        kernels += ["amx"] * torch.cpu._is_amx_tile_supported()
        kernels += ["avx512_bf16"] * torch.cpu._is_avx512_bf16_supported()
    return "/".join(["+".join(dtypes), backend, *kernels])


def _common_names(vllm_config: Any, group: Any) -> dict[str, tuple[str, int]]:
    """The component and the number of each layer of a group with attention, as other engines have them, too.

    Where a number has several layers, vLLM's names tell them apart.
    """
    found = {name: _component(vllm_config, _layer_spec(group, name), name) for name in group.layer_names}
    counts = Counter(number for _, number in found.values())
    common = LATENT if get_kv_cache_spec_kind(group.kv_cache_spec) in _MLA else KV
    return {name: (common if counts[number] == 1 else component, number) for name, (component, number) in found.items()}


def _component(vllm_config: Any, spec: Any, name: str) -> tuple[str, int]:
    """The kind and the number of a layer: ("model.layers.*.self_attn.attn", 7).

    Layers of a drafter are numbered after the model's; some methods give them such numbers themselves.
    """
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", name)
    if len(numbers) != 1:
        raise bad_spec(f"the layer name {name!r} has {len(numbers)} numbers; kvd needs the one of its layer")
    number, layers = int(numbers[0]), int(vllm_config.model_config.get_total_num_hidden_layers())
    if number < layers and _drafter(vllm_config) is not None:
        drafts = getattr(spec, "is_draft", False) or name.startswith(_DRAFTERS)  # vLLM 0.32 has the name alone
        number += layers * drafts
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name), number


def _total_heads(vllm_config: Any, spec: Any, name: str, layer: int) -> int:
    """KV heads of this layer over all ranks; 1 if every rank holds the same."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if spec.max_tp_shards is not None:
        return int(spec.max_tp_shards)
    if get_kv_cache_spec_kind(spec) in _MLA:
        return 1
    declared = _declared_heads(vllm_config, layer)
    fitting = [total for total in declared if spec.num_heads == max(1, total // ranks)]
    if fitting and fitting[0] == declared[0]:
        return declared[0]
    if spec.num_heads > 1 or ranks == 1:
        return int(spec.num_heads) * ranks
    if len(set(fitting)) == 1:
        return fitting[0]
    text = f"{name} has one KV head on each of {ranks} ranks, the model's configuration names {declared}"
    raise bad_spec(f"{text}: of how many heads in all it is one cannot be told; use another tensor parallel size")


def _declared_heads(vllm_config: Any, layer: int) -> list[int]:
    """Every number of KV heads that the configuration of the layer's model names, the model's own first.

    Models whose layers differ give each kind a field of its own: `num_global_key_value_heads`,
    `swa_num_key_value_heads`.
    """
    model = vllm_config.model_config
    if layer >= model.get_total_num_hidden_layers():
        model = _drafter(vllm_config)
    others = {
        value
        for field, value in model.hf_text_config.to_dict().items()
        if "kv_heads" in field or "key_value_heads" in field
        if type(value) is int and value > 0
    }
    return [int(model.get_total_num_kv_heads()), *sorted(others)]


def _shard(vllm_config: Any) -> Shard:
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    stages = parallel.pipeline_parallel_size
    pp_rank, tp_rank = divmod(rank_of(vllm_config), stage_ranks(vllm_config))
    *earlier, last = (tuple(get_pp_indices(layers, stage, stages)) for stage in range(stages))
    return Shard(
        stages=(*earlier, (last[0], last[1] + _draft_layers(vllm_config))),
        tp_rank=tp_rank,
        tp_size=stage_ranks(vllm_config),
        pp_rank=pp_rank,
        cp_size=int(parallel.decode_context_parallel_size),
    )


def _draft_layers(vllm_config: Any) -> int:
    """Layers of a drafter (EAGLE, MTP), which the last stage runs and which are numbered after the model's."""
    drafter = _drafter(vllm_config)
    return 0 if drafter is None else int(drafter.get_total_num_hidden_layers())


def _drafter(vllm_config: Any) -> Any:
    """The configuration of the drafter's model; None without one, as where drafts are n-grams of the prompt."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is speculative.target_model_config:
        return None
    return speculative.draft_model_config


def _names(vllm_config: Any, model: str, drafter: str) -> tuple[str, str]:
    """The model and the drafter as peers are told of them: by their settings, else their paths."""
    path, drafts = vllm_config.model_config.model, _drafter(vllm_config)
    name = model or path
    if drafts is None:
        return name, ""
    if not drafter:
        drafter = name if drafts.model == path else drafts.model  # modules for MTP are part of the model
    return name, f"{drafter} ({vllm_config.speculative_config.method})"
