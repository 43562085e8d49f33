"""What a router carries between an SGLang and an engine of another kind."""

import asyncio
import base64
import json

import pytest
import zmq
import zmq.asyncio

from kvd.engines.identity import checksum
from kvd.engines.redaction import _TICKET
from kvd.engines.sglang import messages
from kvd.engines.sglang.desk import Desk
from kvd.engines.sglang.handoff import HANDED, PREFIX, check, is_handoff, read, write
from kvd.engines.sglang.messages import Abandoned, Offered, Refused, Wanted
from kvd.engines.vllm.transfer_params import Prompt
from kvd.engines.vllm.transfer_params import read as read_params
from kvd.engines.vllm.transfer_params import write as write_params
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.protocol.ticket import Ticket, TicketRank, join

PROMPT = [5, 6, 7, 8]
VOCABULARY = 10
RANK = TicketRank("prefill", "local:/run/kvd.peers", 1, "vllm-0-0", "offer", 0, b"s" * 16)


def ticket(tokens: int) -> str:
    return Ticket(tokens, (RANK,), ((),)).encode()


TICKET = ticket(4)


def handed(prompt: list[int], tokens: int | None = None) -> str:
    """As a router makes it of what a vLLM answered."""
    params = write_params(ticket(len(prompt)), len(prompt), Prompt(len(prompt), prompt))
    if tokens is not None:
        params["kvd_ticket"] = ticket(tokens)
    raw = json.dumps({"params": params, "first": [9, -0.5, [[9, -0.5], [3, -1.5]]]}).encode()
    return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def test_what_a_vllm_has_prefilled_is_read_and_fits_its_prompt_alone() -> None:
    host = handed(PROMPT)
    assert is_handoff(host)
    found = read(host)
    assert (found.first.token, found.first.top[1]) == (9, (3, -1.5))
    check(found, PROMPT, VOCABULARY)
    for other in ([5, 6, 7], [5, 6, 7, 9], [*PROMPT, 1]):
        with pytest.raises(BadRequest, match="checksum") as caught:
            check(found, other, VOCABULARY)
        assert caught.value.code == ErrorCode.BAD_TICKET


def test_a_prefill_that_left_the_last_token_out_does_not_do() -> None:
    with pytest.raises(BadRequest, match="ticket is for 3 tokens"):
        check(read(handed(PROMPT, tokens=3)), PROMPT, VOCABULARY)


def deep() -> str:
    """A handoff with a field that is nested more deeply than a process can follow."""
    raw = b'{"params": {"kvd_ticket": "a", "kvd_prompt": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    return PREFIX + base64.urlsafe_b64encode(raw).decode()


@pytest.mark.parametrize(
    "host",
    [PREFIX, PREFIX + "e30", handed(PROMPT)[:-8], PREFIX + "\u00e4", "127.0.0.1", deep()],
    ids=["nothing", "without fields", "cut short", "no base64", "a host", "deep"],
)
def test_a_handoff_that_cannot_be_read_is_refused(host: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(read(host), PROMPT, VOCABULARY)
    assert caught.value.code == ErrorCode.BAD_TICKET


def test_a_handoff_that_was_read_before_is_refused_as_one_that_cannot_be_prefilled_again() -> None:
    with pytest.raises(BadRequest, match="was retracted since: send it again"):
        read(HANDED)


def test_a_first_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(BadRequest, match="token 9 is not one of the 9"):
        check(read(handed(PROMPT)), PROMPT, 9)


def test_no_part_of_a_handoff_reaches_the_log() -> None:
    assert _TICKET.sub("(not shown)", f"host={handed(PROMPT)!r}") == "host='(not shown)'"


def test_what_an_sglang_has_prefilled_is_read_by_a_vllm_of_the_same_prompt_alone() -> None:
    params = json.loads(json.dumps(write(ticket(len(PROMPT)), checksum(PROMPT))))
    assert not read_params(params, Prompt(len(PROMPT), PROMPT)).refused
    assert read_params(params, Prompt(len(PROMPT), [5, 6, 7, 9])).refused


class PrefillEngine:
    """Its control socket; and who asked for a room."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.address = "127.0.0.1", self.socket.bind_to_random_port("tcp://127.0.0.1")

    async def hears(self) -> messages.Message:
        return messages.decode(await self.socket.recv())

    async def answers(self, to: Wanted, message: messages.Message) -> None:
        socket = self.context.socket(zmq.PUSH)
        socket.connect(f"tcp://{to.host}:{to.port}")
        await socket.send(messages.encode(message))
        socket.close(linger=1000)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


async def asked(engine: PrefillEngine, desk: Desk) -> tuple["asyncio.Task[dict[str, object]]", Wanted]:
    task = asyncio.create_task(desk.params(7))
    wanted = await engine.hears()
    assert isinstance(wanted, Wanted)
    assert (wanted.room, wanted.prefix) == (7, 0)
    return task, wanted


async def test_a_router_gets_the_ticket_of_the_room_that_it_asks_for() -> None:
    engine = PrefillEngine()
    desk = Desk(lambda: (engine.address,))
    task, wanted = await asked(engine, desk)
    await engine.answers(wanted, Offered(7, b"o" * 16, "of an earlier one", 1))
    await engine.answers(wanted, Offered(7, wanted.nonce, TICKET, 5))
    assert await task == write(TICKET, 5)
    desk.close()
    engine.close()


async def test_what_cannot_be_read_at_its_port_ends_no_rooms_wait() -> None:
    engine = PrefillEngine()
    desk = Desk(lambda: (engine.address,))
    task, wanted = await asked(engine, desk)
    stranger = engine.context.socket(zmq.PUSH)
    stranger.connect(f"tcp://{wanted.host}:{wanted.port}")
    await stranger.send(b"no message")
    await stranger.send(messages.encode(Offered(7, wanted.nonce, TICKET, 5)))
    assert await task == write(TICKET, 5)
    stranger.close(linger=0)
    desk.close()
    engine.close()


async def test_a_router_hears_why_a_room_has_no_ticket() -> None:
    engine = PrefillEngine()
    desk = Desk(lambda: (engine.address,))
    task, wanted = await asked(engine, desk)
    await engine.answers(wanted, Refused(7, wanted.nonce, "no memory"))
    with pytest.raises(Unavailable, match="no memory"):
        await task
    desk.close()
    engine.close()


async def test_a_room_of_several_ranks_has_one_ticket_of_all() -> None:
    ranks = PrefillEngine(), PrefillEngine()
    desk = Desk(lambda: tuple(rank.address for rank in ranks))
    task = asyncio.create_task(desk.params(7))
    for rank in reversed(ranks):
        wanted = await rank.hears()
        assert isinstance(wanted, Wanted)
        await rank.answers(wanted, Offered(7, wanted.nonce, TICKET, 5))
    assert await task == write(join([TICKET, TICKET]), 5)
    desk.close()
    for rank in ranks:
        rank.close()


async def test_a_router_that_is_gone_gives_the_room_up() -> None:
    engine = PrefillEngine()
    desk = Desk(lambda: (engine.address,))
    task, wanted = await asked(engine, desk)
    task.cancel()
    abandoned = await engine.hears()
    assert isinstance(abandoned, Abandoned)
    assert abandoned.nonce == wanted.nonce
    desk.close()
    engine.close()


async def test_an_engine_that_has_not_registered_yet_has_no_rooms() -> None:
    desk = Desk(lambda: ())
    with pytest.raises(Unavailable, match="not registered"):
        await desk.params(7)
    desk.close()
