"""Daemons that die or stand still under load: each request ends with the right tokens or an error; then all works."""

import asyncio
import signal

import pytest
import pytest_asyncio

from tests.serving.load import Load, one
from tests.sglang.shared import Mortal, Shared
from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.servers import CHUNK
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.service import start_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
SIDES = ("prefill", "decode")


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(shared: Shared) -> Mortal:
    return await shared.mortal()


async def expected(mortal: Mortal) -> list[tuple[list[int], Completion]]:
    prompts = [make_prompt(CHUNK + 31 * number, seed=500 + number) for number in range(4)]
    return [(prompt, await complete(mortal.single.url, make_body(prompt, TOKENS))) for prompt in prompts]


async def recovers(mortal: Mortal, wanted: list[tuple[list[int], Completion]]) -> None:
    """Returns when a request got the right tokens; then all do."""

    async def succeeds() -> bool:
        return await one(mortal.pair, *wanted[0]) is None

    await until(succeeds)
    for prompt, want in wanted:
        assert await one(mortal.pair, prompt, want) is None


@pytest.mark.parametrize("side", SIDES)
async def test_a_daemon_that_dies_under_load_gives_no_wrong_token_and_its_restart_makes_all_work_again(
    mortal: Mortal, side: str
) -> None:
    daemon, wanted = mortal.pair.daemons[side], await expected(mortal)
    async with Load(mortal.pair, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.kill()
    await start_all([daemon])
    await recovers(mortal, wanted)


@pytest.mark.parametrize("side", SIDES)
async def test_a_daemon_that_stands_still_under_load_gives_no_wrong_token(mortal: Mortal, side: str) -> None:
    daemon, wanted = mortal.pair.daemons[side], await expected(mortal)
    async with Load(mortal.pair, wanted).running(width=3) as load:
        await load.answered(4)
        daemon.signal(signal.SIGSTOP)
        await asyncio.sleep(3)  # the fault itself: longer than requests and claims of a quiet machine take
        daemon.signal(signal.SIGCONT)
        await load.answered(4)
    await recovers(mortal, wanted)
