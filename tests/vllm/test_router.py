"""`kvd router` before a real pair: the right tokens, and nothing held for clients that are gone."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvd.router.attempts import Attempts
from kvd.router.body import Body, Request
from kvd.router.cleanup import Cleanup
from kvd.router.clients.completions import passed_on
from kvd.router.engines import Prefilled
from kvd.router.metrics import Metrics
from kvd.router.servers import Servers
from kvd.router.upstream import Timeouts, Upstream
from tests.support.patience import PATIENCE
from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import PATH, complete, make_body, prefill
from tests.vllm.testbed.http import HttpError, post
from tests.vllm.testbed.pair import KvdPair, NixlPair
from tests.vllm.testbed.servers import RouterProcess, scrape
from tests.vllm.testbed.service import start_all, stop_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "llama"
TOKENS = 12


@dataclass
class Routed:
    """A pair and a router before it."""

    pair: KvdPair
    router: RouterProcess
    expired: float = 0.0
    """Offers of the prefill side that ended by their ttl before the test."""

    async def expired_offers(self) -> float:
        return (await scrape(self.pair.prefill)).total("vllm:kvd_expired_offers_total")

    async def nothing_is_held(self) -> None:
        """Waits until the daemons have no lease and no pull, and the engines no request; no offer ended by its ttl."""
        daemons = [
            (self.pair.daemons["prefill"], "kvd_leases_active"),
            (self.pair.daemons["decode"], "kvd_pulls_active"),
        ]

        async def frees() -> bool:
            return not sum([(await scrape(daemon)).total(name) for daemon, name in daemons])

        async def idles() -> bool:
            await self.pair.complete(make_prompt(3, seed=0), 2)  # engines bring their gauges up to date when they step
            gauges = [await scrape(server) for server in (self.pair.prefill, self.pair.decode)]
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return not sum(gauge.total(name) for gauge in gauges for name in names)

        await until(frees)
        await until(idles)
        assert await self.expired_offers() == self.expired


@pytest_asyncio.fixture(loop_scope="module")
async def routed(shared: Shared) -> Routed:
    compared = await shared.compared(MODEL)
    made = Routed(compared.pair, compared.router)
    made.expired = await made.expired_offers()
    return made


async def test_the_tokens_are_those_of_a_single_server(routed: Routed) -> None:
    body = make_body(MODEL, make_prompt(500, seed=1), TOKENS, cache_salt="router")
    daemon = routed.pair.daemons["decode"]
    read = (await scrape(daemon)).total("kvd_read_bytes_total")
    got = await complete(routed.router.url, body)
    assert (await scrape(daemon)).total("kvd_read_bytes_total") > read
    assert_same(got, await complete(routed.pair.decode.url, body))
    await routed.nothing_is_held()


async def test_both_servers_get_a_request_at_once_and_the_tokens_are_those_of_a_single_server(routed: Routed) -> None:
    async def early() -> float:
        return (await scrape(routed.router)).total("kvd_router_early_total", outcome="done")

    await complete(routed.router.url, make_body(MODEL, make_prompt(40, seed=5), TOKENS))  # after which it knows how
    for length in (30, 700, 1500):
        body, before = make_body(MODEL, make_prompt(length, seed=length), TOKENS, cache_salt="early"), await early()
        assert_same(await complete(routed.router.url, body), await complete(routed.pair.decode.url, body))
        assert await early() == before + 1
    await routed.nothing_is_held()


async def test_several_completions_of_one_prompt_share_its_prefill(routed: Routed) -> None:
    body = make_body(MODEL, make_prompt(500, seed=2), TOKENS, n=3) | {"temperature": 1.0, "seed": 1}
    async with asyncio.timeout(PATIENCE):
        answer = await post(routed.router.url, PATH, body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    await routed.nothing_is_held()


async def test_clients_that_disconnect_leave_nothing(routed: Routed) -> None:
    for number in range(12):
        body = make_body(MODEL, make_prompt(1000, seed=100 + number), 500, cache_salt="router")
        asking = asyncio.create_task(complete(routed.router.url, body))
        await asyncio.wait([asking], timeout=0.02 * number)
        asking.cancel()
        await asyncio.wait([asking])
    await routed.nothing_is_held()


async def test_a_request_that_a_decode_server_refuses_in_its_stream_leaves_nothing(routed: Routed) -> None:
    """Its prefill asks for no log-probabilities, and vLLM looks at how many are asked for when the answer has begun."""
    body = make_body(MODEL, make_prompt(500, seed=7), TOKENS) | {"stream": True, "logprobs": 1000}
    with pytest.raises(HttpError, match="1000") as refused:
        await post(routed.router.url, PATH, body)
    assert refused.value.status == HTTPStatus.BAD_GATEWAY
    await routed.nothing_is_held()


async def test_an_offer_that_no_decode_server_took_is_released(routed: Routed) -> None:
    decode = Servers("decode", [routed.pair.decode.url])
    async with Upstream(Timeouts(60, 60)) as upstream:
        cleanup = Cleanup(decode, upstream, Metrics(decode.all))
        for number in range(10):
            asked = make_body(MODEL, make_prompt(700, seed=30 + number), TOKENS)
            params = Prefilled(msgspec.Raw(msgspec.json.encode(await prefill(routed.pair.prefill.url, asked))))
            request = Request(PATH, Body(msgspec.json.encode(asked)), passed_on({}), 0.0, client="")
            cleanup.release(request, Attempts(left_over=[params]))
            await cleanup.close()
    await routed.nothing_is_held()


@pytest.mark.slow
async def test_vllms_own_connector_moves_blocks_between_servers_behind_it(models: Path, tmp_path: Path) -> None:
    pair = NixlPair(tmp_path, models, MODEL)
    router = RouterProcess(tmp_path, pair.prefill, pair.decode)
    body = make_body(MODEL, make_prompt(500, seed=6), TOKENS)
    try:
        await start_all([*pair.services, router])
        await pair.meet()
        moved = (await scrape(pair.decode)).total("vllm:nixl_bytes_transferred_sum")
        got = await complete(router.url, body)
        assert (await scrape(pair.decode)).total("vllm:nixl_bytes_transferred_sum") > moved
        assert_same(got, await complete(pair.decode.url, body | {"cache_salt": "alone"}))
    finally:
        stop_all([*pair.services, router])
