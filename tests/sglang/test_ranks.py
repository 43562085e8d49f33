"""Sides of several ranks that split the heads, equally many or not: the tokens of a single server."""

import pytest
import pytest_asyncio

from tests.serving.load import Load, recovers
from tests.sglang.shared import Compared, Shared
from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.servers import CHUNK, PAGE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all
from tests.vllm.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TOKENS = 8
SIZES = ((2, 2), (2, 1), (1, 2))
"""Ranks of the prefill and of the decode side. The model has two heads."""


@pytest.fixture(scope="module", params=SIZES, ids=["2 to 2", "2 to 1", "1 to 2"])
def ranks(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="module")
async def served(ranks: tuple[int, int], shared: Shared) -> Compared:
    return await shared.ranks(ranks)


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
async def test_a_prompt_of_any_length_gives_the_tokens_of_a_single_server(served: Compared, length: int) -> None:
    prompt = make_prompt(length, seed=1000 + length)
    wanted = await complete(served.single.url, make_body(prompt, TOKENS))
    assert_same(await served.pair.complete(prompt, TOKENS), wanted)


async def test_a_prefix_that_the_decode_side_has_does_not_move_again(served: Compared) -> None:
    moved = []
    for length in (4 * CHUNK, 6 * CHUNK + 5):
        prompt = make_prompt(length, seed=900)
        before = (await scrape(served.pair.daemons["decode"])).total("kvd_read_bytes_total")
        wanted = await complete(served.single.url, make_body(prompt, TOKENS))
        assert_same(await served.pair.complete(prompt, TOKENS), wanted)
        moved.append((await scrape(served.pair.daemons["decode"])).total("kvd_read_bytes_total") - before)
    assert 0 < moved[1] < moved[0] * 0.9


async def test_nothing_is_held_in_the_end(served: Compared) -> None:
    await served.pair.complete(make_prompt(CHUNK, seed=1), TOKENS)

    async def idle() -> bool:
        for daemon in served.pair.daemons.values():
            metrics = await scrape(daemon)
            if any(metrics.total(name) for name in ("kvd_leases_active", "kvd_pulls_active", "kvd_held_blocks")):
                return False
        return True

    await until(idle)


async def test_the_daemon_of_any_rank_that_dies_under_load_gives_no_wrong_token(served: Compared) -> None:
    prompts = [make_prompt(CHUNK + 31 * number, seed=500 + number) for number in range(4)]
    wanted = [(prompt, await complete(served.single.url, make_body(prompt, TOKENS))) for prompt in prompts]
    for daemon in served.pair.daemons.values():
        async with Load(served.pair, wanted).running(width=3) as load:
            await load.answered(4)
            daemon.kill()
        await start_all([daemon])
        await recovers(served.pair, wanted)
