"""Speculative decoding: the layers of a drafter move with the model's, and a drafter on one side only is refused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.vllm.same_tokens import assert_same
from tests.vllm.testbed.catalog import BLOCK, LATENT, WINDOW, make_prompt
from tests.vllm.testbed.client import complete, make_body
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair, NixlPair, Pair
from tests.vllm.testbed.servers import N_GRAMS, scrape
from tests.vllm.testbed.service import start_all, stop_all

pytestmark = pytest.mark.slow

MODEL = "llama"
TOKENS = 12
LAYERS = 5
"""Four of the model, one of the drafter with the same heads."""

LAYER_BYTES = BLOCK * 2 * 2 * 32 * 4
"""Of a block in one layer: keys and values of two heads of 32 x float32."""


@asynccontextmanager
async def running(folder: Path, models: Path, model: str = MODEL, **drafters: str) -> AsyncIterator[KvdPair]:
    pair = KvdPair(folder, models, model, drafters=drafters)
    async with started(pair):
        yield pair


@asynccontextmanager
async def started(pair: Pair) -> AsyncIterator[None]:
    try:
        await start_all(pair.services)
        yield
    finally:
        stop_all(pair.services)


async def test_a_pair_that_drafts_moves_the_drafters_layers_and_gives_the_tokens_of_one_server(
    models: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, models, prefill="eagle", decode="eagle") as pair:
        read = await _read(pair)
        for number, length in enumerate((3, 4 * BLOCK, 4 * BLOCK + 5)):
            prompt = make_prompt(length, seed=number)
            got = await pair.complete(prompt, TOKENS, cache_salt="pair")
            assert_same(got, await complete(pair.decode.url, make_body(MODEL, prompt, TOKENS, cache_salt="alone")))
            blocks = -(-(length - 1) // BLOCK)
            assert await _read(pair) - read == blocks * LAYERS * LAYER_BYTES
            read = await _read(pair)
        assert (await scrape(pair.decode)).total("vllm:spec_decode_num_drafts_total") > 0


async def test_a_hybrid_model_with_a_drafter_gives_the_tokens_of_one_server(models: Path, tmp_path: Path) -> None:
    """Its drafter attends to all tokens, in groups beside those of sliding windows."""
    async with running(tmp_path, models, "gemma", prefill="eagle", decode="eagle") as pair:
        for number, length in enumerate((3, WINDOW, 4 * BLOCK, 4 * BLOCK + 5, 500)):
            prompt, read = make_prompt(length, seed=number), await _read(pair)
            got = await pair.complete(prompt, TOKENS, cache_salt="pair")
            assert_same(got, await complete(pair.decode.url, make_body("gemma", prompt, TOKENS, cache_salt="alone")))
            assert await _read(pair) > read
        assert (await scrape(pair.decode)).total("vllm:spec_decode_num_drafts_total") > 0


@pytest.mark.parametrize("model", ["llama4", "gemma"])
async def test_a_decode_side_alone_drafts_by_n_grams_and_gives_the_tokens_of_one_server(
    models: Path, tmp_path: Path, model: str
) -> None:
    """They have no layers, so both sides' caches are alike."""
    async with running(tmp_path, models, model, decode=N_GRAMS) as pair:
        for number, length in enumerate((3, WINDOW, 4 * BLOCK + 5)):
            prompt = repetitive(length, seed=number)
            got = await pair.complete(prompt, TOKENS, cache_salt="pair")
            assert_same(got, await complete(pair.decode.url, make_body(model, prompt, TOKENS, cache_salt="alone")))
        assert (await scrape(pair.decode)).total("vllm:spec_decode_num_drafts_total") > 0


@pytest.mark.parametrize("model", LATENT)
async def test_a_decode_side_that_drafts_gives_the_tokens_of_vllms_own_connector_where_kernels_round(
    models: Path, tmp_path: Path, model: str
) -> None:
    """A step over drafted tokens runs in other kernels than one over a single token, on one server, too."""
    prompts = [repetitive(length, seed=length) for length in (40, 4 * BLOCK + 5)]
    kvd = KvdPair(tmp_path, models, model, drafters={"decode": N_GRAMS})
    async with started(kvd):
        got = [await kvd.complete(prompt, TOKENS) for prompt in prompts]
        assert (await scrape(kvd.decode)).total("vllm:spec_decode_num_drafts_total") > 0
        assert await _read(kvd) > 0
    nixl = NixlPair(tmp_path, models, model, drafters={"decode": N_GRAMS})
    async with started(nixl):
        await nixl.meet()
        for ours, prompt in zip(got, prompts, strict=True):
            assert_same(ours, await nixl.complete(prompt, TOKENS))


async def test_a_drafter_on_the_decode_side_alone_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    async with running(tmp_path, models, decode="eagle") as pair:
        with pytest.raises(HttpError):
            await pair.complete(make_prompt(50, seed=1), TOKENS)
        log = await asyncio.to_thread(pair.decode.log.read_text, errors="replace")
        assert "drafter: source has none, destination has" in log


async def _read(pair: KvdPair) -> float:
    return (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt that says the same twenty tokens again and again: its n-grams are found."""
    said = make_prompt(20, seed)
    return (said * (1 + length // len(said)))[:length]
