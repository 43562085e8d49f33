"""Prefill on one engine and decode on the other give the tokens of a single server, of either engine."""

import asyncio

import pytest
import pytest_asyncio

from tests.across.pairs import SIDES, Compared, Shared, Sides
from tests.sglang.testbed.servers import CHUNK, PAGE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import complete
from tests.vllm.testbed.servers import scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW = 8
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 333)


@pytest.fixture(scope="module", params=[*SIDES, ("sglang", "sglang")], ids=" to ".join)
def sides(request: pytest.FixtureRequest) -> Sides:
    """The engines; tests of one pair follow each other."""
    chosen: Sides = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="module")
async def across(sides: Sides, shared: Shared) -> Compared:
    return await shared.compared("llama", sides)


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_are_those_of_single_servers(across: Compared, length: int) -> None:
    prompt = make_prompt(length, seed=length)
    before = (await scrape(across.daemons["decode"])).total("kvd_read_bytes_total")
    got = await across.complete(prompt, NEW)
    moved = (await scrape(across.daemons["decode"])).total("kvd_read_bytes_total") - before
    for server in across.single.values():
        assert_same(got, await complete(server.url, across.body(prompt, NEW)))
    assert moved > 0 or length == 1  # vLLM computes the last token of a prompt itself


async def test_a_prefix_that_the_decode_side_has_does_not_move_again(across: Compared) -> None:
    first, more = make_prompt(4 * CHUNK, seed=900), make_prompt(6 * CHUNK + 5, seed=900)
    moved = []
    for prompt in (first, more):
        before = (await scrape(across.daemons["decode"])).total("kvd_read_bytes_total")
        got = await across.complete(prompt, NEW)
        assert_same(got, await complete(across.single["vllm"].url, across.body(prompt, NEW)))
        moved.append((await scrape(across.daemons["decode"])).total("kvd_read_bytes_total") - before)
    assert moved[1] < moved[0] * 0.9


async def test_requests_at_once_get_their_own_tokens(across: Compared) -> None:
    prompts = [make_prompt(40 + 17 * number, seed=700 + number) for number in range(8)]
    got = await asyncio.gather(*(across.complete(prompt, NEW) for prompt in prompts))
    for prompt, completion in zip(prompts, got, strict=True):
        assert_same(completion, await complete(across.single["sglang"].url, across.body(prompt, NEW)))


async def test_nothing_is_held_in_the_end(across: Compared) -> None:
    await across.complete(make_prompt(CHUNK, seed=1), NEW)

    async def idle() -> bool:
        for daemon in across.daemons.values():
            metrics = await scrape(daemon)
            if any(metrics.total(name) for name in ("kvd_leases_active", "kvd_pulls_active", "kvd_held_blocks")):
                return False
        return True

    await until(idle)
