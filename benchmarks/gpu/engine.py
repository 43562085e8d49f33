"""One engine of vLLM in a process of its own: `python -m benchmarks.gpu.engine ARGUMENTS`.

`ARGUMENTS` are those of `vllm.LLM` as JSON. It reads requests from its input and writes answers to its output, each a
line of JSON; the first line says what it is. What vLLM logs, and an error that ends it, goes to standard error.
"""

import json
import os
import select
import sys
from typing import Any, Final

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, which dies with its parent
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_PULLED: Final = "vllm:external_prefix_cache_hits"


def main(arguments: dict[str, Any]) -> None:
    """Answers requests until its input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # vLLM logs to its output, too
        os.environ.update(_ENVIRONMENT)
        import torch  # noqa: PLC0415 - reads the environment
        import vllm  # noqa: PLC0415
        from vllm.platforms import current_platform  # noqa: PLC0415

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        llm = vllm.LLM(**arguments)
        about = {"vllm": vllm.__version__, "torch": torch.__version__, "platform": current_platform.device_type}
        say({**about, **llm.collective_rpc(_describe)[0]})
        while line := sys.stdin.readline():
            say(complete(llm, **json.loads(line)))
            _go_on(llm.llm_engine)


def complete(llm: Any, prompts: list[list[int]], tokens: int, params: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The likeliest `tokens` tokens after each prompt.

    `params` are each one's `kv_transfer_params`, as a router passes them on. The answer has those for the other side,
    and the tokens of prompts that came from another engine since the start, as vLLM's scheduler counts.
    """
    from vllm import SamplingParams  # noqa: PLC0415

    common: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    sampling = [SamplingParams(**common, extra_args={"kv_transfer_params": each} if each else None) for each in params]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return {
        "completions": [list(output.outputs[0].token_ids) for output in outputs],
        "params": [output.kv_transfer_params for output in outputs],
        "tokens pulled": sum(metric.value for metric in llm.get_metrics() if metric.name == _PULLED),
    }


def _go_on(engine: Any) -> None:
    """Makes steps, as a server does, while blocks of ended requests are held: in these the connector offers them.

    It ends with the next request.
    """
    while engine.engine_core.engine_core.scheduler.has_requests() and not select.select([sys.stdin], [], [], 0)[0]:
        engine.step()


def _describe(worker: Any) -> dict[str, Any]:
    """How this worker runs its model, and how many layers have their KV cache in memory that torch allocated."""
    import torch  # noqa: PLC0415
    from vllm.compilation.counter import compilation_counter  # noqa: PLC0415

    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    caches = [tensor.data_ptr() for tensor in worker.model_runner.kv_caches]
    on_gpu = torch.cuda.is_available()
    snapshot: list[dict[str, int]] = torch.cuda.memory_snapshot() if on_gpu else []  # type: ignore[no-untyped-call]
    segments = [(at["address"], at["address"] + at["total_size"]) for at in snapshot]
    return {
        "attention": ", ".join(sorted(backends)),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "captured": compilation_counter.num_cudagraph_captured,
        "runner": 2 if config.use_v2_model_runner else 1,
        "layers": len(caches),
        "layers in torch's memory": sum(any(begin <= at < end for begin, end in segments) for at in caches),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
