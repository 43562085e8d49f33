"""The entry point in `sglang.srt.plugins`, which SGLang calls in each of its processes."""

import logging
from collections.abc import Callable
from typing import Any

from kvd.engines.redaction import keep_tickets_out_of_logs
from kvd.engines.sglang.handoff import HANDED, is_handoff

logger = logging.getLogger(__name__)

_MEMORY = "sglang.srt.mem_cache"
_QUEUES = "sglang.srt.disaggregation"


def register() -> None:
    """Makes the transfer backend `kvd` known to SGLang, and keeps its tickets out of the logs.

    It never raises: SGLang calls it wherever kvd is installed, also to serve without kvd.
    """
    try:
        _register_backend()
        keep_tickets_out_of_logs("sglang")
    except Exception as error:  # noqa: BLE001 - of an SGLang with other classes nothing is known
        logger.warning("the transfer backend kvd is not registered, this SGLang is not 0.5.23: %r", error)


def _register_backend() -> None:
    """SGLang's list of choices can be extended; its enum of backends and the function that finds classes cannot."""
    from sglang.srt.arg_groups import choices  # noqa: PLC0415 - SGLang is there only inside of SGLang
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if "kvd" in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = "KVD", "kvd"
    TransferBackend._member_map_["KVD"] = member
    TransferBackend._value2member_map_["kvd"] = member
    for target, hook in (
        ("sglang.srt.disaggregation.utils.get_kv_class", _class_of_kvd),
        (f"{_QUEUES}.prefill.PrefillBootstrapQueue.create_sender", _of_its_prompt),
        (f"{_QUEUES}.decode.DecodePreallocQueue._create_receiver_and_enqueue", _handed_over),
        (f"{_QUEUES}.decode.DecodePreallocQueue._resolve_prefill_dp_rank", _resolved),
        (f"{_QUEUES}.utils.poll_and_all_reduce", _polled_together),
        (f"{_MEMORY}.kv_cache_configurator.KVCacheConfigurator._init_pools", _init_pools),
        (f"{_MEMORY}.memory_pool.MHATokenToKVPool._create_buffers_normal", _create_buffers),
        (f"{_MEMORY}.memory_pool.MLATokenToKVPool._create_buffers", _create_buffers),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    choices.add_disagg_transfer_backend_choices(["kvd"])


def _class_of_kvd(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != "kvd" or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from kvd.engines.sglang import sides  # noqa: PLC0415 - only processes that transfer need it

    return sides.CLASSES[class_type.value]


def _of_its_prompt(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    created = original(queue, req, *args, **kwargs)
    if hasattr(req.disagg_kv_sender, "prompt"):  # it is ours
        req.disagg_kv_sender.prompt = req.origin_input_ids
    return created


def _handed_over(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A handoff is given to the receiver; elsewhere SGLang takes a request's host for one of few, by which it keeps."""
    host = req.bootstrap_host
    if is_handoff(host):
        req.bootstrap_host = HANDED
    enqueued = original(queue, req, *args, **kwargs)
    if hasattr(enqueued.kv_receiver, "expect"):  # it is ours
        queue.kv_manager.forward_stream = getattr(queue.scheduler, "forward_stream", None)
        prompt = req.origin_input_ids
        if getattr(req, "pd_rebootstrap_in_progress", False):  # a pause retracted it: SGLang has it prefilled again
            prompt = [*prompt, *req.output_ids]
        enqueued.kv_receiver.expect(prompt, host, queue.scheduler.model_config.vocab_size)
    return enqueued


def _resolved(original: Callable[..., Any], queue: Any, req: Any) -> Any:
    """There is no prefill server of SGLang's to ask for what was handed over."""
    return 0 if req.bootstrap_host == HANDED else original(queue, req)


def _polled_together(
    original: Callable[..., list[int]], pollers: list[Any], gloo_group: Any, *args: Any, **kwargs: Any
) -> list[int]:
    polls = original(pollers, gloo_group, *args, **kwargs)
    # With a cache on the host SGLang polls through one that fails a request also when it could not restore that.
    inner = [poller.decode_req.kv_receiver if hasattr(poller, "decode_req") else poller for poller in pollers]
    if not any(hasattr(poller, "give_up") for poller in inner):  # none is ours
        return polls
    from kvd.engines.sglang import sides  # noqa: PLC0415 - only processes that transfer need it

    return sides.polled_together(polls, inner, gloo_group)


def _init_pools(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from kvd.engines.sglang import memory  # noqa: PLC0415 - only processes with a cache need it

    return memory.init_pools(original, *args, **kwargs)


def _create_buffers(original: Callable[..., Any], kv_pool: Any) -> None:
    from kvd.engines.sglang import memory  # noqa: PLC0415 - only processes with a cache need it

    memory.create_buffers(original, kv_pool)
