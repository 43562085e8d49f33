"""SGLang's KV cache in the daemon's pool.

SGLang makes its cache by one `torch.zeros` a layer. The hooks here attach to the daemon before the first of them and
answer them all with parts of the pool.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sglang
import torch
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.runtime_context import get_disagg, get_parallel
from torch.overrides import TorchFunctionMode

from kvd.engines import identity
from kvd.engines.identity import KV, LATENT
from kvd.engines.pool import pool_tensor
from kvd.engines.sglang.settings import Settings, read_settings
from kvd.engines.sglang.spec import Cache, cache_spec
from kvd.engines.sglang.transfers import Transfers
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.layout import Shard

BACKEND = "kvd"
"""What users give `--disaggregation-transfer-backend`."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A daemon's pool, as int8 [its bytes], in which the `cache` of this process lies."""

    cache: Cache
    pool: torch.Tensor
    transfers: Transfers
    settings: Settings


_configurator: Any = None
"""Of the cache that is being made."""
_attached: Attached | None = None


def attached() -> Attached:
    """What this process has attached.

    Raises:
        BadRequest: `BAD_SPEC`, SGLang made a cache that kvd does not move.

    """
    if _attached is None:
        raise _refusal("SGLang made its cache in another way than kvd knows: serve this model without kvd")
    return _attached


def init_pools(original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `KVCacheConfigurator._init_pools`, which makes the caches of one model."""
    global _configurator  # noqa: PLW0603 - the caches of a process are made one after the other
    disagg = get_disagg()
    if disagg.disaggregation_transfer_backend != BACKEND or disagg.disaggregation_mode == "null":
        return original(configurator, *args, **kwargs)
    _configurator = configurator
    try:
        return original(configurator, *args, **kwargs)
    finally:
        _configurator = None


def create_buffers(original: Callable[..., Any], kv_pool: Any) -> None:
    """Around the methods that make the buffers of `MHATokenToKVPool` and `MLATokenToKVPool`."""
    global _attached  # noqa: PLW0603 - see above
    if _configurator is None:
        original(kv_pool)
        return
    if _attached is not None:
        raise _refusal(f"a second cache ({type(kv_pool).__name__}): kvd moves one of full attention, without drafters")
    parallel = get_parallel()
    settings = read_settings(os.environ, parallel.attn_tp_rank, parallel.attn_tp_size)
    cache = _cache_of(kv_pool, _configurator, settings)
    transfers = Transfers()
    transfers.attach(settings, cache_spec(cache))
    _attached = Attached(cache, pool_tensor(transfers.client), transfers, settings)
    with _Buffers(_attached):
        original(kv_pool)


class _Buffers(TorchFunctionMode):
    """Answers each `torch.zeros` with the next layer's part of the pool."""

    def __init__(self, attached: Attached) -> None:
        super().__init__()
        self._attached = attached
        self._made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every torch call made inside the context."""
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        cache, pool = self._attached.cache, self._attached.pool
        asked = torch.zeros(args[0], dtype=kwargs["dtype"], device="meta")
        device = torch.device(kwargs["device"])
        if asked.nbytes != cache.layer_bytes or device.type != pool.device.type or self._made == len(cache.layers):
            text = f"SGLang asks for buffer {self._made} of {asked.nbytes} bytes on {device}, declared were "
            text += f"{len(cache.layers)} of {cache.layer_bytes} bytes on {pool.device}"
            raise refusal(ErrorCode.INTERNAL, text)
        offset = self._made * cache.layer_bytes
        self._made += 1
        return pool[offset : offset + asked.nbytes].view(asked.dtype).view(asked.shape)


def _cache_of(kv_pool: Any, configurator: Any, settings: Settings) -> Cache:
    """The cache that `kv_pool` is about to make.

    Raises:
        BadRequest: `BAD_SPEC`, kvd does not move such caches.

    """
    parallel = get_parallel()
    for name in ("pp_size", "dp_size", "attn_cp_size", "attn_dcp_size"):
        if getattr(parallel, name) > 1:
            raise _refusal(f"{name} = {getattr(parallel, name)}: the backend kvd serves tensor parallelism alone")
    if configurator.is_draft_worker:
        raise _refusal("speculative decoding: the backend kvd moves no drafter's cache")
    config, latent = configurator.model_config, not hasattr(kv_pool, "k_buffer")
    if not latent and (kv_pool.kv_cache_layout != "nhd" or kv_pool.head_dim != kv_pool.v_head_dim):
        text = f"KV cache layout {kv_pool.kv_cache_layout!r}, heads of {kv_pool.head_dim} and {kv_pool.v_head_dim}"
        raise _refusal(f"{text}: the backend kvd moves 'nhd' with keys and values of one size")
    layers = range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num)
    return Cache(
        component=LATENT if latent else KV,
        layers=tuple(layers),
        halves=1 if latent else 2,
        pages=-(-(kv_pool.size + kv_pool.page_size) // kv_pool.page_size),
        page_tokens=kv_pool.page_size,
        heads=1 if latent else kv_pool.head_num,
        total_heads=1 if latent else config.get_total_num_kv_heads(),
        cell_bytes=(kv_pool.kv_cache_dim if latent else kv_pool.head_dim) * kv_pool.store_dtype.itemsize,
        dtype=str(kv_pool.dtype).removeprefix("torch."),
        record_bytes=_record_bytes(configurator.server_args),
        shard=Shard(stages=((0, layers.stop),), tp_rank=parallel.attn_tp_rank, tp_size=parallel.attn_tp_size),
        identity=_identity(config, configurator.server_args.json_model_override_args, settings.model),
    )


def _identity(model_config: Any, overrides: str, model: str) -> tuple[tuple[str, str], ...]:
    """What of SGLang's configuration changes the bytes of a token's cache, as `CacheSpec` has it.

    `overrides` are those of the model's configuration, as JSON; `model` is what peers know it by.
    """
    rope = identity.rope(model_config.hf_text_config.to_dict())
    fields = identity.identity(
        model=model or model_config.model_path,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=str(model_config.quantization or "none"),
        rope=f"{rope} up to {model_config.context_len} tokens" if "longrope" in rope else rope,
        overrides=identity.overrides(json.loads(overrides or "{}")),
        engine="SGLang",
        version=sglang.__version__,
    )
    return identity.told(fields)


def _record_bytes(server_args: Any) -> int:
    """Bytes of what a decode engine takes over beside the cache, without a drafter."""
    sample = MetadataBuffers(
        1,
        hidden_size=16,
        hidden_states_dtype=torch.float32,
        max_sampling_mask_tokens=server_args.sampling_mask_max_tokens,
        kv_checksum_enabled=get_disagg().disaggregation_enable_kv_checksum,
    )
    return sum(sample.get_buf_infos()[2])


def _refusal(text: str) -> KvdError:
    return refusal(ErrorCode.BAD_SPEC, text)
