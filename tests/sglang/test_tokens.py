"""Prefill on one SGLang and decode on another give the tokens of a single one."""

import asyncio

import pytest
import pytest_asyncio

from tests.sglang.shared import Compared, Shared
from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.servers import CHUNK, PAGE
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import make_prompt
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.servers import scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 12

LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, CHUNK - 1, CHUNK, CHUNK + 1)
LENGTHS += (CHUNK + PAGE, 2 * CHUNK - 1, 3 * CHUNK, 5 * CHUNK + 7)
"""Around the ends of pages and of chunks."""


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Shared) -> Compared:
    return await shared.compared("llama")


async def expected(served: Compared, prompt: list[int]) -> Completion:
    return await complete(served.single.url, make_body(prompt, TOKENS))


async def bytes_read(served: Compared) -> float:
    return (await scrape(served.pair.daemons["decode"])).total("kvd_read_bytes_total")


@pytest.mark.parametrize("length", LENGTHS)
async def test_a_prompt_of_any_length_gives_the_tokens_of_a_single_server(served: Compared, length: int) -> None:
    prompt = make_prompt(length, seed=1000 + length)
    before = await bytes_read(served)
    assert_same(await served.pair.complete(prompt, TOKENS), await expected(served, prompt))
    assert await bytes_read(served) > before, "nothing was pulled"


@pytest.mark.parametrize("begun", [2 * CHUNK, 5 * PAGE], ids=["whole chunks", "part of a chunk"])
async def test_a_prompt_that_begins_like_an_earlier_one_gives_the_same_tokens_and_less_is_read(
    served: Compared, begun: int
) -> None:
    prompt = make_prompt(3 * CHUNK + 5, seed=10 + begun)
    await served.pair.complete(prompt[:begun], 1)
    before = await bytes_read(served)
    assert_same(await served.pair.complete(prompt, TOKENS), await expected(served, prompt))
    shorter = await bytes_read(served) - before
    other = make_prompt(3 * CHUNK + 5, seed=20 + begun)
    await served.pair.complete(other, TOKENS)
    assert 0 < shorter < await bytes_read(served) - before - shorter


async def test_a_prompt_that_both_sides_have_whole_gives_the_same_tokens(served: Compared) -> None:
    prompt = make_prompt(3 * PAGE, seed=5)
    want = await expected(served, prompt)
    for _ in range(3):
        assert_same(await served.pair.complete(prompt, TOKENS), want)


async def test_twenty_requests_at_once_give_the_tokens_of_a_single_server(served: Compared) -> None:
    prompts = [make_prompt(5 + 17 * number, seed=100 + number) for number in range(20)]
    wanted = [await expected(served, prompt) for prompt in prompts]
    completions = await asyncio.gather(*(served.pair.complete(prompt, TOKENS) for prompt in prompts))
    for completion, want in zip(completions, wanted, strict=True):
        assert_same(completion, want)


async def test_nothing_failed_and_nothing_is_held_after_the_last_request(served: Compared) -> None:
    await served.pair.complete(make_prompt(50, seed=3), TOKENS)
    decode = await scrape(served.pair.daemons["decode"])
    assert decode.total("kvd_pull_failures_total") == 0
    assert decode.total("kvd_pulls_active") == 0

    async def released() -> bool:
        return (await scrape(served.pair.daemons["prefill"])).total("kvd_leases_active") == 0

    await until(released)
