"""Both servers get a request at once: the tokens are those of a single one, and blocks move during the prefill."""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.support.patience import PATIENCE
from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import BLOCK, GROUPS, LATENT, STATE_TOKENS, UNCACHED, WINDOW, make_prompt
from tests.vllm.testbed.client import Completion, complete, make_body
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Server, scrape
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 12
CHUNK = 512
"""Tokens of a prompt that the prefill side computes in a step (`shared.CHUNKS`)."""

_seeds = itertools.count(9000)


@dataclass
class Served:
    """One model on a pair, and on a server of its own."""

    pair: KvdPair
    single: Server

    @property
    def model(self) -> str:
        return self.single.engine.model

    async def expected(self, prompt: list[int]) -> Completion:
        """What a single server makes of a prompt.

        Kernels for latents round the last token of a prompt otherwise where it is decoded: then what the pair makes of
        it if one server is asked after the other, which `test_tokens` compares with a single one.
        """
        if self.model in LATENT:
            return await self.pair.complete(prompt, TOKENS)
        return await complete(self.single.url, make_body(self.model, prompt, TOKENS))

    async def metric(self, side: str, name: str) -> float:
        return (await scrape(self.pair.daemons[side])).total(name)

    async def _is_held(self) -> bool:
        held = await self.metric("prefill", "kvd_leases_active") + await self.metric("decode", "kvd_pulls_active")
        return held != 0

    async def nothing_is_held(self) -> None:
        """Returns when no daemon has an offer or a pull."""

        async def frees() -> bool:
            return not await self._is_held()

        await until(frees)

    async def is_let_go_of(self, unproven: float) -> bool:
        """Whether the decode side lets go of an offer whose client has hung up.

        If its engine never had the request, vLLM tells the connector of it with another prompt, which proves nothing:
        then more claims than so many were `unproven`.
        """
        proven = held = True

        async def ends() -> bool:
            nonlocal proven, held
            held = await self._is_held()
            proven = await self.metric("prefill", "kvd_wrong_proofs_total") == unproven
            return not (held and proven)

        await until(ends)
        return not held


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


@pytest.mark.parametrize("length", [1, 2, BLOCK, WINDOW + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 3 * CHUNK])
async def test_a_prompt_of_any_length_gives_the_tokens_of_a_single_server(served: Served, length: int) -> None:
    prompt = make_prompt(length, seed=8000 + length)
    expected = await served.expected(prompt)
    assert_same(await served.pair.complete_early(prompt, TOKENS), expected)
    await served.nothing_is_held()


async def test_blocks_are_read_before_the_prefill_has_ended(served: Served) -> None:
    """A decode side that got no processor meanwhile reads all of them in the end: then another prompt shows it."""
    if served.model in LATENT:
        pytest.skip("vLLM computes a prompt of this model in one step on a CPU")
    await served.pair.complete_early(make_prompt(2, seed=next(_seeds)), 1)  # the first one reads twice

    async def shows() -> bool:
        prompt = make_prompt(3 * CHUNK, seed=next(_seeds))
        expected = await served.expected(prompt)
        before = await served.metric("decode", "kvd_read_duration_seconds_count")
        assert_same(await served.pair.complete_early(prompt, TOKENS), expected)
        return await served.metric("decode", "kvd_read_duration_seconds_count") > before + 1

    await until(shows)


async def test_layers_that_attend_to_all_tokens_move_with_each_and_windows_and_states_once(served: Served) -> None:
    """By the bytes of prompts that differ by a chunk: as many as if one server is asked after the other."""

    async def moved(tokens: int, *, early: bool) -> float:
        prompt, before = make_prompt(tokens, seed=next(_seeds)), await served.metric("decode", "kvd_read_bytes_total")
        await (served.pair.complete_early if early else served.pair.complete)(prompt, TOKENS)
        return await served.metric("decode", "kvd_read_bytes_total") - before

    shorter, longer = [await moved(chunks * CHUNK, early=True) for chunks in (2, 3)]
    assert [shorter, longer] == [await moved(chunks * CHUNK, early=False) for chunks in (2, 3)]
    with_each_chunk = longer - shorter
    assert with_each_chunk > 0
    once = shorter - 2 * with_each_chunk
    assert (once > 0) == (served.model in {*GROUPS, *STATE_TOKENS})


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
@pytest.mark.parametrize("tokens", [BLOCK, CHUNK + 3 * BLOCK])
async def test_a_prompt_that_begins_like_one_in_a_prefix_cache_gives_the_same_tokens(
    served: Served, where: str, tokens: int
) -> None:
    if served.model in UNCACHED:
        pytest.skip("vLLM keeps no prefix cache of this model on a CPU")
    prompt = make_prompt(2 * CHUNK + 5, seed=7000 + tokens + len(where))
    expected = await served.expected(prompt)
    for server in (served.pair.prefill, served.pair.decode):
        if where in {"both", "prefill" if server is served.pair.prefill else "decode"}:
            await complete(server.url, make_body(served.model, prompt[:tokens], TOKENS))
    assert_same(await served.pair.complete_early(prompt, TOKENS), expected)
    assert_same(await served.pair.complete_early(prompt, TOKENS), expected)  # of which both caches have all
    await served.nothing_is_held()


async def test_many_requests_at_once_give_the_tokens_of_a_single_server(served: Served) -> None:
    prompts = [make_prompt(40 + 90 * number, seed=6000 + number) for number in range(10)]
    expected = [await served.expected(prompt) for prompt in prompts]
    ask = (served.pair.complete_early, served.pair.complete)
    completions = await asyncio.gather(*(ask[n % 2](prompt, TOKENS) for n, prompt in enumerate(prompts)))
    for completion, want in zip(completions, expected, strict=True):
        assert_same(completion, want)
    await served.nothing_is_held()


async def test_clients_that_hang_up_at_any_time_leave_nothing(served: Served) -> None:
    for number in range(10):
        unproven = await served.metric("prefill", "kvd_wrong_proofs_total")
        body = make_body(served.model, make_prompt(3 * CHUNK, seed=5000 + number), 100)
        prefilling, decoding = await served.pair.begin_early(body)
        asking = asyncio.create_task(complete(served.pair.decode.url, decoding))
        await asyncio.wait([asking], timeout=0.03 * number)
        for task in (asking, prefilling):
            task.cancel()
        await asyncio.wait([asking, prefilling])
        async with asyncio.timeout(PATIENCE):
            if not await served.is_let_go_of(unproven):
                with contextlib.suppress(HttpError):  # as a router does
                    await complete(served.pair.decode.url, decoding | {"max_tokens": 1})
                await served.nothing_is_held()
