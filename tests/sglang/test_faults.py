"""Whatever dies or stands still: each request ends with the right tokens or an error, and then all works again."""

import asyncio
import signal

import pytest
import pytest_asyncio

from tests.serving.faults import random_faults, seed
from tests.serving.load import Load, one, recovers
from tests.sglang.shared import Mortal, Shared
from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.pair import KvdPair
from tests.sglang.testbed.servers import CHUNK, LONGEST
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import Service, start_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
SIDES = ("prefill", "decode")
VICTIMS = [f"{side} {kind}" for side in SIDES for kind in ("daemon", "server")]
PHASES = {"waits for its prefill": "prefill server", "is offered": "decode daemon", "decodes": None}
"""And who stands still meanwhile, so that a request stays in that phase."""


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(shared: Shared) -> Mortal:
    return await shared.mortal()


async def expected(mortal: Mortal) -> list[tuple[list[int], Completion]]:
    prompts = [make_prompt(CHUNK + 31 * number, seed=500 + number) for number in range(4)]
    return [(prompt, await complete(mortal.single.url, make_body(prompt, TOKENS))) for prompt in prompts]


def processes(pair: KvdPair) -> dict[str, Service]:
    """By what they are called in `VICTIMS`."""
    return {f"{side} daemon": pair.daemons[side] for side in SIDES} | {
        f"{side} server": getattr(pair, side) for side in SIDES
    }


async def reached(pair: KvdPair, phase: str, pulls: float) -> None:
    """Returns when the one request under way is in this phase; `pulls` were done before."""

    async def holds() -> bool:
        if phase == "is offered":
            return (await scrape(pair.daemons["prefill"])).total("kvd_leases_active") > 0
        return (await scrape(pair.daemons["decode"])).total("kvd_pulls_total", outcome="done") > pulls

    if phase == "waits for its prefill":
        await asyncio.sleep(1)  # nothing shows that the decode server has it
    else:
        await until(holds)


@pytest.mark.parametrize("side", SIDES)
async def test_a_daemon_that_dies_under_load_gives_no_wrong_token_and_its_restart_makes_all_work_again(
    mortal: Mortal, side: str
) -> None:
    daemon, wanted = mortal.pair.daemons[side], await expected(mortal)
    async with Load(mortal.pair, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.kill()
    await start_all([daemon])
    await recovers(mortal.pair, wanted)


@pytest.mark.parametrize("side", SIDES)
async def test_a_daemon_that_stands_still_under_load_gives_no_wrong_token(mortal: Mortal, side: str) -> None:
    daemon, wanted = mortal.pair.daemons[side], await expected(mortal)
    async with Load(mortal.pair, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.signal(signal.SIGSTOP)
        await asyncio.sleep(3)  # the fault itself: longer than requests and claims of a quiet machine take
        daemon.signal(signal.SIGCONT)
        await load.answered(4)
    await recovers(mortal.pair, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
async def test_whatever_dies_while_a_request(mortal: Mortal, phase: str, victim: str) -> None:
    """It ends with the right tokens or an error, and once what died is started again all others get theirs."""
    pair, (prompt, want) = mortal.pair, (await expected(mortal))[1]
    found = processes(pair)
    before = (await scrape(pair.daemons["decode"])).total("kvd_pulls_total", outcome="done")
    if still := PHASES[phase]:
        found[still].signal_group(signal.SIGSTOP)
    asked = asyncio.create_task(one(pair, prompt, want))
    await reached(pair, phase, before)
    found[victim].kill()
    if still and still != victim:
        found[still].signal_group(signal.SIGCONT)
    await asked
    await start_all([found[victim]])
    await recovers(mortal.pair, await expected(mortal))


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
async def test_whatever_dies_while_a_prompt_is_computed_and_pulled(mortal: Mortal, victim: str) -> None:
    """The prefill server stands still once a part of it was read."""
    pair, prompt = mortal.pair, make_prompt(LONGEST - CHUNK, seed=600 + VICTIMS.index(victim))
    found, want = processes(pair), await complete(mortal.single.url, make_body(prompt, TOKENS))
    before = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")

    async def reads() -> bool:
        return (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total") > before

    asked = asyncio.create_task(one(pair, prompt, want))
    await until(reads)
    pair.prefill.signal_group(signal.SIGSTOP)
    found[victim].kill()
    if pair.prefill.running:
        pair.prefill.signal_group(signal.SIGCONT)
    await asked
    await start_all([found[victim]])
    await recovers(mortal.pair, await expected(mortal))


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
async def test_a_server_that_stands_still_under_load_gives_no_wrong_token(mortal: Mortal, side: str) -> None:
    server, wanted = getattr(mortal.pair, side), await expected(mortal)
    async with Load(mortal.pair, wanted).running(width=3) as load:
        await load.answered(4)
        server.signal_group(signal.SIGSTOP)
        await asyncio.sleep(3)  # the fault itself
        server.signal_group(signal.SIGCONT)
        await load.answered(4)
    await recovers(mortal.pair, wanted)


@pytest.mark.slow
async def test_a_hundred_seconds_of_faults_under_load_give_no_wrong_token_and_nothing_hangs(mortal: Mortal) -> None:
    """The seed is printed; `KVD_TEST_SEED` repeats the order of faults."""
    chosen, wanted = seed(), await expected(mortal)
    print(f"KVD_TEST_SEED={chosen}")
    async with Load(mortal.pair, wanted).running(width=3) as load:
        faults = await random_faults(processes(mortal.pair), chosen)
    await recovers(mortal.pair, wanted)
    print(f"{faults}; {load.right} requests right, {len(load.errors)} failed, 0 wrong, 0 hung")
    assert load.right
