"""Whatever dies or stands still under load between two engines: right tokens or an error, and then all works again."""

import asyncio
import signal

import pytest
import pytest_asyncio

from tests.across.pairs import SIDES, Mortal, Shared, Sides
from tests.serving.faults import random_faults, seed
from tests.serving.load import Load, recovers
from tests.sglang.testbed.servers import CHUNK
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion, complete
from tests.vllm.testbed.service import start_all

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TOKENS = 8


@pytest.fixture(scope="module", params=[*SIDES], ids=" to ".join)
def sides(request: pytest.FixtureRequest) -> Sides:
    """The engines; tests of one pair follow each other."""
    chosen: Sides = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(sides: Sides, shared: Shared) -> Mortal:
    return await shared.mortal("llama", sides)


async def expected(mortal: Mortal) -> list[tuple[list[int], Completion]]:
    prompts = [make_prompt(CHUNK + 31 * number, seed=500 + number) for number in range(4)]
    return [(prompt, await complete(mortal.alone.url, mortal.body(prompt, TOKENS))) for prompt in prompts]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_daemon_that_dies_gives_no_wrong_token(mortal: Mortal, side: str) -> None:
    daemon, wanted = mortal.daemons[side], await expected(mortal)
    async with Load(mortal, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.kill()
    await start_all([daemon])
    await recovers(mortal, wanted)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_daemon_that_stands_still_gives_no_wrong_token(mortal: Mortal, side: str) -> None:
    daemon, wanted = mortal.daemons[side], await expected(mortal)
    async with Load(mortal, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.signal_group(signal.SIGSTOP)
        await asyncio.sleep(3)  # the fault itself
        daemon.signal_group(signal.SIGCONT)
        await load.answered(4)
    await recovers(mortal, wanted)


async def test_a_hundred_seconds_of_faults_give_no_wrong_token_and_nothing_hangs(mortal: Mortal) -> None:
    """The seed is printed; `KVD_TEST_SEED` repeats the order of faults."""
    chosen, wanted = seed(), await expected(mortal)
    print(f"KVD_TEST_SEED={chosen}")
    async with Load(mortal, wanted).running(width=3) as load:
        faults = await random_faults(mortal.victims, chosen)
    await recovers(mortal, wanted)
    print(f"{faults}; {load.right} requests right, {len(load.errors)} failed, 0 wrong, 0 hung")
    assert load.right
