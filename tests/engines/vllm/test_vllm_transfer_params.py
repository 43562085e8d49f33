"""What routers carry from the prefill engine to the decode engine."""

import json

import pytest

from kvd.engines.vllm.transfer_params import is_consumer, is_producer, read, write
from kvd.protocol.ticket import Ticket, TicketRank

TICKET = Ticket(4, (TicketRank("d", "tcp://h:1", 7, "vllm-0-0", "r#1", 0, bytes(16)),), ((),)).encode()


def test_what_one_engine_writes_the_other_reads_after_a_router_has_carried_it_as_json() -> None:
    carried = json.loads(json.dumps(write(TICKET, 4, [5, 6, 7, 8, 9])))
    assert is_consumer(carried)
    assert not is_producer(carried)
    offered = read(carried, [5, 6, 7, 8, 9], 5)
    assert (offered.ticket, offered.tokens, offered.refused) == (TICKET, 4, "")


@pytest.mark.parametrize("prompt", [[5, 6, 7, 9, 9], [5, 6, 7], []])
def test_a_ticket_of_another_prompt_is_refused_and_kept_to_let_go_of_its_blocks(prompt: list[int]) -> None:
    offered = read(write(TICKET, 4, [5, 6, 7, 8, 9]), prompt, len(prompt))
    assert "mix up" in offered.refused
    assert offered.ticket == TICKET


def test_a_prompt_of_embeddings_is_told_apart_by_its_length_only() -> None:
    assert not read(write(TICKET, 4, None), None, 5).refused
    assert read(write(TICKET, 4, None), None, 3).refused


@pytest.mark.parametrize("ticket", [None, 7, "", "kvd1.", "kvd1.ä", "kvd2.AAAA", "x" * 1000])
def test_what_is_no_ticket_is_refused(ticket: object) -> None:
    assert read({"do_remote_prefill": True, "kvd_ticket": ticket, "kvd_prompt": 0}, [1, 2], 2).refused


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}])
def test_a_request_for_one_engine_is_neither(params: dict[str, object] | None) -> None:
    assert not is_producer(params)
    assert not is_consumer(params)
