"""MultiConnector: kvd moves blocks between the servers, another connector brings back what a server has seen before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.pair import MultiPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 8

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MultiPair]:
    pair = MultiPair(tmp_path_factory.mktemp("multi"), models, MODEL)
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


async def test_kvd_brings_the_prefill_to_the_decode_side_and_the_other_connector_brings_it_back_to_the_prefill_side(
    pair: MultiPair,
) -> None:
    prompt = make_prompt(4 * BLOCK + 5, seed=1)
    expected = await complete(pair.decode.url, make_body(MODEL, make_prompt(40, seed=2), TOKENS))
    assert len(expected.tokens) == TOKENS  # of neither connector
    first = await pair.complete(prompt, TOKENS, cache_salt="first")
    reused, pulled = await _reused(pair), await _pulled(pair)
    assert pulled > 0
    again = await pair.complete(prompt, TOKENS, cache_salt="no prefix cache has it")
    assert await _reused(pair) - reused == 4 * BLOCK
    assert await _pulled(pair) == 2 * pulled
    assert_same(again, first)
    assert_same(first, await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone")))


async def _reused(pair: MultiPair) -> float:
    """Tokens that the prefill side's other connector brought back."""
    return (await scrape(pair.prefill)).total("vllm:external_prefix_cache_hits_total")


async def _pulled(pair: MultiPair) -> float:
    """Bytes, as the decode engine counts them: its statistics came through MultiConnector."""
    return (await scrape(pair.decode)).total("vllm:kvd_pull_bytes_sum")
