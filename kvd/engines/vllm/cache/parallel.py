"""The workers of a vLLM engine: their numbers, and how they share tokens out (context parallelism)."""

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind

from kvd.errors import ErrorCode, refusal

FULL = {KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION}
"""Kinds of layers that attend to every token."""


def ranks_of(vllm_config: Any) -> int:
    """How many workers of an engine replica have a part of the cache that no other has, or are to be read for it."""
    return stage_ranks(vllm_config) * int(vllm_config.parallel_config.pipeline_parallel_size)


def rank_of(vllm_config: Any) -> int:
    """The worker's number among these, counted pipeline stage by stage."""
    stage, _, within = _place(vllm_config)
    return stage * stage_ranks(vllm_config) + within


def stage_ranks(vllm_config: Any) -> int:
    """How many of them a pipeline stage has."""
    parallel = vllm_config.parallel_config
    return int(
        parallel.tensor_parallel_size * (1 if _is_replicated(parallel) else parallel.prefill_context_parallel_size)
    )


def is_replica(vllm_config: Any) -> bool:
    """Whether all that this worker's cache holds is in that of another one, from which alone it is read."""
    _, context, _ = _place(vllm_config)
    return context > 0


def has_replicas(vllm_config: Any) -> bool:
    """Whether the engine has such workers."""
    parallel = vllm_config.parallel_config
    return _is_replicated(parallel) and bool(parallel.prefill_context_parallel_size > 1)


def _place(vllm_config: Any) -> tuple[int, int, int]:
    """The worker's pipeline stage, which copy of the stage's cache it belongs to, and its number in that copy.

    vLLM numbers workers by stage, then prefill context, then tensor parallel rank.
    """
    parallel = vllm_config.parallel_config
    tp, pcp = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
    stage, within = divmod(int(parallel.rank) % (tp * pcp * parallel.pipeline_parallel_size), tp * pcp)
    return (stage, *divmod(within, tp)) if _is_replicated(parallel) else (stage, 0, within)


def _is_replicated(parallel: Any) -> bool:
    """Whether each prefill context holds the whole cache; with an equal DCP each holds its share of the tokens."""
    return bool(parallel.decode_context_parallel_size == 1)


def check_context_parallel(vllm_config: Any, cache_config: Any) -> None:
    """Refuses ways to deal tokens out that kvd does not know: it knows runs of a block for each rank in turn.

    Raises:
        BadRequest: `BAD_SPEC`, with what vLLM was given and what would do.

    """
    parallel = vllm_config.parallel_config
    dcp, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if pcp > 1 and dcp > 1 and (dcp != pcp or parallel.tensor_parallel_size > 1):
        text = f"prefill_context_parallel_size = {pcp} and decode_context_parallel_size = {dcp}: kvd needs both alike"
        text += f" and tensor_parallel_size = 1, which is {parallel.tensor_parallel_size}, or one of the two alone"
        raise refusal(ErrorCode.BAD_SPEC, text)
    role = vllm_config.kv_transfer_config.kv_role
    if pcp > 1 and dcp == 1 and role != "kv_producer":
        text = f"prefill_context_parallel_size = {pcp}: nothing is pulled into copies of a cache; kv_role is {role!r}"
        raise refusal(ErrorCode.BAD_SPEC, f"{text}, and must be 'kv_producer'")
    if dcp == 1:
        return
    for spec in (group.kv_cache_spec for group in cache_config.kv_cache_groups):
        kind = get_kv_cache_spec_kind(spec)
        if not spec.dcp_sharded or kind not in FULL:
            text = f"decode_context_parallel_size = {dcp}: how ranks share the tokens of {kind.value!r} layers"
            raise refusal(ErrorCode.BAD_SPEC, f"{text} is not known; kvd knows it of full attention")
        if parallel.cp_kv_cache_interleave_size != spec.block_size:
            text = f"cp_kv_cache_interleave_size = {parallel.cp_kv_cache_interleave_size}: kvd moves whole blocks"
            raise refusal(ErrorCode.BAD_SPEC, f"{text}; give --cp-kv-cache-interleave-size {spec.block_size}")
