"""A request that is aborted in any phase ends on both servers, holds nothing, and costs others no token."""

import asyncio
import itertools
import signal
from typing import Any

import pytest
import pytest_asyncio

from tests.sglang.shared import Compared, Shared
from tests.sglang.testbed.client import PATH, complete, make_body
from tests.sglang.testbed.pair import KvdPair
from tests.sglang.testbed.servers import CHUNK, LONGEST, Server
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.http import HttpError, post, request
from tests.vllm.testbed.servers import Daemon, scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 800
"""Tokens to be generated: the request would not end before it is aborted."""


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Shared) -> Compared:
    return await shared.compared("llama")


class Request:
    """A request at some of a pair's servers, by an id of its own."""

    def __init__(self, pair: KvdPair, name: str, prompt: int = 2 * CHUNK + 5, tokens: int = LONG) -> None:
        self._body = pair.roomed(make_body(make_prompt(prompt, seed=len(name)), tokens, rid=name))
        self._answers: dict[Server, asyncio.Task[str]] = {}

    def send(self, *servers: Server) -> None:
        for server in servers:
            self._answers[server] = asyncio.create_task(self._ask(server))

    async def abort(self, *servers: Server) -> dict[Server, str]:
        """Aborts it until it has ended, and returns how it did."""
        for server in servers:

            async def ended(server: Server = server) -> bool:
                async with request(server.url, "/abort_request", {"rid": self._body["rid"]}) as response:
                    await response.read()
                return self._answers[server].done()

            await until(ended)
        return {server: await self._answers[server] for server in servers}

    async def _ask(self, server: Server) -> str:
        try:
            answer: Any = await post(server.url, PATH, self._body)
        except HttpError as error:
            return str(error)
        return str(answer["meta_info"]["finish_reason"]["type"])


async def assert_works(served: Compared) -> None:
    """Nothing is held, and another request gets its tokens."""
    for daemon in served.pair.daemons.values():

        async def idle(daemon: Daemon = daemon) -> bool:
            metrics = await scrape(daemon)
            return all(
                metrics.total(name) == 0 for name in ("kvd_leases_active", "kvd_pulls_active", "kvd_held_blocks")
            )

        await until(idle)
    prompt = make_prompt(CHUNK + 3, seed=77)
    assert_same(await served.pair.complete(prompt, 8), await complete(served.single.url, make_body(prompt, 8)))


async def test_a_request_that_only_the_decode_server_has(served: Compared) -> None:
    aborted = Request(served.pair, "decode alone")
    aborted.send(served.pair.decode)
    await aborted.abort(served.pair.decode)
    await assert_works(served)


async def test_a_request_that_only_the_prefill_server_has(served: Compared) -> None:
    aborted = Request(served.pair, "prefill alone")
    aborted.send(served.pair.prefill)
    await aborted.abort(served.pair.prefill)
    await assert_works(served)


async def test_a_request_that_is_prefilled_or_about_to_be(served: Compared) -> None:
    aborted = Request(served.pair, "both")
    aborted.send(served.pair.prefill, served.pair.decode)
    await aborted.abort(served.pair.prefill, served.pair.decode)
    await assert_works(served)


async def test_a_request_that_is_being_pulled(served: Compared) -> None:
    pair, daemon = served.pair, served.pair.daemons["decode"]
    aborted = Request(pair, "being pulled")
    daemon.signal(signal.SIGSTOP)
    try:
        aborted.send(pair.prefill, pair.decode)

        async def offered() -> bool:
            return (await scrape(pair.daemons["prefill"])).total("kvd_leases_active") > 0

        await until(offered)
        await aborted.abort(pair.prefill)
    finally:
        daemon.signal(signal.SIGCONT)
    await aborted.abort(pair.decode)
    await assert_works(served)


async def caught_in_its_prefill(pair: KvdPair) -> Request:
    """A request of which a part was read and the rest is not computed: its prefill server stands still."""
    chunks = LONGEST // CHUNK - 1
    before = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")
    await pair.complete(make_prompt(chunks * CHUNK, seed=50), 1)
    whole = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total") - before
    for attempt in itertools.count(60):
        before = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")
        caught = Request(pair, "growing" * attempt, chunks * CHUNK, LONGEST - chunks * CHUNK - 1)
        caught.send(pair.prefill, pair.decode)
        moved = 0.0

        async def reads(before: float = before) -> bool:
            nonlocal moved
            moved = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total") - before
            return moved > 0

        await until(reads)
        pair.prefill.signal_group(signal.SIGSTOP)
        if moved < whole and (await scrape(pair.daemons["decode"])).total("kvd_pulls_active"):
            return caught
        pair.prefill.signal_group(signal.SIGCONT)
        await caught.abort(pair.prefill, pair.decode)
    raise AssertionError


async def test_a_request_that_is_pulled_while_it_is_prefilled(served: Compared) -> None:
    """The decode server ends it while the prefill server stands still, which then goes on, and others get theirs."""
    aborted = await caught_in_its_prefill(served.pair)
    try:
        await aborted.abort(served.pair.decode)
    finally:
        served.pair.prefill.signal_group(signal.SIGCONT)
    await aborted.abort(served.pair.prefill)
    await assert_works(served)


async def test_a_request_that_decodes(served: Compared) -> None:
    pair = served.pair
    before = (await scrape(pair.daemons["decode"])).total("kvd_pulls_total", outcome="done")
    aborted = Request(pair, "decoding")
    aborted.send(pair.prefill, pair.decode)

    async def pulled() -> bool:
        return (await scrape(pair.daemons["decode"])).total("kvd_pulls_total", outcome="done") > before

    await until(pulled)
    await aborted.abort(pair.decode)
    await assert_works(served)
