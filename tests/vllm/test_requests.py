"""Requests that are more than token ids: with LoRA adapters, of embeddings, for several samples."""

import base64
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import PATH, complete, make_body, prefill
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 8
HIDDEN, RANK = 128, 8
OUT = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
LENGTH = 100

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of the Llama with random weights that matter."""
    import torch  # noqa: PLC0415 - as everything of vLLM's environment
    from safetensors.torch import save_file  # noqa: PLC0415

    torch.manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, out in OUT.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(out, RANK) * 0.2
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(OUT), "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")


def embeddings(seed: int) -> str:
    """A prompt of random embeddings, as a request carries it."""
    import torch  # noqa: PLC0415 - as everything of vLLM's environment

    torch.manual_seed(seed)
    buffer = io.BytesIO()
    torch.save(torch.randn(LENGTH, HIDDEN) * 0.2, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def body_of(kind: str, one: bool) -> dict[str, Any]:
    """A request, or another one that its token ids do not tell from it."""
    if kind == "adapter":
        return make_body("first" if one else "second", make_prompt(LENGTH, seed=3), TOKENS)
    body = make_body(MODEL, [], TOKENS)
    del body["prompt"]
    return body | {"prompt_embeds": embeddings(1 if one else 2)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KvdPair]:
    """Servers that know two adapters and take embeddings."""
    folder = tmp_path_factory.mktemp("prompts")
    adapters = [folder / "first", folder / "second"]
    for seed, adapter in enumerate(adapters):
        write_adapter(adapter, seed)
    flags = [
        "--enable-log-requests",
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--enable-prompt-embeds",
        "--lora-modules",
    ]
    flags += [f"{adapter.name}={adapter}" for adapter in adapters]
    pair = KvdPair(folder / "pair", models, MODEL)
    for server in (pair.prefill, pair.decode):
        server.command = lambda command=server.command: [*command(), *flags]
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


@pytest.mark.parametrize("kind", ["adapter", "embeddings"])
async def test_an_answer_for_another_prompt_of_the_same_tokens_is_refused(pair: KvdPair, kind: str) -> None:
    first, second = body_of(kind, one=True), body_of(kind, one=False)
    expected = await complete(pair.decode.url, first | {"cache_salt": "alone"})
    other = await complete(pair.decode.url, second | {"cache_salt": "alone"})
    assert expected.tokens != other.tokens, "the two must differ for this to show anything"
    params = await prefill(pair.prefill.url, first)
    assert_same(await complete(pair.decode.url, first | {"kv_transfer_params": params}), expected)
    params = await prefill(pair.prefill.url, first)
    with pytest.raises(HttpError, match="500"):
        await complete(pair.decode.url, second | {"kv_transfer_params": params})
    assert "does the router mix up requests?" in pair.decode.log.read_text(errors="replace")


@pytest.mark.parametrize("length", [LENGTH, 3 * BLOCK, 3])
async def test_several_samples_are_served_from_one_offer_also_where_the_router_does_not_say_how_many(
    pair: KvdPair, length: int
) -> None:
    """One of them pulls; the others wait for it, and find its blocks in the prefix cache."""
    prompt = make_prompt(length, seed=10 + length)
    expected = await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))
    body = make_body(MODEL, prompt, TOKENS, n=3, temperature=0.5, top_k=1)
    params = await prefill(pair.prefill.url, body | {"n": 1})
    choices = (await post(pair.decode.url, PATH, body | {"kv_transfer_params": params}))["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected.tokens] * 3


async def test_a_proxy_that_copies_nixls_fields_alone_hands_a_prefill_over(pair: KvdPair) -> None:
    body = make_body(MODEL, make_prompt(LENGTH, seed=4), TOKENS)
    expected = await complete(pair.decode.url, body | {"cache_salt": "alone"})
    params = await prefill(pair.prefill.url, body)
    copied = {name: params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host")}
    got = await complete(pair.decode.url, body | {"kv_transfer_params": {"do_remote_prefill": True, **copied}})
    assert_same(got, expected)


async def test_the_logs_of_requests_show_no_ticket(pair: KvdPair) -> None:
    body = make_body(MODEL, make_prompt(LENGTH, seed=5), TOKENS)
    params = await prefill(pair.prefill.url, body)
    await complete(pair.decode.url, body | {"kv_transfer_params": params})
    for server in (pair.prefill, pair.decode):
        log = server.log.read_text(errors="replace")
        assert "'do_remote_" in log, "the requests are logged with their parameters"
        assert re.findall(r"kvd1\.[A-Za-z0-9_-]+", log) == []
    assert "'kvd_ticket': 'kvd1.(not shown)'" in pair.decode.log.read_text(errors="replace")
