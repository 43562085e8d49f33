"""A prefill and a decode engine of vLLM on one GPU, each with its KV cache in a pool of kvd.

Their tokens are compared with those of an engine without kvd. The model is a Llama of four layers, whose random weights
are of the scale that a trained model has: with vLLM's own dummy weights attention hardly matters, and wrong KV blocks
would go unnoticed.
"""

import importlib.util
import json
import random
import select
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from benchmarks.gpu.steps import Skipped
from kvd.bench.gpu import Side
from kvd.limits import MIB
from kvd.net.inquiry import Inquiry
from kvd.processes import Processes
from kvd.protocol.status import StatusReport, decode

LENGTHS: Final = (53, 700, 5, 16, 200)
"""Tokens of the prompts, whose blocks have 16."""
TOKENS: Final = 16
"""Of each answer."""

ENGINE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # its metrics say what was pulled
        "dtype": "float32",  # in bfloat16 two batches may round to different tokens
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": 16,
        "kv_cache_memory_bytes": 64 * MIB,
        "gpu_memory_utilization": 0.05,  # three engines share the GPU
    }
)
ON_GPU: Final[Mapping[str, Any]] = MappingProxyType({"attention_backend": "TRITON_ATTN", "enforce_eager": True})
"""FlashAttention takes no float32."""
GRAPHS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    }
)
"""For the decode engine: graphs write to the pool. Without torch.compile, which would take a minute."""

_VOCABULARY: Final = 512
_LAYERS: Final = 4
_HIDDEN: Final = 256
_HEADS: Final = 4
_KV_HEADS: Final = 2
_SEED: Final = 1
_SECONDS: Final = 150.0
"""For an engine's start, in which it compiles its kernels, and for an answer."""
_LOG_LINES: Final = 60


def vllm(*, quick: bool) -> dict[str, Any]:
    """Prefill on one engine and decode on the other give the tokens of a single one; no engine computes twice."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    import torch  # noqa: PLC0415 - vLLM brings it

    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    return compare("cuda:0", LENGTHS[: 2 if quick else None], {**ENGINE, **ON_GPU}, GRAPHS)


def compare(
    memory: str, lengths: Sequence[int], engine: Mapping[str, Any], decoding: Mapping[str, Any]
) -> dict[str, Any]:
    """Answers for pools in `memory` ("cuda:N" or "cpu"); `decoding` is what the decode engine has beside `engine`.

    Raises:
        AssertionError: tokens differ, an engine computed what it should have pulled, or one ended.

    """
    prompts = [make_prompt(length) for length in lengths]
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as name, Processes(Path(name)) as processes:
        folder = Path(name)
        write_model(folder / "model")
        arguments = {**engine, "model": str(folder / "model")}
        sides = [Side(processes, folder, side, memory) for side in ("p", "d")]
        single = Engine(processes, folder, "single", arguments)
        prefill = Engine(processes, folder, "prefill", {**arguments, **_connected(sides[0])})
        decoder = Engine(processes, folder, "decode", {**arguments, **decoding, **_connected(sides[1])})
        about = {each.name: each.read() for each in (single, prefill, decoder)}

        wanted = single.complete(prompts, TOKENS)
        prefilled = prefill.complete(prompts, 1, [{"do_remote_decode": True}] * len(prompts))
        got = decoder.complete(prompts, TOKENS, prefilled["params"])
        status = _status(sides[1])
    check_tokens(prompts, wanted["completions"], got["completions"])
    check_pulls(prompts, got["tokens pulled"], status.totals.pulls)
    if memory != "cpu":
        check_memory(about)
    return {
        "prompts, tokens": ", ".join(str(length) for length in lengths),
        "tokens are those of a single engine": True,
        "pulls done": status.totals.pulls["done"],
        "tokens pulled": got["tokens pulled"],
        "bytes pulled": status.totals.read_bytes,
        "pool of the decode engine, bytes": sum(pool.bytes for pool in status.pools),
        "engines": [{"engine": name, **said} for name, said in about.items()],
    }


def check_tokens(prompts: list[list[int]], wanted: list[list[int]], got: list[list[int]]) -> None:
    """Compares tokens.

    Raises:
        AssertionError: They differ, or are such that wrong KV blocks could give them, too.

    """
    if len({tuple(tokens) for tokens in wanted}) < len(prompts):
        raise AssertionError(f"prompts that end alike have equal answers, whatever the KV blocks: {wanted}")
    for prompt, want, have in zip(prompts, wanted, got, strict=True):
        if have != want:
            raise AssertionError(f"after the prompt of {len(prompt)} tokens: {have}, a single engine has {want}")


def check_pulls(prompts: list[list[int]], tokens: int, pulls: Mapping[str, int]) -> None:
    """Checks that the decode engine computed no more than the last token of each prompt.

    Raises:
        AssertionError: It did.

    """
    least = sum(len(prompt) - 1 for prompt in prompts)
    if tokens < least or pulls.get("done") != len(prompts):
        text = f"{tokens} tokens of at least {least} were pulled, in pulls that ended so: {dict(pulls)}"
        raise AssertionError(text)


def check_memory(about: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that the caches of the two engines are in no memory of torch, and those of the single one all are.

    Raises:
        AssertionError: It is otherwise.

    """
    for name, said in about.items():
        expected = said["layers"] if name == "single" else 0
        if said["layers in torch's memory"] != expected:
            raise AssertionError(
                f"layers of the engine {name!r} whose KV cache torch allocated, not {expected}: {said}"
            )


class Engine:
    """An engine of vLLM, made with `arguments`."""

    def __init__(self, processes: Processes, folder: Path, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._child = processes.start(name, "benchmarks.gpu.engine", json.dumps(dict(arguments)), piped=True)
        self._answers = open(self._child.source, closefd=False)  # noqa: SIM115 - it ends with its process

    def read(self) -> dict[str, Any]:
        """The next line that it says.

        Raises:
            AssertionError: it ended, or said nothing in time; with the end of its log.

        """
        heard, _, _ = select.select([self._child.source], [], [], _SECONDS)
        line = self._answers.readline() if heard else ""
        if not line:
            raise self._failed("ended" if heard else f"said nothing for {_SECONDS:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> AssertionError:
        self._child.wait(10.0)  # if it is ending, its log says more then
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return AssertionError("\n".join([f"the engine {self.name!r} {how}; the end of its log:", *lines]))

    def complete(
        self, prompts: list[list[int]], tokens: int, params: Sequence[Mapping[str, Any] | None] = ()
    ) -> dict[str, Any]:
        """What it makes of `prompts` with their `kv_transfer_params`, if any: see `benchmarks.gpu.engine.complete`.

        Raises:
            AssertionError: as `read`, or it did not complete them all.

        """
        request = {"prompts": prompts, "tokens": tokens, "params": list(params) or [None] * len(prompts)}
        self._child.write(json.dumps(request).encode() + b"\n")
        answer = self.read()
        lengths = [len(completion) for completion in answer["completions"]]
        if lengths != [tokens] * len(prompts):
            raise self._failed(f"gave {lengths} tokens where {tokens} were asked for")
        return answer


def _connected(side: Side) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd.engines.vllm",  # kvd may be a checkout, without its entry point
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"socket": str(side.socket)},
        }
    }


def _status(side: Side) -> StatusReport:
    with Inquiry(str(side.socket)) as inquiry:
        return decode(inquiry.status(10.0))


def make_prompt(length: int) -> list[int]:
    """Random tokens, of which the last is the same in all prompts."""
    source = random.Random(length)  # noqa: S311 - no secret
    return [*(source.randrange(2, _VOCABULARY) for _ in range(length - 1)), 2]


def write_model(folder: Path) -> None:
    """Writes the configuration and the weights of a Llama."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - vLLM brings it

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    source = np.random.default_rng(_SEED)
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else source.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in _shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes() -> dict[str, tuple[int, ...]]:
    """Of all weights, by their names; norms have one dimension."""
    width = _HIDDEN // _HEADS * _KV_HEADS
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (width, _HIDDEN),
        "self_attn.v_proj": (width, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.up_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 2 * _HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{number}.{name}.weight": shape for number in range(_LAYERS) for name, shape in layer.items()
    }
    ends = {"model.embed_tokens": (_VOCABULARY, _HIDDEN), "model.norm": (_HIDDEN,), "lm_head": (_VOCABULARY, _HIDDEN)}
    return shapes | {f"{name}.weight": shape for name, shape in ends.items()}
