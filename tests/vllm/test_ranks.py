"""Whole servers of several workers, with a daemon for each, give the tokens of one that computes everything."""

import asyncio
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

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
several_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < CORES, reason=f"a whole vLLM of workers that wait for each other needs {CORES} cores"
)

TP, PP, DP = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(("decode", TP), id="TP 1 to TP 2", marks=several_cores),
        pytest.param(("prefill", TP), id="TP 2 to TP 1", marks=several_cores),
        pytest.param(("decode", PP), id="PP 1 to PP 2", marks=several_cores),
        pytest.param(("prefill", PP), id="PP 2 to PP 1", marks=several_cores),
        pytest.param(("decode", DP), id="DP 1 to DP 2"),
        pytest.param(("prefill", DP), id="DP 2 to DP 1"),
    ],
)
async def pair(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KvdPair]:
    side, flag = request.param
    pair = KvdPair(tmp_path_factory.mktemp("ranks"), models, MODEL, spread={side: flag})
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


async def test_sides_of_several_workers_give_the_tokens_of_one_that_computes_everything(pair: KvdPair) -> None:
    """Every daemon has moved something in the end: of ranks for each request, of replicas for some of those at once."""
    prompts = [make_prompt(length, seed=length) for length in (3, 4 * BLOCK, 500, 40, 41, 42)]
    bodies = [make_body(MODEL, prompt, TOKENS, cache_salt="alone") for prompt in prompts]
    expected = [await complete(pair.decode.url, body) for body in bodies]
    got = await asyncio.gather(*(pair.complete(prompt, TOKENS, cache_salt="pair") for prompt in prompts))
    for ours, theirs in zip(got, expected, strict=True):
        assert_same(ours, theirs)
    for daemon in (*pair.daemons.values(), *pair.others):
        metrics = await scrape(daemon)
        moved = metrics.total("kvd_offers_total") if "prefill" in daemon.name else metrics.total("kvd_read_bytes_total")
        assert moved > 0, f"{daemon.name} has moved nothing"
