"""Daemons whose addresses have names, and name servers that do not answer."""

import errno
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from kvd.net.addresses import NamedHost, is_name, resolve
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.peers import PeerSockets
from tests.net.conftest import Inbox, until
from tests.support.patience import MOMENT

FEW = 4
"""Threads of a party."""


class Servers:
    """Name servers that know `numbers`; each `release` has one of those be answered that begin with `hangs`."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}
        self.failure: Exception = OSError("Name or service not known")
        """Of names that they do not know."""
        self.asked: list[str] = []
        self._answers = threading.Semaphore(0)
        self.release = self._answers.release

    def resolve(self, name: str) -> str:
        self.asked.append(name)
        if name.startswith("hangs"):
            self._answers.acquire(timeout=MOMENT)
        if name not in self.numbers:
            raise self.failure
        return self.numbers[name]


class Daemon:
    def __init__(self, servers: Servers, listen: str = "tcp://127.0.0.1:0") -> None:
        self.inbox = Inbox()
        self.port = PeerSockets(listen, b"daemon/1", resolve=servers.resolve)
        self.port.start(self.inbox)

    @property
    def number(self) -> str:
        return self.port.address.rpartition(":")[2]

    def named(self, name: str) -> str:
        """Its address under this name."""
        return f"tcp://{name}:{self.number}"


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    made.release(1000)
    for thread in threading.enumerate():
        if thread.name == "kvd-name":
            thread.join(MOMENT)


@pytest.fixture
async def producer(servers: Servers) -> AsyncIterator[Daemon]:
    daemon = Daemon(servers)
    yield daemon
    daemon.port.close()


@pytest.fixture
async def consumer(servers: Servers) -> AsyncIterator[Daemon]:
    daemon = Daemon(servers)
    yield daemon
    daemon.port.close()


async def hears(daemon: Daemon, frame: bytes) -> None:
    assert (await daemon.inbox.next(PeerAsked)).frame == frame


async def test_libzmq_is_given_numbers_alone(
    servers: Servers, producer: Daemon, consumer: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    connect = zmq.Socket.connect

    def watched(socket: "zmq.Socket[bytes]", place: str) -> Any:
        places.append(place)
        return connect(socket, place)

    monkeypatch.setattr(zmq.Socket, "connect", watched)
    servers.numbers = {"pod.example": "127.0.0.1", "six.example": "::1"}
    for address in (producer.named("pod.example"), producer.port.address):
        consumer.port.greet(consumer.port.connect(address), b"hello")
        await hears(producer, b"hello")
    link = consumer.port.connect("tcp://six.example:7710")
    consumer.port.greet(link, b"hello")
    await until(lambda: not consumer.port.trouble(link))
    assert places == [producer.named("127.0.0.1")] * 2 + ["tcp://[::1]:7710"]


async def test_other_links_go_on_while_no_name_server_answers(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    links = [consumer.port.connect(f"tcp://hangs-{number}.example:1", "worker") for number in range(50)]
    for link in links:
        consumer.port.greet(link, b"hello")
    other = consumer.port.connect(producer.port.address)
    consumer.port.greet(other, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    producer.port.answer(asked.sender, b"welcome")
    assert await consumer.inbox.next(PeerAnswered) == PeerAnswered(other, b"welcome")
    assert consumer.port.trouble(links[-1]) == "no name server has answered for 'hangs-49.example' yet"
    assert consumer.port.trouble(other) == ""


async def test_a_hello_is_sent_once_though_the_name_is_asked_for_again_and_again(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers = {"hangs.example": "127.0.0.1"}
    link = consumer.port.connect(producer.named("hangs.example"))
    for number in range(5):
        consumer.port.greet(link, b"%d" % number)
    assert not consumer.port.ask(link, b"too early")
    servers.release()
    await hears(producer, b"4")
    consumer.port.ask(link, b"then")
    await hears(producer, b"then")
    assert servers.asked == ["hangs.example"]


async def test_a_daemon_whose_name_leads_elsewhere_is_found_when_it_is_greeted_again(
    servers: Servers, consumer: Daemon
) -> None:
    first = Daemon(servers)
    servers.numbers["pod.example"] = "127.0.0.1"
    link = consumer.port.connect(first.named("pod.example"))
    consumer.port.greet(link, b"one")
    await hears(first, b"one")
    second = Daemon(servers, f"tcp://127.0.0.2:{first.number}")
    servers.numbers["pod.example"] = "127.0.0.2"
    consumer.port.greet(link, b"two")
    await hears(second, b"two")
    await hears(first, b"two")  # it was sent at once, to where the daemon was
    assert first.inbox.events == []
    first.port.close()
    second.port.close()


async def test_a_name_that_is_not_found_is_named_and_the_daemon_is_greeted_where_it_was(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    link = consumer.port.connect(producer.named("pod.example"))
    why = "the name 'pod.example' cannot be looked up: Name or service not known"
    consumer.port.greet(link, b"one")
    await until(lambda: consumer.port.trouble(link) == why)
    servers.numbers["pod.example"] = "127.0.0.1"
    consumer.port.greet(link, b"two")
    await hears(producer, b"two")
    assert consumer.port.trouble(link) == ""
    servers.numbers.clear()
    consumer.port.greet(link, b"three")
    await hears(producer, b"three")
    await until(lambda: consumer.port.trouble(link) == why)
    servers.failure = MemoryError()  # which says nothing
    consumer.port.greet(link, b"four")
    await hears(producer, b"four")
    await until(lambda: consumer.port.trouble(link) == "the name 'pod.example' cannot be looked up: MemoryError")


async def test_a_daemon_that_was_found_is_greeted_at_once_whatever_else_its_party_looks_up(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers["pod.example"] = "127.0.0.1"
    link = consumer.port.connect(producer.named("pod.example"), "one")
    consumer.port.greet(link, b"one")
    await hears(producer, b"one")
    for number in range(2 * FEW):
        consumer.port.greet(consumer.port.connect(f"tcp://hangs-{number}.example:1", "one"), b"hello")
    consumer.port.greet(link, b"two")
    await hears(producer, b"two")


async def test_a_name_is_looked_up_in_the_turn_of_any_party_that_needs_it(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers["pod.example"] = "127.0.0.1"
    for number in range(2 * FEW):
        consumer.port.greet(consumer.port.connect(f"tcp://hangs-{number}.example:1", "one"), b"hello")
    link = consumer.port.connect(producer.named("pod.example"), "one")
    consumer.port.greet(link, b"hello")
    consumer.port.hurry(link, "another")
    await hears(producer, b"hello")
    servers.release(2 * FEW)
    await until(lambda: len(servers.asked) == 2 * FEW + 1)


async def test_a_name_for_which_no_thread_can_be_had_is_looked_up_when_the_daemon_is_greeted_again(
    servers: Servers, producer: Daemon, consumer: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.numbers["pod.example"] = "127.0.0.1"
    link = consumer.port.connect(producer.named("pod.example"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        consumer.port.greet(link, b"one")
        assert consumer.port.trouble(link) == "the name 'pod.example' cannot be looked up: can't start new thread"
    consumer.port.greet(link, b"two")
    await hears(producer, b"two")


async def test_the_names_of_one_party_do_not_keep_those_of_another_waiting(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers["pod.example"] = "127.0.0.1"
    links = [consumer.port.connect(f"tcp://hangs-{number}.example:1", "one") for number in range(100)]
    for link in links:
        consumer.port.greet(link, b"hello")
    consumer.port.greet(consumer.port.connect(producer.named("pod.example"), "another"), b"hello")
    await hears(producer, b"hello")
    await until(lambda: len(servers.asked) == FEW + 1)
    for link in links[FEW:]:
        consumer.port.disconnect(link)
    servers.release(FEW)
    await until(lambda: "cannot be looked up" in consumer.port.trouble(links[0]))
    assert len(servers.asked) == FEW + 1, "nobody waits for the others any more"


async def test_names_that_no_worker_needs_leave_threads_to_those_that_one_needs(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers["pod.example"] = "127.0.0.1"
    for number in range(100):
        consumer.port.greet(consumer.port.connect(f"tcp://hangs-{number}.example:1"), b"hello")
    consumer.port.greet(consumer.port.connect(producer.named("pod.example"), "worker"), b"hello")
    await hears(producer, b"hello")
    assert len(servers.asked) == FEW + 1


async def test_parties_take_turns_where_all_threads_are_taken(servers: Servers, consumer: Daemon) -> None:
    for party in range(5):
        for number in range(2 * FEW):
            link = consumer.port.connect(f"tcp://hangs-{party}-{number}.example:1", str(party))
            consumer.port.greet(link, b"hello")
    await until(lambda: len(servers.asked) == 4 * FEW)
    for asked in range(4 * FEW + 1, 4 * FEW + 6):
        servers.release()
        await until(lambda asked=asked: len(servers.asked) == asked)
    assert "hangs-4-0.example" in servers.asked


async def test_a_link_that_is_closed_while_its_name_is_looked_up_stays_closed(
    servers: Servers, producer: Daemon, consumer: Daemon
) -> None:
    servers.numbers = {"hangs.example": "127.0.0.1", "pod.example": "127.0.0.1"}
    link = consumer.port.connect(producer.named("hangs.example"))
    consumer.port.greet(link, b"hello")
    consumer.port.disconnect(link)
    servers.release()
    consumer.port.greet(consumer.port.connect(producer.named("pod.example")), b"after")
    await hears(producer, b"after")
    assert producer.inbox.events == []


@pytest.mark.parametrize("name", ["a..b", "a" * 64, "no-such-name.invalid"])
def test_what_is_no_name_cannot_be_resolved(name: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        resolve(name)


def test_numbers_are_no_names() -> None:
    assert [host for host in ("10.0.0.1", "[::1]", "[::ffff:10.0.0.1]", "x", "10.0.1", "[:::]") if is_name(host)] == [
        "x",
        "10.0.1",
        "[:::]",
    ]
    assert resolve("localhost") in ("127.0.0.1", "::1")


def test_a_name_that_leads_where_nobody_can_connect_to_says_so() -> None:
    class Dealer:
        def connect(self, place: str) -> None:
            raise zmq.ZMQError(errno.EINVAL)

    host = NamedHost(Dealer(), "p.example", "0", "w")  # type: ignore[arg-type]
    host.then = lambda: None
    host.looked_up("10.0.0.7", "")
    assert host.trouble.startswith("the name 'p.example' leads to tcp://10.0.0.7:0, which cannot be connected to")
    assert host.place == ""
