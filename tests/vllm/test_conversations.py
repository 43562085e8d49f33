"""What is decoded is not computed again in the next turn, and a turn that is gone costs no token its rightness."""

import asyncio
import itertools
from typing import Any

import pytest
import pytest_asyncio

from tests.vllm.same_tokens import assert_same
from tests.vllm.shared import Shared
from tests.vllm.testbed.catalog import BLOCK, VOCABULARY
from tests.vllm.testbed.client import complete
from tests.vllm.testbed.conversation import ANSWERED, ASKED, Conversation, Talking
from tests.vllm.testbed.http import post, request
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all
from tests.vllm.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 5
_numbers = itertools.count(1)


@pytest_asyncio.fixture(loop_scope="module")
async def talking(shared: Shared) -> Talking:
    return await shared.compared("llama")


def conversation(talking: Talking) -> Conversation:
    number = next(_numbers)
    return Conversation(talking, f"talk {number}", number)


async def alone(talking: Talking, body: dict[str, Any]) -> Any:
    return await complete(talking.single.url, body)


async def test_five_turns_compute_what_is_new_and_say_what_one_server_says(talking: Talking) -> None:
    talk = conversation(talking)
    said = []
    for number in range(TURNS):
        before, early, body = await talking.prefilled(), await talking.early(), talk.body()
        said.append((body, await talk.turn(body)))
        await talking.asked()
        counted = await talking.prefilled_since(before, len(body["prompt"]), turns=int(number > 0))
        if number:
            # All but the answer's last token, which was never computed on, and the question.
            assert counted["computed"] == ASKED + 1, counted
            assert counted["tokens_pulled"] >= ANSWERED - 1, counted
            assert counted["pulled"] == 1
            assert await talking.early() == early + 1
        else:
            assert counted["computed"] == ASKED, counted
    # Not between the turns, which are kept for a time.
    for (_, got), want in zip(said, await asyncio.gather(*(alone(talking, body) for body, _ in said)), strict=True):
        assert_same(got, want)


async def test_a_chat_goes_on_by_its_messages_alone(talking: Talking) -> None:
    messages: list[dict[str, str]] = []
    before = await talking.prefilled()
    for number in range(3):
        words = " ".join(f"t{WORDS[(7 * number + place) % len(WORDS)]}" for place in range(ASKED))
        messages.append({"role": "user", "content": words})
        messages.append({"role": "assistant", "content": await chat(talking.router.url, talking.model, messages)})
        talking.answered += 1
        await talking.asked()
    counted = await talking.prefilled_since(before, 0, turns=2)
    assert counted["pulled"] == 2, counted
    turns = range(1, len(messages), 2)
    said = await asyncio.gather(*(chat(talking.single.url, talking.model, messages[:turn]) for turn in turns))
    assert said == [messages[turn]["content"] for turn in turns]


@pytest.mark.slow
async def test_a_turn_that_nobody_asks_for_ends_by_its_time_and_is_computed_then(talking: Talking) -> None:
    """Without the router, which would not ask for it any more."""
    talk, decode = conversation(talking), talking.pair.decode
    body = talk.body(100)
    offered = await post(talking.pair.prefill.url, "/v1/completions", body | {"kv_transfer_params": PREFILL} | ONE)
    params = offered["kv_transfer_params"] | {"kvd_turn": talk.name}
    talk.tokens += (await complete(decode.url, body | {"kv_transfer_params": params})).tokens
    asked = {"model": talking.model, "prompt": [0], "kv_transfer_params": {"kvd_turn": talk.name}} | ONE
    turn = (await post(decode.url, "/v1/completions", asked))["kv_transfer_params"]
    assert (await post(decode.url, "/v1/completions", asked))["kv_transfer_params"] is None
    await no_leases(talking)
    before, body = await talking.prefilled(), talk.body(100)
    offered = await post(talking.pair.prefill.url, "/v1/completions", body | {"kv_transfer_params": turn} | ONE)
    assert (await talking.prefilled_since(before, len(body["prompt"]), turns=1))["gone"] == 1
    got = await complete(decode.url, body | {"kv_transfer_params": offered["kv_transfer_params"]})
    assert_same(got, await alone(talking, body))


@pytest.mark.slow
async def test_a_turn_of_other_tokens_is_computed_from_where_they_differ(talking: Talking) -> None:
    talk = conversation(talking)
    await talk.turn(talk.body())
    await talking.asked()
    before = await talking.prefilled()
    talk.tokens[ASKED + 300] = 2 + (talk.tokens[ASKED + 300] + 1) % 500
    body = talk.body(100)
    got = await talk.turn(body)
    assert_same(got, await alone(talking, body))
    counted = await talking.prefilled_since(before, len(body["prompt"]), turns=1)
    assert counted["pulled"] == 1
    # The last block of the question is not full, and so not cached.
    assert 280 < counted["tokens_pulled"] - ASKED % BLOCK <= 300


@pytest.mark.slow
async def test_a_decode_side_that_is_killed_between_turns_costs_a_turn_and_no_token(talking: Talking) -> None:
    talk = conversation(talking)
    await talk.turn(talk.body())
    await talking.asked()
    decode, daemon = talking.pair.decode, talking.pair.daemons["decode"]
    decode.kill()
    daemon.kill()
    await start_all([daemon, decode])
    before, expired, body = await talking.prefilled(), await talking.turns("expired"), talk.body(100)
    got = await talk.turn(body)
    assert_same(got, await alone(talking, body))
    late = await talking.turns("expired") - expired  # engines may start that slowly
    assert (await talking.prefilled_since(before, len(body["prompt"]), turns=1 - int(late)))["gone"] == 1 - late


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma", "llama4"])
async def test_windows_travel_back_with_all_of_a_turn(shared: Shared, model: str) -> None:
    talking = await shared.compared(model)
    talk = conversation(talking)
    said = []
    for number in range(3):
        before, body = await talking.prefilled(), talk.body(100)
        said.append((body, await talk.turn(body)))
        await talking.asked()
        counted = await talking.prefilled_since(before, len(body["prompt"]), turns=int(number > 0))
        assert counted["computed"] <= ASKED + 1, counted
        assert counted["pulled"] == (number > 0)
    for body, got in said:
        assert_same(got, await alone(talking, body))


WORDS = [token for token in range(2, VOCABULARY) if not str(token).startswith("1")]
"""Of the others the tokenizer takes what begins with `t1` for that token, which is special, and a rest."""

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ONE = {"max_tokens": 1, "stream": False}


async def no_leases(talking: Talking) -> None:
    async def none() -> bool:
        return not (await scrape(talking.pair.daemons["decode"])).total("kvd_leases_active")

    await until(none)


async def chat(url: str, model: str, messages: list[dict[str, str]]) -> str:
    """The text of a streamed answer."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 150,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": {str(token): -100 for token in set(range(VOCABULARY)) - set(WORDS)},
        "stream": True,
    }
    text = ""
    async with request(url, "/v1/chat/completions", body) as response:
        assert response.status == 200, await response.read()
        async for event in response.events():
            text += event["choices"][0]["delta"].get("content") or ""
    return text
