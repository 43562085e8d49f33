"""What becomes of a prefill's blocks when its request queues, is sampled several times, is rejected or goes away.

And of a request that loses its own.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.support.patience import PATIENCE
from tests.vllm.held import claimed, nothing_is_held
from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import PATH, Completion, complete, make_body, prefill_body
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import LONGEST, scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "bench"
TOKENS = 8
SHORT, LONG = 100, 2000
"""Tokens of prompts. A cache that has one of the latter has no room for any other request (`shared.BLOCKS`)."""

DECODED = 1900
PREEMPTED = 160
"""Tokens of an answer: with 960 before them 35 blocks, of which the cache has 65."""

FILLERS = 4
"""Requests that keep the decode side busy: 40 s where the machine has nothing else to do, if they are let."""


@pytest_asyncio.fixture(loop_scope="module")
async def pair(shared: Shared) -> KvdPair:
    return await shared.mortal("fail")


async def offered(pair: KvdPair, prompt: list[int], **more: object) -> dict[str, object]:
    """The parameters for the decode side of a request that the prefill side has done its part of."""
    body = prefill_body(make_body(MODEL, prompt, TOKENS, cache_salt=f"offered {len(prompt)}"))
    answer = await post(pair.prefill.url, PATH, body | {"kv_transfer_params": body["kv_transfer_params"] | more})
    params: dict[str, object] = answer["kv_transfer_params"]
    return params


async def alone(pair: KvdPair, prompt: list[int]) -> Completion:
    return await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))


async def ended(pair: KvdPair, reason: str) -> float:
    """Offers of the prefill side that have ended: `read` by all their consumers, or `expired`."""
    return (await scrape(pair.daemons["prefill"])).total("kvd_offers_total", reason=reason)


@asynccontextmanager
async def full(pair: KvdPair) -> AsyncIterator[None]:
    """A decode side whose cache has no room for a long prompt inside of the context."""

    async def fill(seed: int) -> None:
        await complete(pair.decode.url, make_body(MODEL, make_prompt(SHORT, seed=seed), DECODED))

    async def runs() -> bool:
        return (await scrape(pair.decode)).total("vllm:num_requests_running") > 0

    fillers = [asyncio.create_task(fill(200 + number)) for number in range(FILLERS)]
    try:
        await until(runs)
        yield
        assert not all(filler.done() for filler in fillers), "nothing had to queue"
    finally:
        for filler in fillers:
            filler.cancel()
        await asyncio.wait(fillers)


async def queued(pair: KvdPair, prompt: list[int]) -> asyncio.Task[Completion]:
    """A request that queues at the decode side, which holds its offer; where it came too late for that, another one."""
    async with asyncio.timeout(PATIENCE):
        while True:
            expired, params = await ended(pair, "expired"), await offered(pair, prompt)
            body = make_body(MODEL, prompt, TOKENS, cache_salt="pair") | {"kv_transfer_params": params}
            request = asyncio.create_task(complete(pair.decode.url, body))

            async def decided(expired: float = expired) -> bool:
                return await claimed(pair) or await ended(pair, "expired") > expired

            await until(decided)
            if await claimed(pair):
                return request
            request.cancel()


@pytest.mark.slow
async def test_a_request_that_queues_for_longer_than_its_offer_lives_gets_its_blocks(pair: KvdPair) -> None:
    prompt = make_prompt(LONG, seed=1)
    expected = await alone(pair, prompt)
    async with full(pair):
        request, expired = await queued(pair, prompt), await ended(pair, "expired")
        await offered(pair, make_prompt(20, seed=2))  # nobody takes it, so that it ends with its time

        async def later_one_ended() -> bool:
            return await ended(pair, "expired") == expired + 1

        await until(later_one_ended)
        assert await claimed(pair)
    assert_same(await request, expected)


async def test_several_samples_of_one_prompt_read_one_prefill(pair: KvdPair) -> None:
    prompt = make_prompt(100, seed=3)
    expected, before = await alone(pair, prompt), await ended(pair, "read")
    params = await offered(pair, prompt, kvd_consumers=2)
    body = make_body(MODEL, prompt, TOKENS, cache_salt="pair", n=2, temperature=0.5, top_k=1) | {
        "kv_transfer_params": params
    }
    choices = (await post(pair.decode.url, PATH, body))["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected.tokens] * 2

    async def freed() -> bool:
        return await ended(pair, "read") == before + 1

    await until(freed)


async def test_a_request_that_the_decode_server_rejects_frees_its_prefills_blocks(pair: KvdPair) -> None:
    before = await ended(pair, "read")
    params = await offered(pair, make_prompt(101, seed=4))
    body = make_body(MODEL, make_prompt(101, seed=4), 2 * LONGEST) | {"kv_transfer_params": params}
    with pytest.raises(HttpError, match="max_tokens"):
        await complete(pair.decode.url, body)

    async def freed() -> bool:
        return await ended(pair, "read") == before + 1

    await until(freed)


@pytest.mark.slow
async def test_a_client_that_hangs_up_while_its_request_queues_frees_its_prefills_blocks(pair: KvdPair) -> None:
    async with full(pair):
        before = await ended(pair, "read")
        request = await queued(pair, make_prompt(LONG + 1, seed=6))
        request.cancel()

        async def freed() -> bool:
            return await ended(pair, "read") == before + 1

        await until(freed)


@pytest.mark.slow
async def test_clients_that_hang_up_while_their_prompts_are_prefilled_leave_nothing(pair: KvdPair) -> None:
    for number in range(8):
        request = asyncio.create_task(offered(pair, make_prompt(LONG - number, seed=10 + number)))
        await asyncio.wait([request], timeout=0.1 * number)
        request.cancel()
        await asyncio.wait([request])
    await nothing_is_held(pair)


@pytest.mark.slow
async def test_a_client_that_hangs_up_while_its_blocks_are_loaded_leaves_nothing(pair: KvdPair) -> None:
    body = make_body(MODEL, make_prompt(500, seed=20), TOKENS)
    body |= {"kv_transfer_params": await offered(pair, make_prompt(500, seed=20))}
    daemon = pair.daemons["decode"]
    daemon.signal_group(signal.SIGSTOP)
    try:
        request = asyncio.create_task(complete(pair.decode.url, body))

        async def waits() -> bool:
            return (await scrape(pair.decode)).total("vllm:num_requests_waiting") > 0

        await until(waits)
        request.cancel()
        await asyncio.wait([request])
    finally:
        daemon.signal_group(signal.SIGCONT)
    await nothing_is_held(pair)


@pytest.mark.slow
async def test_a_client_that_hangs_up_while_its_tokens_are_made_leaves_nothing(pair: KvdPair) -> None:
    body = make_body(MODEL, make_prompt(SHORT, seed=21), DECODED)
    body |= {"kv_transfer_params": await offered(pair, make_prompt(SHORT, seed=21))}
    made = Completion()
    request = asyncio.create_task(complete(pair.decode.url, body, made))

    async def decodes() -> bool:
        return bool(made.tokens)

    await until(decodes)
    request.cancel()
    await asyncio.wait([request])
    await nothing_is_held(pair)


@pytest.mark.slow
async def test_requests_that_lose_their_blocks_to_others_get_the_same_tokens(pair: KvdPair) -> None:
    """Of two that fit into the cache as they come and not as they end: vLLM preempts one, and computes it again."""
    prompts = [make_prompt(960, seed=30 + number) for number in range(2)]
    body = [make_body(MODEL, prompt, PREEMPTED, cache_salt="alone") for prompt in prompts]
    expected = [await complete(pair.decode.url, one) for one in body]
    before = (await scrape(pair.decode)).total("vllm:num_preemptions_total")
    # Both are prefilled before the decode side gets either: it would have ended one before the other came.
    params = [await offered(pair, prompt) for prompt in prompts]
    asked = [make_body(MODEL, prompt, PREEMPTED, cache_salt="pair") for prompt in prompts]
    asked = [one | {"kv_transfer_params": theirs} for one, theirs in zip(asked, params, strict=True)]
    got = await asyncio.gather(*(complete(pair.decode.url, one) for one in asked))
    assert (await scrape(pair.decode)).total("vllm:num_preemptions_total") > before
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours, theirs)
    await nothing_is_held(pair)


async def test_a_reset_of_the_prefix_cache_leaves_a_standing_offer_alone(pair: KvdPair) -> None:
    prompt = make_prompt(103, seed=7)
    expected = await alone(pair, prompt)
    params = await offered(pair, prompt)
    assert await post(pair.prefill.url, "/reset_prefix_cache", {}) == {"success": False}
    body = make_body(MODEL, prompt, TOKENS, cache_salt="pair") | {"kv_transfer_params": params}
    assert_same(await complete(pair.decode.url, body), expected)
