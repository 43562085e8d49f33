"""Whole servers of different TP sizes, with a daemon for each rank, give the tokens of a single one."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

CORES = 4
"""For three workers and two engines: on two cores the ranks' collectives, which compute while they wait, starve."""

MODEL = "llama"
TOKENS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < CORES, reason=f"a whole vLLM with TP 2 needs {CORES} cores"),
]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param((1, 2), id="TP 1 to TP 2"), pytest.param((2, 1), id="TP 2 to TP 1")],
)
async def pair(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KvdPair]:
    ranks = dict(zip(("prefill", "decode"), request.param, strict=True))
    pair = KvdPair(tmp_path_factory.mktemp("ranks"), models, MODEL, ranks=ranks)
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


@pytest.mark.parametrize("length", [3, 4 * BLOCK, 500])
async def test_sides_of_different_tp_sizes_give_the_tokens_of_one_that_computes_everything(
    pair: KvdPair, length: int
) -> None:
    prompt = make_prompt(length, seed=length)
    expected = await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))
    readers = [pair.daemons["decode"], *(daemon for daemon in pair.others if "decode" in daemon.name)]
    before = [(await scrape(daemon)).total("kvd_read_bytes_total") for daemon in readers]
    assert_same(await pair.complete(prompt, TOKENS), expected)
    for daemon, read in zip(readers, before, strict=True):
        assert (await scrape(daemon)).total("kvd_read_bytes_total") > read, f"{daemon.name} has read nothing"
