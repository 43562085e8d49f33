"""Messages that do not end: the loop is for others, too."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvd.engines.sglang import control, messages
from kvd.engines.sglang.messages import Abandoned, Message
from kvd.errors import BadRequest, ErrorCode, refusal
from tests.support.patience import MOMENT

MESSAGE = Abandoned(7, b"n" * 16, "aborted")
MORE_THAN_A_TURN = 1_000_000


class Sockets:
    """The control socket, without a bound as SGLang's, and one that sends to it within the process."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        plain, self.sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        plain.setsockopt(zmq.RCVHWM, 0)
        self.sender.setsockopt(zmq.SNDHWM, 0)
        plain.bind("inproc://control")
        self.sender.connect("inproc://control")
        self._plain, self.control = plain, zmq.asyncio.Socket.from_socket(plain)

    def close(self) -> None:
        self.control.close(linger=0)
        self._plain.close(linger=0)
        self.sender.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


async def read_until(sockets: Sockets, heard: Any, end: asyncio.Event) -> None:
    reading = asyncio.create_task(control.read_messages(sockets.control, heard))
    ending = asyncio.create_task(end.wait())
    await asyncio.wait({reading, ending}, timeout=MOMENT, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done() or reading.done():
        reading.result()
    reading.cancel()


@pytest.mark.parametrize("readable", [True, False])
async def test_messages_that_do_not_end_leave_the_loop_to_others(
    sockets: Sockets, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, ended = 0, asyncio.Event()
    unanswered = 0

    def another(_: Any) -> Any:
        """Each message has the next one there before it was read."""
        nonlocal unanswered
        unanswered += 1
        assert unanswered < MORE_THAN_A_TURN, "the loop stood still"
        sockets.sender.send(messages.encode(MESSAGE))
        if not readable:
            raise refusal(ErrorCode.BAD_MESSAGE, "no message")
        return MESSAGE

    async def others() -> None:
        nonlocal turns, unanswered
        while turns < 10:
            turns += 1
            unanswered = 0
            await asyncio.sleep(0)
        ended.set()

    sockets.sender.send(messages.encode(MESSAGE))
    monkeypatch.setattr(messages, "decode", another)
    beside = asyncio.create_task(others())
    await read_until(sockets, lambda _: None, ended)
    await beside
    assert turns == 10


async def test_what_is_no_message_is_dropped_and_those_behind_it_are_heard(sockets: Sockets) -> None:
    heard: list[Message] = []
    ended = asyncio.Event()

    def hears(message: Message) -> None:
        heard.append(message)
        ended.set()

    with pytest.raises(BadRequest):
        messages.decode(b"x")
    for _ in range(1000):
        sockets.sender.send(b"x")
    sockets.sender.send(messages.encode(MESSAGE))
    await read_until(sockets, hears, ended)
    assert heard == [MESSAGE]
