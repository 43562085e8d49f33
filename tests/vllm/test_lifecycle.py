"""What becomes of a prefill's blocks when its request queues, is sampled several times, is rejected or goes away."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import PATH, Completion, complete, make_body, prefill_body
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import LONGEST, scrape
from tests.vllm.testbed.service import start_all, stop_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "bench"
"""The slowest: the decode side is busy for longer than an offer lives."""

TOKENS = 8
OFFER_TTL = 5.0
BLOCKS = 66
"""Of 32 tokens: room for one request of 2,000 tokens, and beside the shortest one for none as long."""

SHORT, LONG = 100, 2000
DECODED = 1900
"""Tokens of the request that keeps the decode side busy: 20 s where the machine has nothing else to do."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KvdPair]:
    folder = tmp_path_factory.mktemp("lifecycle")
    pair = KvdPair(folder, models, MODEL, blocks=BLOCKS, extra={"offer_ttl": OFFER_TTL})
    pair.prefill.variables = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


async def offered(pair: KvdPair, prompt: list[int], **more: object) -> dict[str, object]:
    """The parameters for the decode side of a request that the prefill side has done its part of."""
    body = prefill_body(make_body(MODEL, prompt, TOKENS, cache_salt=f"offered {len(prompt)}"))
    answer = await post(pair.prefill.url, PATH, body | {"kv_transfer_params": body["kv_transfer_params"] | more})
    params: dict[str, object] = answer["kv_transfer_params"]
    return params


async def alone(pair: KvdPair, prompt: list[int]) -> Completion:
    return await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))


async def read(pair: KvdPair) -> float:
    """Offers of the prefill side that have ended because their consumers had finished."""
    return (await scrape(pair.daemons["prefill"])).total("kvd_offers_total", reason="read")


@pytest.mark.slow
async def test_a_request_that_queues_for_longer_than_its_offer_lives_gets_its_blocks(pair: KvdPair) -> None:
    prompt = make_prompt(LONG, seed=1)
    expected = await alone(pair, prompt)
    first = Completion()
    running = asyncio.create_task(
        complete(pair.decode.url, make_body(MODEL, make_prompt(SHORT, seed=2), DECODED), first)
    )

    async def decodes() -> bool:
        return bool(first.tokens)

    await until(decodes)
    params, since = await offered(pair, prompt), time.monotonic()
    body = make_body(MODEL, prompt, TOKENS, cache_salt="pair") | {"kv_transfer_params": params}
    got = await complete(pair.decode.url, body)
    assert time.monotonic() - since > OFFER_TTL, "it did not queue for long enough to show anything"
    assert_same(got, expected)
    await running


async def test_several_samples_of_one_prompt_read_one_prefill(pair: KvdPair) -> None:
    prompt = make_prompt(100, seed=3)
    expected, before = await alone(pair, prompt), await read(pair)
    params = await offered(pair, prompt, kvd_consumers=2)
    body = make_body(MODEL, prompt, TOKENS, cache_salt="pair", n=2, temperature=0.5, top_k=1) | {
        "kv_transfer_params": params
    }
    choices = (await post(pair.decode.url, PATH, body))["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected.tokens] * 2

    async def ended() -> bool:
        return await read(pair) == before + 1

    await until(ended)


async def test_a_request_that_the_decode_server_rejects_frees_its_prefills_blocks(pair: KvdPair) -> None:
    before = await read(pair)
    params = await offered(pair, make_prompt(101, seed=4))
    body = make_body(MODEL, make_prompt(101, seed=4), 2 * LONGEST) | {"kv_transfer_params": params}
    with pytest.raises(HttpError, match="max_tokens"):
        await complete(pair.decode.url, body)

    async def ended() -> bool:
        return await read(pair) == before + 1

    await until(ended)


@pytest.mark.slow
async def test_a_client_that_hangs_up_while_its_request_queues_frees_its_prefills_blocks(pair: KvdPair) -> None:
    running = asyncio.create_task(complete(pair.decode.url, make_body(MODEL, make_prompt(SHORT, seed=5), DECODED)))

    async def full() -> bool:
        return (await scrape(pair.decode)).total("vllm:num_requests_running") == 1

    await until(full)
    before, prompt = await read(pair), make_prompt(LONG + 1, seed=6)
    body = make_body(MODEL, prompt, TOKENS) | {"kv_transfer_params": await offered(pair, prompt)}
    queued = asyncio.create_task(complete(pair.decode.url, body))

    async def held() -> bool:
        return (await scrape(pair.daemons["prefill"])).total("kvd_claims_active") == 1

    await until(held)
    queued.cancel()

    async def ended() -> bool:
        return await read(pair) == before + 1

    await until(ended)
    assert not running.done(), "the request did not queue"
    running.cancel()


async def test_a_reset_of_the_prefix_cache_leaves_a_standing_offer_alone(pair: KvdPair) -> None:
    prompt = make_prompt(103, seed=7)
    expected = await alone(pair, prompt)
    params = await offered(pair, prompt)
    assert await post(pair.prefill.url, "/reset_prefix_cache", {}) == {"success": False}
    body = make_body(MODEL, prompt, TOKENS, cache_salt="pair") | {"kv_transfer_params": params}
    assert_same(await complete(pair.decode.url, body), expected)
