"""Servers whose block sizes differ: vLLM's CPU kernels pack the tokens of a block, so nothing moves between them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.patience import NEVER_LOST
from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 8
STEADY = tuple(word for key, value in NEVER_LOST.items() for word in (f"--{key.replace('_', '-')}", value))

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param("prefill", id="to smaller blocks"), pytest.param("decode", id="to larger blocks")],
)
async def pair(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KvdPair]:
    """The server of one side has blocks twice as long as the other's."""
    pair = KvdPair(tmp_path_factory.mktemp("sizes"), models, MODEL, policy="recompute")
    large = getattr(pair, request.param)
    command = large.command
    large.command = lambda: [*command(), "--block-size", str(2 * BLOCK)]
    for daemon in pair.daemons.values():
        daemon.flags = STEADY
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK, 333])
async def test_packed_blocks_of_another_size_are_refused_with_both_sizes_and_computed_again(
    pair: KvdPair, length: int
) -> None:
    prompt = make_prompt(length, seed=length)
    expected = await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))
    assert_same(await pair.complete(prompt, TOKENS), expected)
    assert (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total") == 0
    log = pair.decode.log.read_text(errors="replace")
    for size in (BLOCK, 2 * BLOCK):
        assert f"packed by {size} tokens" in log
