"""Servers that were started with other flags: what one's bytes mean to the other decides whether they move."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 8


class Flags(NamedTuple):
    """What one side is started with, and what the error says of both."""

    side: str
    flags: list[str]
    said: list[str]


LARGE = ["--block-size", str(2 * BLOCK)]
ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
STRETCHED = ["--hf-overrides", json.dumps({"rope_parameters": ROPE})]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(Flags("prefill", LARGE, []), id="to smaller blocks"),
        pytest.param(Flags("decode", LARGE, []), id="to larger blocks"),
        pytest.param(Flags("prefill", STRETCHED, ["RoPE: source has", '"linear"', '"default"']), id="other RoPE"),
        pytest.param(
            Flags("decode", ["--hf-overrides", '{"rms_norm_eps": 0.1}'], ["model overrides: source has none", "0.1"]),
            id="other norms",
        ),
    ],
)
async def unequal(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[KvdPair, list[str]]]:
    """A pair of which one side has other flags, and what its error says."""
    pair = KvdPair(tmp_path_factory.mktemp("unequal"), models, MODEL, policy="recompute")
    server = getattr(pair, request.param.side)
    command = server.command
    server.command = lambda: [*command(), *request.param.flags]
    try:
        await start_all(pair.services)
        yield pair, request.param.said
    finally:
        stop_all(pair.services)


@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK, 333])
async def test_blocks_of_another_size_move_and_bytes_that_mean_something_else_are_refused_and_computed_again(
    unequal: tuple[KvdPair, list[str]], length: int
) -> None:
    pair, said = unequal
    prompt = make_prompt(length, seed=length)
    expected = await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone"))
    assert_same(await pair.complete(prompt, TOKENS), expected)
    assert ((await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total") == 0) is bool(said)
    log = pair.decode.log.read_text(errors="replace")
    assert [words for words in said if words not in log] == []
