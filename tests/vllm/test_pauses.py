"""Pauses of servers, for sleep and for other weights: what is offered can be read, and nothing of it stays.

On a CPU vLLM's sleep is a pause without more: it keeps weights and cache where they are.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.held import claimed
from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.http import get, post
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Server
from tests.vllm.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "bench"
TOKENS = 8
LENGTH = 200


@pytest_asyncio.fixture(loop_scope="module")
async def pair(shared: Shared) -> KvdPair:
    return await shared.mortal("fail")


async def alone(pair: KvdPair, prompt: list[int]) -> Completion:
    return await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))


@asynccontextmanager
async def paused(server: Server, how: str, end: str) -> AsyncIterator[asyncio.Task[object]]:
    """A server that takes in no request inside of the context; the task ends when it has none left."""
    pause = asyncio.create_task(post(server.url, how, {}))

    async def begun() -> bool:
        return bool(json.loads(await get(server.url, "/is_sleeping"))["is_sleeping"])

    await until(begun)
    try:
        yield pause
    finally:
        await pause
        await post(server.url, end, {})


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("/sleep?level=1&mode=wait", "/wake_up"),
        ("/sleep?level=2&mode=abort", "/wake_up"),
        ("/pause?mode=wait", "/resume"),
        ("/pause?mode=abort", "/resume"),
    ],
)
async def test_a_prefill_server_that_is_paused_has_its_offer_read_first(pair: KvdPair, how: str, end: str) -> None:
    prompt = make_prompt(LENGTH, seed=1)
    expected = await alone(pair, prompt)
    body = make_body(MODEL, prompt, TOKENS, cache_salt=how.strip("/"))
    params = await prefill(pair.prefill.url, body)
    async with paused(pair.prefill, how, end) as pause:
        assert not pause.done(), "it waits for the offer"
        assert_same(await complete(pair.decode.url, body | {"kv_transfer_params": params}), expected)
    assert_same(await pair.complete(prompt, TOKENS, cache_salt="again"), expected)


async def test_a_request_that_comes_while_the_decode_server_is_paused_has_its_offer_held(pair: KvdPair) -> None:
    """However long that takes: what is held does not end by its time."""
    prompt = make_prompt(LENGTH, seed=2)
    expected = await alone(pair, prompt)
    body = make_body(MODEL, prompt, TOKENS, cache_salt="paused")
    async with paused(pair.decode, "/pause?mode=keep", "/resume"):
        params = await prefill(pair.prefill.url, body)
        request = asyncio.create_task(complete(pair.decode.url, body | {"kv_transfer_params": params}))
        await until(partial(claimed, pair))
        assert not request.done()
    assert_same(await request, expected)


async def test_both_sides_take_other_weights_and_nothing_of_the_old_ones_is_found(
    pair: KvdPair, models: Path, tmp_path: Path
) -> None:
    """Neither in prefix caches nor in what is offered: the same prompt, under the same salt, gives the new tokens."""
    prompt = make_prompt(LENGTH, seed=3)
    first = await pair.complete(prompt, TOKENS)
    write_other_weights(models / MODEL, tmp_path / "other")
    try:
        await load(pair, tmp_path / "other")
        other = await alone(pair, prompt)
        assert other.tokens != first.tokens, "the weights must matter for this to show anything"
        assert_same(await pair.complete(prompt, TOKENS), other)
    finally:
        await load(pair, models / MODEL)
    assert_same(await pair.complete(prompt, TOKENS), first)


async def load(pair: KvdPair, weights: Path) -> None:
    for server in (pair.prefill, pair.decode):
        async with paused(server, "/pause?mode=wait", "/resume") as pause:
            await pause
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            await post(server.url, "/collective_rpc", call)


def write_other_weights(model: Path, folder: Path) -> None:
    """The same model with noise of its weights' own size."""
    import torch  # noqa: PLC0415 - as everything of vLLM's environment
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    folder.mkdir()
    torch.manual_seed(1)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    other = {
        name: weight + torch.randn_like(weight) * weight.std() for name, weight in weights.items() if weight.ndim > 1
    }
    save_file(weights | other, folder / "model.safetensors", {"format": "pt"})
