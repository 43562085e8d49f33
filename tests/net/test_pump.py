import asyncio

import pytest
import zmq

from kvd.net import zmq_socket as pump
from kvd.net.zmq_socket import SocketPump
from tests.support.patience import MOMENT


@pytest.mark.parametrize("size", [pump.BYTES_PER_WAKE // 2, pump.BYTES_PER_WAKE * 2, 1])
async def test_between_large_messages_others_get_their_turn_as_between_many_small_ones(size: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
        receiver = context.socket(zmq.PAIR)
        receiver.bind("inproc://messages")
        sender.connect("inproc://messages")
        count = 3 * (1 if size > 1 else pump.RECEIVES_PER_WAKE)
        for _ in range(count):
            sender.send(bytes(size))
        arrived: list[int] = []
        taking = SocketPump(receiver, lambda parts: arrived.append(sum(map(len, parts))))
        most, before = 0, 0
        async with asyncio.timeout(MOMENT):
            while len(arrived) < count:
                await asyncio.sleep(0)  # one turn of the loop
                most, before = max(most, len(arrived) - before), len(arrived)
        taking.close()
    assert most == min(pump.RECEIVES_PER_WAKE, max(1, pump.BYTES_PER_WAKE // size))


async def test_a_message_whose_handler_raises_costs_none_of_those_behind_it() -> None:
    arrived, raised = list[bytes](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: raised.append(context["exception"]))

    def take(parts: list[bytes]) -> None:
        if parts == [b"1"]:
            raise ValueError
        arrived.append(parts[0])

    with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
        receiver = context.socket(zmq.PAIR)
        receiver.bind("inproc://messages")
        sender.connect("inproc://messages")
        for number in range(4):
            sender.send(b"%d" % number)
        taking = SocketPump(receiver, take)
        async with asyncio.timeout(MOMENT):
            while len(arrived) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        taking.close()
    assert arrived == [b"0", b"2", b"3"]
    assert len(raised) == 1
