"""What other orchestrators send a prefill engine, and that what they pass on is what the decode engine reads."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvd.engines.vllm import transfer_params
from kvd.engines.vllm.transfer_params import Prompt
from kvd.protocol.ticket import Ticket, TicketRank

LLM_D = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Of llm-d's sidecar (`nixlv2`), beside `stream` false and one token; Dynamo's NixlConnectorProtocol sends the same."""

RANK = TicketRank("prefill", "local:/run/kvd.peers", 1, "vllm-0-0", "offer", 0, b"s" * 16)
PROMPT = Prompt(3, [7, 8, 9])


def through_go(params: dict[str, Any]) -> dict[str, Any]:
    """As the sidecar passes them on: its numbers are float64, which Go writes without a point up to 10**21."""

    def again(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: again(part) for name, part in value.items()}
        return int(float(value)) if type(value) is int else value

    passed: dict[str, Any] = json.loads(json.dumps(again(params)))
    return passed


def test_a_request_of_llm_d_is_a_prefill_for_one_consumer() -> None:
    assert transfer_params.is_producer(LLM_D)
    assert not transfer_params.is_consumer(LLM_D)
    assert transfer_params.consumers(LLM_D) == 1


@pytest.mark.parametrize("prompt", [PROMPT, Prompt(3, [0, 0, 0]), Prompt(2, [511, 2**31 - 1])])
def test_what_llm_d_passes_on_is_read_as_it_was_written(prompt: Prompt) -> None:
    ticket = Ticket(prompt.length, (RANK,), ((),)).encode()
    found = transfer_params.read(through_go(transfer_params.write(ticket, prompt.length, prompt)), prompt)
    assert (found.ticket, found.tokens, found.refused, found.once) == (ticket, prompt.length, "", True)


def test_each_try_of_a_prefill_has_a_ticket_of_its_own_and_the_last_one_is_read() -> None:
    """After a 502 or 503 the sidecar prefills again; what was offered first ends by its time."""
    tickets = [
        Ticket(3, (TicketRank("p", "local:/run/kvd.peers", 1, "w", f"offer {number}", 0, b"s" * 16),), ((),)).encode()
        for number in range(2)
    ]
    tries = [through_go(transfer_params.write(ticket, 3, PROMPT)) for ticket in tickets]
    assert [transfer_params.read(params, PROMPT).ticket for params in tries] == tickets


def test_a_coordinator_that_got_nothing_of_the_prefill_side_makes_the_load_fail_with_a_reason() -> None:
    """It sets `do_remote_prefill` all the same."""
    found = transfer_params.read({"do_remote_prefill": True}, PROMPT)
    assert "without kvd_ticket" in found.refused


def test_what_dynamo_takes_off_the_engines_answer_is_read() -> None:
    ticket = Ticket(3, (RANK,), ((),)).encode()
    answer = SimpleNamespace(kv_transfer_params=transfer_params.write(ticket, 3, PROMPT))
    assert not transfer_params.read(answer.kv_transfer_params, PROMPT).refused


NAMED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
"""What vLLM's `toy_push_proxy_server.py` copies of a prefill's answer; the rest it builds anew."""


@pytest.mark.parametrize("consumers", [0, 1, 3])
def test_what_a_proxy_copies_that_knows_nixls_fields_alone_suffices(consumers: int) -> None:
    tickets = [Ticket(3, (replace(RANK, pool=pool),), ((),)).encode() for pool in ("old", "new")]
    answer = transfer_params.write(tickets[0], 3, PROMPT, consumers, asked=LLM_D)
    transfer_params.put_ticket(answer, tickets[1])  # as the engine does when its daemon was restarted meanwhile
    passed = {"do_remote_prefill": True, "do_remote_decode": False} | {name: answer.get(name) for name in NAMED}
    found = transfer_params.read(passed, PROMPT)
    assert (found.ticket, found.tokens, found.refused, found.once) == (tickets[1], 3, "", consumers == 1)
    assert "does the router mix up requests?" in transfer_params.read(passed, Prompt(3, [7, 8, 1])).refused


def test_routers_that_pass_all_on_get_the_ticket_once() -> None:
    answer = transfer_params.write(Ticket(3, (RANK,), ((),)).encode(), 3, PROMPT, asked={"do_remote_decode": True})
    assert set(answer) == {"do_remote_prefill", "do_remote_decode", "kvd_ticket", "kvd_prompt", "kvd_consumers"}


@pytest.mark.parametrize("copied", [None, 7, "", "cmpl-1f", "a.b.c", "kvd1.x.7", "kvd1.x.7.y", [], {}])
def test_a_request_id_that_is_not_of_kvd_is_no_ticket(copied: object) -> None:
    found = transfer_params.read({"do_remote_prefill": True, "remote_request_id": copied}, PROMPT)
    assert (found.ticket, "without kvd_ticket" in found.refused) == ("", True)
