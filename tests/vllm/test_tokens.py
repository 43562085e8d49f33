"""Prefill on one vLLM and decode on another give the tokens of a single one, for every kind of KV cache."""

import asyncio
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import BLOCK, GROUPS, LATENT, UNCACHED, WINDOW, make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Server, scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 12


@dataclass
class Served:
    """One model on a pair, and on a server of its own."""

    pair: KvdPair
    single: Server

    async def expected(self, prompt: list[int]) -> Completion:
        return await complete(self.single.url, make_body(self.single.engine.model, prompt, TOKENS))

    @property
    def latent(self) -> bool:
        return self.single.engine.model in LATENT

    async def case(self, length: int, seed: int) -> tuple[list[int], Completion]:
        """A prompt, and what the single server makes of it.

        The decode side computes the last token of a prompt with the kernels for decode. Where these disagree with those
        for prefill, that token is one more, which the single server made itself and so computed with the same ones.
        """
        prompt = make_prompt(length, seed)
        if not self.latent:
            return prompt, await self.expected(prompt)
        whole = await complete(self.single.url, make_body(self.single.engine.model, prompt, 1 + TOKENS))
        return prompt + whole.tokens[:1], Completion(whole.tokens[1:], whole.logprobs[1:], whole.margins[1:])

    async def complete(self, prompt: list[int]) -> Completion:
        """The pair's completion of the prompt of a case: the prefill side computes what the single one prefilled."""
        if not self.latent:
            return await self.pair.complete(prompt, TOKENS)
        body = make_body(self.single.engine.model, prompt, TOKENS)
        params = await prefill(self.pair.prefill.url, body | {"prompt": prompt[:-1]})
        return await complete(self.pair.decode.url, body | {"kv_transfer_params": params})

    def cacheable(self, blocks: int, first: str) -> int:
        """Tokens of so many blocks that vLLM can find again. What is outside of a window is not pulled."""
        tokens = blocks * BLOCK
        return min(tokens, WINDOW) if first == "pulled there" and self.single.engine.model in GROUPS else tokens

    async def cache(self, prompt: list[int], first: str) -> None:
        """Puts the blocks of a prompt into the decode side's prefix cache: computed there, or pulled there."""
        if self.single.engine.model in UNCACHED:
            pytest.skip("vLLM keeps no prefix cache of this model on a CPU")
        if first == "computed there":
            await complete(self.pair.decode.url, make_body(self.single.engine.model, prompt, TOKENS))
        else:
            await self.pair.complete(prompt, TOKENS)

    async def decode_metric(self, name: str) -> float:
        return (await scrape(self.pair.decode)).total(name)

    async def daemon_metric(self, name: str) -> float:
        return (await scrape(self.pair.daemons["decode"])).total(name)


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "llama4", "deepseek", "granite")),
    ],
)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture(loop_scope="module")
async def served(model: str, shared: Shared) -> Served:
    compared = await shared.compared(model)
    return Served(compared.pair, compared.single)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(3, id="shorter than a block"),
        pytest.param(BLOCK, id="one block exactly"),
        pytest.param(BLOCK + 1, id="one token into the second block"),
        pytest.param(4 * BLOCK, id="at a boundary"),
        pytest.param(4 * BLOCK - 1, id="one token before a boundary"),
        pytest.param(WINDOW, id="as long as the window"),
        pytest.param(5 * WINDOW + 7, id="much longer than the window"),
    ],
)
async def test_a_prompt_of_any_length_gives_the_tokens_of_a_single_server(served: Served, length: int) -> None:
    prompt, expected = await served.case(length, seed=1000 + length)
    read_before = await served.daemon_metric("kvd_read_bytes_total")
    assert_same(await served.complete(prompt), expected)
    assert await served.daemon_metric("kvd_read_bytes_total") > read_before, "nothing was pulled"


@pytest.mark.parametrize("first", ["computed there", "pulled there"])
async def test_a_prompt_whose_blocks_are_all_in_the_decode_sides_cache_gives_the_same_tokens(
    served: Served, first: str
) -> None:
    prompt = make_prompt(served.cacheable(8, first), seed=len(first))
    await served.cache(prompt, first)
    hits = await served.decode_metric("vllm:prefix_cache_hits_total")
    got = await served.pair.complete(prompt, TOKENS)
    assert await served.decode_metric("vllm:prefix_cache_hits_total") > hits
    assert_same(got, await served.expected(prompt))


@pytest.mark.parametrize("first", ["computed there", "pulled there"])
async def test_a_prompt_that_begins_like_one_in_the_decode_sides_cache_gives_the_same_tokens(
    served: Served, first: str
) -> None:
    prompt = make_prompt(10 * BLOCK + 5, seed=10 + len(first))
    await served.cache(prompt[: served.cacheable(6, first)], first)
    hits = await served.decode_metric("vllm:prefix_cache_hits_total")
    got = await served.pair.complete(prompt, TOKENS)
    assert await served.decode_metric("vllm:prefix_cache_hits_total") > hits
    assert_same(got, await served.expected(prompt))


async def test_twenty_requests_at_once_give_the_tokens_of_a_single_server(served: Served) -> None:
    cases = [await served.case(5 + 17 * number, seed=100 + number) for number in range(20)]
    completions = await asyncio.gather(*(served.complete(prompt) for prompt, _ in cases))
    for completion, (_, expected) in zip(completions, cases, strict=True):
        assert_same(completion, expected)


async def test_nothing_failed_and_nothing_is_held_after_the_last_request(served: Served) -> None:
    failed = await served.daemon_metric("kvd_pull_failures_total")
    await served.pair.complete(make_prompt(50, seed=3), TOKENS)
    assert await served.daemon_metric("kvd_pull_failures_total") == failed
    assert await served.daemon_metric("kvd_pulls_active") == 0

    async def released() -> bool:
        return (await scrape(served.pair.daemons["prefill"])).total("kvd_leases_active") == 0

    await until(released)
