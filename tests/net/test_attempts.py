"""Attempts of each kind over real sockets: none gets in, each is counted, all of one kind are logged once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog
import uvloop
import zmq
from prometheus_client import CollectorRegistry

from kvd.daemon.parts import Rejections
from kvd.metrics import Metrics
from kvd.net import keys
from kvd.net.peers import PeerSockets
from kvd.net.trust import Trust
from tests.net.conftest import Inbox

AT_ONCE = 10
PRODUCER, STRANGER, OTHER = (keys.generate() for _ in range(3))


class Door:
    """A daemon's peer sockets; `rejected()` counts as its metrics do."""

    def __init__(self) -> None:
        self.inbox, self.changed = Inbox(), Inbox()
        self.metrics = Metrics(CollectorRegistry())
        reject = Rejections(self.metrics, structlog.get_logger())

        def rejected(rejection):
            reject(rejection)
            self.changed(rejection)

        trust = Trust(PRODUCER, "producer", {})
        self.port = PeerSockets("tcp://127.0.0.1:0", b"producer#1", trust=trust, on_rejected=rejected)
        self.port.start(self.inbox)
        self.place = self.port.address.partition("#")[0]

    def rejected(self, reason: str) -> float:
        labels = {"reason": reason}
        return self.metrics.registry.get_sample_value("kvd_peers_rejected_total", labels) or 0.0


@pytest.fixture
async def attempts() -> int:
    """A thousand in `make test-all`, on asyncio's own loop; for every commit fewer do, as each is counted."""
    return 20 if isinstance(asyncio.get_running_loop(), uvloop.Loop) else 1000


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    opened = Door()
    yield opened
    opened.port.close()


def without_the_daemons_key(socket):
    Trust(STRANGER, "stranger", {}).secure_client(socket, OTHER.public)


def with_a_key_that_is_not_allowed(socket):
    Trust(STRANGER, "stranger", {}).secure_client(socket, PRODUCER.public)


def with_null_security(socket):
    """As ZMQ has it where nothing is said."""


@pytest.mark.parametrize(
    ("disguise", "reason"),
    [
        (without_the_daemons_key, "no_handshake"),
        (with_a_key_that_is_not_allowed, "unknown_key"),
        (with_null_security, "no_handshake"),
    ],
)
async def test_every_one_of_a_thousand_connections_is_refused_and_counted(
    door: Door, attempts: int, disguise, reason: str
) -> None:
    with structlog.testing.capture_logs() as logs, zmq.Context() as context:
        for done in range(0, attempts, AT_ONCE):
            sockets = [context.socket(zmq.DEALER) for _ in range(AT_ONCE)]
            for socket in sockets:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RECONNECT_IVL, -1)  # one attempt each
                disguise(socket)
                socket.connect(door.place)
            await door.changed.until(lambda _, wanted=done + AT_ONCE: door.rejected(reason) >= wanted)
            for socket in sockets:
                socket.close()
    assert door.rejected(reason) == attempts
    assert [entry["reason"] for entry in logs].count(reason) == 1
    assert door.inbox.events == []


async def test_what_was_recorded_of_a_connection_gets_nothing_when_it_is_played_a_thousand_times(
    door: Door, attempts: int
) -> None:
    recorded = await _record(door)
    heard = len(door.inbox.events)
    host, port = door.place.removeprefix("tcp://").split(":")
    with structlog.testing.capture_logs() as logs:
        for number in range(attempts):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(recorded)
            await door.changed.until(lambda events, wanted=number + 1: len(events) >= wanted)
            writer.close()
            await writer.wait_closed()
    assert door.rejected("no_handshake") == attempts
    assert len(logs) == 1
    assert len(door.inbox.events) == heard


async def _record(door: Door) -> bytes:
    """What a daemon that is allowed (the producer itself always is) sends in one connection."""
    host, port = door.place.removeprefix("tcp://").split(":")
    recorded = bytearray()
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, into: bytearray) -> None:
        while data := await reader.read(65536):
            into.extend(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        pumps.append(asyncio.create_task(pump(there[0], writer, bytearray())))
        pumps.append(asyncio.create_task(pump(reader, there[1], recorded)))

    relaying = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{relaying.sockets[0].getsockname()[1]}#{PRODUCER.public.hex()}"
    link = door.port.connect(address)
    door.port.ask(link, b"claim")
    await door.inbox.until(lambda events: len(events) == 1)
    door.port.disconnect(link)
    await asyncio.gather(*pumps)
    relaying.close()
    await relaying.wait_closed()
    return bytes(recorded)
