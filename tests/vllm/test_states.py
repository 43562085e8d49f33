"""Recurrent states: what the decode side gets is what the prefill side computed, byte by byte.

It computes the last token of a prompt with the kernels for decode. In bfloat16 these round otherwise than those for
prefill, so that its tokens are compared with those of a pair whose states vLLM's own connector moves.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import STATE_TOKENS, make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair, NixlPair, Pair
from tests.vllm.testbed.servers import Daemon, scrape
from tests.vllm.testbed.service import start_all, stop_all

pytestmark = pytest.mark.slow

MODEL = "qwen-next"
BLOCK = STATE_TOKENS[MODEL]
TOKENS = 12
TOKEN_BYTES = 1024
"""Of keys and values in a layer, of either model."""

LAYERS = 4
"""Three with states, one with attention: each has a group of its own."""

PROMPTS = {
    "shorter than the convolution": make_prompt(3, seed=1),
    "a part of a block": make_prompt(200, seed=2),
    "a block without the last token": make_prompt(BLOCK + 1, seed=3),
    "two blocks and a part of a third": make_prompt(2 * BLOCK + 50, seed=4),
    "begins like one that the prefill side computed": make_prompt(3 * BLOCK + 7, seed=4),
    "begins like one that the decode side computed": make_prompt(3 * BLOCK + 7, seed=5),
    "a block without the last token, again": make_prompt(BLOCK + 1, seed=3),
}
"""In their order. The last three find states in a prefix cache: that of the prefill side, after two blocks, and that of
the decode side, after two and after one."""


@asynccontextmanager
async def running(pair: Pair, flags: Sequence[str] = ()) -> AsyncIterator[Pair]:
    for server in (pair.prefill, pair.decode):
        server.flags = flags
    try:
        await start_all(pair.services)
        yield pair
    finally:
        stop_all(pair.services)


def pages(daemon: Daemon, size: int) -> set[bytes]:
    """The blocks of a pool in which there is anything."""
    pool = daemon.pool()
    return {pool[start : start + size] for start in range(0, len(pool), size)} - {bytes(size)}


@pytest.mark.parametrize("model", STATE_TOKENS)
async def test_the_states_of_both_sides_are_equal_byte_by_byte(models: Path, tmp_path: Path, model: str) -> None:
    """Of a prompt whose last token but one ends a block, which no side writes to again."""
    tokens = STATE_TOKENS[model]
    pair = KvdPair(tmp_path, models, model)
    async with running(pair, ["--enable-prefix-caching"]):
        sides = pair.daemons.values()
        before = [pages(daemon, tokens * TOKEN_BYTES) for daemon in sides]
        await pair.complete(make_prompt(tokens + 1, seed=1), 1)
        computed, got = (pages(daemon, tokens * TOKEN_BYTES) - old for daemon, old in zip(sides, before, strict=True))
        assert len(computed) == LAYERS
        assert computed < got


async def test_a_pair_gives_the_tokens_of_vllms_own_connector_with_prefix_hits_and_after_failed_loads(
    models: Path, tmp_path: Path
) -> None:
    pair = NixlPair(tmp_path, models, MODEL)
    for server in (pair.prefill, pair.decode):
        server.variables["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"  # without it, NixlConnector ends its server
    async with running(pair):
        await pair.meet()
        expected = await _completions(pair)
    pair = KvdPair(tmp_path, models, MODEL, policy="recompute")
    async with running(pair):
        for name, got in (await _completions(pair)).items():
            assert_same(got, expected[name])
        metrics = await scrape(pair.decode)
        assert (await scrape(pair.daemons["decode"])).total("kvd_pull_failures_total") == 0
        assert metrics.total("vllm:prefix_cache_hits_total") == 3 * BLOCK
        assert (await scrape(pair.prefill)).total("vllm:prefix_cache_hits_total") == 2 * BLOCK
        assert metrics.total("vllm:kvd_pull_bytes_sum") >= 3 * LAYERS * BLOCK * TOKEN_BYTES
        await _a_failed_load_is_computed_again(pair)


async def _completions(pair: Pair) -> dict[str, Completion]:
    await complete(pair.decode.url, make_body(MODEL, make_prompt(2 * BLOCK + 50, seed=5), TOKENS))
    return {name: await pair.complete(prompt, TOKENS) for name, prompt in PROMPTS.items()}


async def _a_failed_load_is_computed_again(pair: KvdPair) -> None:
    prompt = make_prompt(2 * BLOCK + 9, seed=9)
    alone = await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))
    body = make_body(MODEL, prompt, TOKENS, cache_salt="mixed up")
    params = await prefill(pair.prefill.url, body)
    wrong = params | {"kvd_prompt": params["kvd_prompt"] ^ 1}
    assert_same(await complete(pair.decode.url, body | {"kv_transfer_params": wrong}), alone)
    log = await asyncio.to_thread(pair.decode.log.read_text, errors="replace")
    assert log.count("does the router mix up requests?") == 1
