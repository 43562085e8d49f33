import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator

import pytest
import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.peers import PeerSockets
from tests.net.conftest import Inbox, without_token
from tests.support.patience import MOMENT


class Daemon:
    def __init__(self, name: bytes, listen: str = "tcp://127.0.0.1:0") -> None:
        self.inbox = Inbox()
        self.port = PeerSockets(listen, name)
        self.port.start(self.inbox)


@pytest.fixture
async def producer() -> AsyncIterator[Daemon]:
    daemon = Daemon(b"producer/1")
    yield daemon
    daemon.port.close()


@pytest.fixture
async def consumer() -> AsyncIterator[Daemon]:
    daemon = Daemon(b"consumer/1")
    yield daemon
    daemon.port.close()


async def test_an_ask_is_answered_over_the_same_link(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    assert consumer.port.ask(link, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    assert without_token(asked) == PeerAsked(b"consumer/1", b"hello")
    assert producer.port.answer(asked.sender, b"welcome")
    assert await consumer.inbox.next(PeerAnswered) == PeerAnswered(link, b"welcome")


async def test_a_burst_arrives_whole_and_in_order(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    for number in range(1000):
        assert consumer.port.ask(link, b"%d" % number)
    await producer.inbox.until(lambda events: len(events) == 1000)
    assert [int(event.frame) for event in producer.inbox.events] == list(range(1000))


async def test_answers_that_arrive_during_a_send_are_not_left_lying(producer: Daemon, consumer: Daemon) -> None:
    # Edge-triggered descriptor: a send takes the edge of a message that arrived meanwhile.
    link = consumer.port.connect(producer.port.address)
    rounds = 300
    answered = asyncio.Event()

    def producer_event(event: PeerAsked) -> None:
        producer.port.answer(event.sender, event.frame)

    count = 0

    def consumer_event(event: PeerAnswered) -> None:
        nonlocal count
        count += 1
        if count == 2 * rounds:
            answered.set()
        elif count % 2 == 0:
            consumer.port.ask(link, b"a")
            consumer.port.ask(link, b"b")

    producer.port._zmq._router._on_message = lambda parts: producer_event(PeerAsked(*parts))
    consumer.port._zmq._links[link].pump._on_message = lambda parts: consumer_event(PeerAnswered(link, parts[0]))
    consumer.port.ask(link, b"a")
    consumer.port.ask(link, b"b")
    async with asyncio.timeout(MOMENT):
        await answered.wait()


async def test_an_answer_to_nobody_is_told_to_the_sender(producer: Daemon) -> None:
    assert not producer.port.answer(b"nobody", b"welcome")


async def test_a_full_queue_is_told_to_the_sender_and_blocks_nobody(consumer: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = consumer.port.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        sent = 0
        while consumer.port.ask(link, b"hello"):
            sent += 1
            assert sent < 100_000
        assert sent >= 4096
        consumer.port.disconnect(link)


async def test_nothing_arrives_from_a_link_after_it_is_closed(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    consumer.port.disconnect(link)
    assert not consumer.port.ask(link, b"again")
    consumer.port.disconnect(link)
    producer.port.answer(asked.sender, b"welcome")
    other = consumer.port.connect(producer.port.address)
    consumer.port.ask(other, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    producer.port.answer(asked.sender, b"welcome")
    assert (await consumer.inbox.next(PeerAnswered)).link == other
    assert consumer.inbox.events == []


async def test_a_link_closed_by_its_own_answer_stays_closed(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    closed = asyncio.Event()

    def close(parts: list[bytes]) -> None:
        consumer.port.disconnect(link)
        closed.set()

    consumer.port._zmq._links[link].pump._on_message = close
    consumer.port.ask(link, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    producer.port.answer(asked.sender, b"one")
    producer.port.answer(asked.sender, b"two")
    async with asyncio.timeout(MOMENT):
        await closed.wait()


async def test_a_daemon_that_comes_back_under_its_address_is_reached_over_the_old_link(consumer: Daemon) -> None:
    first = Daemon(b"producer/1")
    address = first.port.address
    link = consumer.port.connect(address)
    consumer.port.ask(link, b"one")
    await first.inbox.next(PeerAsked)
    first.port.close()
    second = Daemon(b"producer/2", address)
    while not second.inbox.events:
        consumer.port.ask(link, b"two")
        await asyncio.sleep(0.01)
    assert without_token(second.inbox.events[0]) == PeerAsked(b"consumer/1", b"two")
    second.port.close()


async def test_who_says_the_same_name_does_not_take_over_anothers_link(producer: Daemon) -> None:
    first, second = Daemon(b"consumer/1"), Daemon(b"consumer/1")
    link = first.port.connect(producer.port.address)
    first.port.ask(link, b"from the first")
    asked = await producer.inbox.next(PeerAsked)
    second.port.ask(second.port.connect(producer.port.address), b"from the second")
    await producer.inbox.next(PeerAsked)
    assert producer.port.answer(asked.sender, b"for the first")
    assert await first.inbox.next(PeerAnswered) == PeerAnswered(link, b"for the first")
    assert second.inbox.events == []
    first.port.close()
    second.port.close()


async def test_two_links_to_one_daemon_each_get_their_own_answers(producer: Daemon, consumer: Daemon) -> None:
    place = producer.port.address
    links = [consumer.port.connect(address) for address in (place, place.replace("127.0.0.1", "localhost"))]
    asked = []
    for _ in range(3):
        for link in links:
            consumer.port.greet(link, b"%d" % link)
            asked.append(await producer.inbox.next(PeerAsked))
    for each in asked:
        assert producer.port.answer(each.sender, each.frame)
    await consumer.inbox.until(lambda events: len(events) == len(asked))
    assert all(int(event.frame) == event.link for event in consumer.inbox.events)


async def test_a_link_that_connects_again_is_the_same_asker(consumer: Daemon) -> None:
    first = Daemon(b"producer/1")
    address = first.port.address
    link = consumer.port.connect(address)
    consumer.port.ask(link, b"one")
    before = (await first.inbox.next(PeerAsked)).sender
    first.port.close()
    second = Daemon(b"producer/1", address)
    while not second.inbox.events:
        consumer.port.ask(link, b"two")
        await asyncio.sleep(0.01)
    assert second.inbox.events[0].sender == before
    second.port.close()


async def test_more_peers_than_libzmq_takes_by_default_can_be_connected_to(consumer: Daemon) -> None:
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    if room < 1100:
        pytest.skip("`ulimit -n` leaves no room for so many links")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert len({consumer.port.connect(address) for _ in range(1100)}) == 1100


async def test_links_leave_descriptors_for_everything_else(consumer: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (8, 8))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        consumer.port.connect(address)
        consumer.port.connect(address)
        with pytest.raises(Unavailable, match="2 peers are as many as 8 open files allow") as caught:
            consumer.port.connect(address)
    assert caught.value.code is ErrorCode.OVERLOADED


async def test_a_context_without_room_for_a_socket_refuses_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PEERS", -7)
    port = PeerSockets("tcp://127.0.0.1:0", b"full/1")
    port.start(lambda event: None)
    with pytest.raises(Unavailable, match="no socket for another peer") as caught:
        port.connect(port.address)
    assert caught.value.code is ErrorCode.OVERLOADED
    port.close()


async def test_sockets_that_are_closed_connect_no_more() -> None:
    port = PeerSockets("tcp://127.0.0.1:0", b"closed/1")
    port.start(lambda event: None)
    address = port.address
    port.close()
    with pytest.raises(Unavailable, match="is stopping"):
        port.connect(address)


async def test_welcomes_that_nobody_reads_lie_in_memory_once(producer: Daemon) -> None:
    welcome = os.urandom(2 * limits.MIB)
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        greedy.setsockopt(zmq.LINGER, 0)
        greedy.setsockopt(zmq.RCVHWM, 1)
        greedy.connect(producer.port.address)
        greedy.send(b"hello")
        asked = await producer.inbox.next(PeerAsked)
        before = resident_bytes()
        for _ in range(200):
            assert producer.port.answer(asked.sender, bytes(bytearray(welcome)))
        assert resident_bytes() - before < 64 * limits.MIB


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def test_an_oversize_message_costs_its_sender_the_connection_and_nothing_else(
    producer: Daemon, consumer: Daemon
) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, bytes(limits.MAX_MESSAGE_BYTES + 1))
    other = consumer.port.connect(producer.port.address)
    while not producer.inbox.events:
        consumer.port.ask(other, b"hello")
        await asyncio.sleep(0.01)
    assert producer.inbox.events[0].frame == b"hello"


async def test_a_message_in_several_parts_is_passed_up_as_an_empty_frame(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port._zmq._links[link].pump.send([b"hello", b"there"])
    assert without_token(await producer.inbox.next(PeerAsked)) == PeerAsked(b"consumer/1", b"")


async def test_random_bytes_on_the_port_change_nothing(producer: Daemon, consumer: Daemon) -> None:
    host, port = producer.port.address.removeprefix("tcp://").split(":")
    raw = []
    for seed in range(20):
        connection = socket.create_connection((host, int(port)), timeout=MOMENT)
        connection.sendall(
            os.urandom(200) if seed % 2 else b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + os.urandom(200)
        )
        raw.append(connection)
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    # Some bytes are a greeting of an old ZMTP: what follows them is a frame, for the actor to refuse.
    await producer.inbox.until(lambda events: PeerAsked(b"consumer/1", b"hello") in map(without_token, events))
    for connection in raw:
        connection.close()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "inproc://kvd",
        "ipc://run/kvd.sock.peers",
        "ipc:///run/kvd.sock",
        "ipc://@abstract.peers",
        "ipc:///run/kvd sock.peers",
        "tcp://",
        "tcp://host",
        "tcp://host:99999",
        "tcp://eth0;host:1",
        "tcp://host:1 ",
        "tcp://" + "x" * 5000,
    ],
)
async def test_an_address_that_is_not_host_and_port_is_refused(consumer: Daemon, address: str) -> None:
    with pytest.raises(BadRequest, match="is not tcp://host:port") as caught:
        consumer.port.connect(address)
    assert caught.value.code is ErrorCode.BAD_TICKET


async def test_an_address_in_use_is_refused_by_name(producer: Daemon) -> None:
    port = PeerSockets(producer.port.address, b"other")
    with pytest.raises(BadRequest, match=f"cannot listen on '{producer.port.address}'") as caught:
        port.start(lambda event: None)
    assert caught.value.code is ErrorCode.BAD_CONFIG
    port.close()


async def test_listening_everywhere_needs_an_address_for_peers() -> None:
    with pytest.raises(BadRequest, match="advertise"):
        PeerSockets("tcp://0.0.0.0:0", b"daemon")
    port = PeerSockets("tcp://0.0.0.0:0", b"daemon", advertise="tcp://gpu-7.example:7071")
    port.start(lambda event: None)
    assert port.address == "tcp://gpu-7.example:7071"
    port.close()


async def test_ipv6_addresses_work(consumer: Daemon) -> None:
    try:
        producer = Daemon(b"producer/1", "tcp://[::1]:0")
    except BadRequest as error:
        consumer.port.close()
        pytest.skip(f"no IPv6 here: {error.text}")
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    assert (await producer.inbox.next(PeerAsked)).frame == b"hello"
    producer.port.close()
