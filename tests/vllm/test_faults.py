"""Whatever dies, and whenever: no wrong token, no request without an outcome, no restart of what did not die."""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvd.errors import KvdError
from kvd.net.inquiry import Inquiry
from kvd.protocol import ticket as tickets
from tests.serving.shared import LOST_SOON
from tests.support.elsewhere import elsewhere
from tests.support.patience import PATIENCE
from tests.vllm.load import Load, one
from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import OFFER_TTL, Shared
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Daemon, scrape
from tests.vllm.testbed.service import Service, start_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "bench"
TOKENS = 6
OVERWRITTEN = 1900
"""Tokens of the prompt whose 249 MB are overwritten while they are read."""

OVERWRITING = 4
"""Prompts of 1,000 tokens that together need more blocks than there are."""

RECOVERY_SECONDS = 2 * PATIENCE
"""By then requests get their tokens after a restart: the first may have been sent too early, and wait in vain."""

MOMENT_SECONDS = 0.002
"""How long a suspended daemon runs at a time; where the machine is busy it can be tens of milliseconds."""

MOMENTS = 3
"""Of a read that takes a second, with the transport below."""

SLOW_READS = {"UCX_TCP_TX_SEG_SIZE": "8k"}
SUSPENDED = {"heartbeat": "60", "claim_ttl": str(OFFER_TTL)}
"""A daemon that is suspended loses its claim, but must not find that it lost its peer: the fence has to refuse what it
read."""

_numbers = itertools.count()


@dataclass
class Faulty:
    """A pair whose processes may be killed, and what a decode server alone makes of some prompts."""

    pair: KvdPair
    policy: str
    expected: list[tuple[list[int], Completion]]

    async def offered(self, prompt: list[int]) -> dict[str, object]:
        """The body for the decode side of a request that the prefill side has done its part of."""
        body = make_body(MODEL, prompt, TOKENS, cache_salt=f"offered {next(_numbers)}")
        return body | {"kv_transfer_params": await prefill(self.pair.prefill.url, body)}

    async def alone(self, prompt: list[int]) -> Completion:
        """What the decode server makes of a prompt when it computes everything itself."""
        return await complete(self.pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))

    async def restart_daemons(self, folder: Path | None = None) -> None:
        """Restarts them; with a folder for their files as if they were on two hosts, where reads take long."""
        daemons = list(self.pair.daemons.values())
        for daemon in daemons:
            daemon.kill()
            daemon.within, daemon.settings, daemon.variables = (), LOST_SOON, {}
            if folder is not None:
                daemon.within, far = elsewhere(folder, daemon.name)
                daemon.settings, daemon.variables = SUSPENDED | far, SLOW_READS
        await start_all(daemons)
        await until(self.attached)

    async def attached(self) -> bool:
        """Whether both engines have attached, for which they take a step, and tickets name the daemon that is there."""
        for server in (self.pair.prefill, self.pair.decode):
            await complete(server.url, make_body(MODEL, make_prompt(1, seed=next(_numbers)), 1))
        if not all([(await scrape(daemon)).total("kvd_workers") == 1 for daemon in self.pair.daemons.values()]):
            return False
        params = await prefill(self.pair.prefill.url, make_body(MODEL, make_prompt(100, seed=next(_numbers)), 1))
        status = await asyncio.to_thread(_status, self.pair.daemons["prefill"])
        return f'"address":"{tickets.decode(params["kvd_ticket"]).ranks[0].address}"' in status

    async def ends_by_policy(self, body: dict[str, object], expected: Completion) -> None:
        """A request whose KV is lost: an error where the policy is to fail, else the right tokens all the same."""
        async with asyncio.timeout(PATIENCE):
            if self.policy == "fail":
                with pytest.raises(HttpError):
                    await complete(self.pair.decode.url, body)
            else:
                assert_same(await complete(self.pair.decode.url, body), expected)

    async def works(self) -> None:
        """New requests get the right tokens: after the time that it takes to find a new daemon, every one."""
        await self.recovers()
        for (prompt, expected), early in itertools.product(self.expected, (False, True)):
            assert await one(self.pair, prompt, expected, early=early) is None

    async def recovers(self) -> None:
        """Returns when a request got the right tokens."""

        async def succeeds() -> bool:
            return await one(self.pair, *self.expected[0]) is None

        try:
            await until(succeeds, seconds=RECOVERY_SECONDS)
        except TimeoutError as error:
            for daemon in self.pair.daemons.values():
                error.add_note(await asyncio.to_thread(_status, daemon))
            raise


@pytest.fixture(scope="module", params=["fail", pytest.param("recompute", marks=pytest.mark.slow)])
def policy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], Completion]]:
    """What a decode server alone makes of some prompts, once it was asked."""
    return []


@pytest_asyncio.fixture(loop_scope="module")
async def faulty(policy: str, expected: list[tuple[list[int], Completion]], shared: Shared) -> Faulty:
    faulty = Faulty(await shared.mortal(policy), policy, expected)
    while len(expected) < 4:
        prompt = make_prompt(400 + 10 * len(expected), seed=len(expected))
        expected.append((prompt, await faulty.alone(prompt)))
    return faulty


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(lambda pair: pair.daemons["decode"], id="decode daemon"),
        pytest.param(lambda pair: pair.daemons["prefill"], id="prefill daemon"),
        pytest.param(lambda pair: pair.decode, id="decode server"),
        pytest.param(lambda pair: pair.prefill, id="prefill server"),
    ],
)
async def test_a_death_under_load_gives_no_wrong_token_and_its_restart_alone_makes_all_work_again(
    faulty: Faulty, victim: Callable[[KvdPair], Service]
) -> None:
    service = victim(faulty.pair)
    async with Load(faulty.pair, faulty.expected).running(width=3) as load:
        await load.answered(4)
        service.kill()
    await start_all([service])
    await faulty.works()
    assert all(other.running for other in faulty.pair.services)


@pytest.mark.slow
async def test_a_prefill_daemon_that_dies_with_an_offer_ends_the_request_by_the_policy(faulty: Faulty) -> None:
    prompt, expected = faulty.expected[0]
    body = await faulty.offered(prompt)
    daemon = faulty.pair.daemons["prefill"]
    daemon.kill()
    await faulty.ends_by_policy(body, expected)
    await start_all([daemon])
    await faulty.works()


@pytest.mark.slow
async def test_a_mixed_up_answer_ends_its_request_alone_also_while_the_decode_daemon_is_away(faulty: Faulty) -> None:
    prompt, expected = faulty.expected[2]
    body = await faulty.offered(prompt)
    params: Any = body["kv_transfer_params"]
    daemon = faulty.pair.daemons["decode"]
    daemon.kill()
    await faulty.ends_by_policy(
        body | {"kv_transfer_params": params | {"kvd_prompt": params["kvd_prompt"] ^ 1}}, expected
    )
    await start_all([daemon])
    await faulty.works()
    assert faulty.pair.decode.running


@pytest.mark.slow
async def test_a_request_of_a_prefill_server_that_is_dead_by_then_still_gets_its_blocks(faulty: Faulty) -> None:
    prompt, expected = faulty.expected[1]
    body = await faulty.offered(prompt)
    await until(lambda: _holds_offers(faulty))  # the answer may come before the offer is made
    done = await _done(faulty)
    faulty.pair.prefill.kill()
    assert_same(await complete(faulty.pair.decode.url, body), expected)
    assert await _done(faulty) == done + 1
    await start_all([faulty.pair.prefill])
    await faulty.works()


@pytest.mark.slow
async def test_a_prefill_server_that_dies_in_the_middle_of_a_prefill_ends_the_request_by_the_policy(
    faulty: Faulty,
) -> None:
    await faulty.works()
    prompt = make_prompt(OVERWRITTEN, seed=next(_numbers))
    expected, read = await faulty.alone(prompt), await _read(faulty)
    asking = asyncio.create_task(one(faulty.pair, prompt, expected, early=True))

    async def reads() -> bool:
        return await _read(faulty) > read

    await until(reads, every=0.01)
    faulty.pair.prefill.kill()
    ended = await asking
    if faulty.policy == "fail":
        assert ended is not None
    await start_all([faulty.pair.prefill])
    await faulty.works()


@pytest.mark.slow
async def test_blocks_that_the_producer_overwrites_during_a_pull_never_become_tokens(
    faulty: Faulty, tmp_path: Path
) -> None:
    await faulty.restart_daemons(tmp_path)
    try:
        await faulty.recovers()
        prompt, broken, request = await _request_stopped_while_it_pulls(faulty)
        await until(lambda: _nothing_held(faulty))
        for number in range(OVERWRITING):
            other = make_prompt(1000, seed=500 + number)
            await complete(faulty.pair.prefill.url, make_body(MODEL, other, 1))
        faulty.pair.daemons["decode"].signal(signal.SIGCONT)
        if faulty.policy == "fail":
            with pytest.raises(HttpError):
                await request
        else:
            assert_same(await request, await faulty.alone(prompt))
        assert await _broken(faulty) == broken + 1
    finally:
        await faulty.restart_daemons()
    await faulty.works()


async def _request_stopped_while_it_pulls(faulty: Faulty) -> tuple[list[int], float, asyncio.Task[Completion]]:
    """A request whose blocks are being read by a decode daemon that is suspended (SIGSTOP).

    Returns its prompt, how many pulls were broken before it, and the request. The daemon runs for moments, until it has
    its claim and then some more. If it has read everything by then, another request is sent.
    """
    daemon = faulty.pair.daemons["decode"]

    async def run_a_moment() -> None:
        daemon.signal(signal.SIGCONT)
        await asyncio.sleep(MOMENT_SECONDS)
        daemon.signal(signal.SIGSTOP)

    async def claimed() -> bool:
        return (await scrape(faulty.pair.daemons["prefill"])).total("kvd_claims_active") > 0

    async with asyncio.timeout(PATIENCE):
        while True:
            prompt, broken = make_prompt(OVERWRITTEN, seed=next(_numbers)), await _broken(faulty)
            body = await faulty.offered(prompt)
            daemon.signal(signal.SIGSTOP)
            request = asyncio.create_task(complete(faulty.pair.decode.url, body))
            while not await claimed() and not request.done():
                await run_a_moment()
            for _ in range(MOMENTS):
                await run_a_moment()
            if await claimed():
                return prompt, broken, request
            daemon.signal(signal.SIGCONT)
            with contextlib.suppress(HttpError):  # the daemon may have been too slow to keep its claim
                await request


async def _nothing_held(faulty: Faulty) -> bool:
    return not await _holds_offers(faulty)


async def _holds_offers(faulty: Faulty) -> bool:
    return (await scrape(faulty.pair.daemons["prefill"])).total("kvd_leases_active") > 0


async def _broken(faulty: Faulty) -> float:
    """Pulls whose claim did not hold to the end."""
    return (await scrape(faulty.pair.daemons["decode"])).total("kvd_pull_failures_total", code="lease_broken")


def _status(daemon: Daemon) -> str:
    """What a daemon says of itself, for whoever reads why a test failed."""
    try:
        with Inquiry(str(daemon.socket)) as inquiry:
            return f"{daemon.name}: {inquiry.status(timeout=10.0).decode()}"
    except KvdError as error:
        return f"{daemon.name}: {error}"


async def _done(faulty: Faulty) -> float:
    return (await scrape(faulty.pair.daemons["decode"])).total("kvd_pulls_total", outcome="done")


async def _read(faulty: Faulty) -> float:
    """Bytes that the decode side has read."""
    return (await scrape(faulty.pair.daemons["decode"])).total("kvd_read_bytes_total")
