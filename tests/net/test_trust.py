import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest
import zmq

from kvd.errors import BadRequest, ErrorCode
from kvd.net import keys
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.keys import Allowed
from kvd.net.peers import PeerSockets
from kvd.net.trust import Reason, Rejection, Trust
from tests.net.conftest import Inbox, without_token
from tests.support.patience import MOMENT

KEYS = {name: keys.generate() for name in ("producer", "consumer", "stranger")}


class Daemon:
    """Allows the daemons named; shows the key of `name`."""

    def __init__(self, name: str, *allowed: str, speaks_as: str = "") -> None:
        self.inbox, self.rejected = Inbox(), Inbox()
        self.trust = Trust(KEYS[name], name, {KEYS[each].public: Allowed(each) for each in allowed})
        agent = f"{speaks_as or name}#1".encode()
        self.port = PeerSockets("tcp://127.0.0.1:0", agent, trust=self.trust, on_rejected=self.rejected)
        self.port.start(self.inbox)

    @property
    def place(self) -> str:
        return self.port.address.partition("#")[0]


@pytest.fixture
async def producer() -> AsyncIterator[Daemon]:
    daemon = Daemon("producer", "consumer")
    yield daemon
    daemon.port.close()


@pytest.fixture
async def consumer() -> AsyncIterator[Daemon]:
    daemon = Daemon("consumer", "producer", "stranger")
    yield daemon
    daemon.port.close()


async def asks_in_vain(asker: PeerSockets, address: str, producer: Daemon, reason: Reason) -> Rejection:
    asker.ask(asker.connect(address), b"let me in")
    await producer.rejected.until(lambda events: any(event.reason is reason for event in events))
    assert producer.inbox.events == []
    return next(event for event in producer.rejected.events if event.reason is reason)


async def test_daemons_that_allow_each_other_talk(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    assert without_token(asked) == PeerAsked(b"consumer#1", b"hello", KEYS["consumer"].public.hex())
    assert producer.port.answer(asked.sender, b"welcome")
    assert await consumer.inbox.next(PeerAnswered) == PeerAnswered(link, b"welcome")
    assert producer.rejected.events == []


async def test_a_daemon_may_always_talk_to_itself(producer: Daemon) -> None:
    producer.port.ask(producer.port.connect(producer.port.address), b"hello")
    assert (await producer.inbox.next(PeerAsked)).frame == b"hello"


async def test_the_address_that_tickets_carry_names_the_key(producer: Daemon) -> None:
    assert producer.port.address.endswith(f"#{KEYS['producer'].public.hex()}")


async def test_a_key_that_is_not_on_the_list_is_refused_and_named(producer: Daemon) -> None:
    stranger = Daemon("stranger", "producer")
    rejection = await asks_in_vain(stranger.port, producer.port.address, producer, Reason.UNKNOWN_KEY)
    assert rejection.key == KEYS["stranger"].public.hex()
    assert "127.0.0.1" in rejection.address
    stranger.port.close()


async def test_who_takes_a_daemon_for_another_is_refused(producer: Daemon, consumer: Daemon) -> None:
    address = f"{producer.place}#{KEYS['stranger'].public.hex()}"
    await asks_in_vain(consumer.port, address, producer, Reason.NO_HANDSHAKE)


async def test_null_security_is_refused(producer: Daemon) -> None:
    plain = PeerSockets("tcp://127.0.0.1:0", b"consumer#1")
    plain.start(lambda event: None)
    await asks_in_vain(plain, producer.place, producer, Reason.NO_HANDSHAKE)
    plain.close()


async def test_plain_security_is_refused(producer: Daemon) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"consumer")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, b"secret")
        dealer.connect(producer.place)
        dealer.send(b"let me in")
        await producer.rejected.until(lambda events: any(event.reason is Reason.NO_HANDSHAKE for event in events))
    assert producer.inbox.events == []


async def test_random_bytes_on_the_port_let_nobody_in(producer: Daemon, consumer: Daemon) -> None:
    host, port = producer.place.removeprefix("tcp://").split(":")
    raw = [socket.create_connection((host, int(port)), timeout=MOMENT) for _ in range(20)]
    for number, connection in enumerate(raw):
        greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE" if number % 2 else b""
        connection.sendall(greeting.ljust(64 if greeting else 0, b"\0") + os.urandom(400))
    consumer.port.ask(consumer.port.connect(producer.port.address), b"hello")
    await producer.inbox.until(lambda events: len(events) > 0)
    [asked] = producer.inbox.events
    assert without_token(asked) == PeerAsked(b"consumer#1", b"hello", KEYS["consumer"].public.hex())
    for connection in raw:
        connection.close()


async def test_an_allowed_daemon_cannot_speak_in_anothers_name(producer: Daemon) -> None:
    producer.trust.replace({KEYS[name].public: Allowed(name) for name in ("consumer", "stranger")})
    impostor = Daemon("stranger", "producer", speaks_as="consumer")
    rejection = await asks_in_vain(impostor.port, producer.port.address, producer, Reason.WRONG_NAME)
    assert rejection.key == KEYS["stranger"].public.hex()
    impostor.port.close()


async def test_a_key_taken_off_the_list_is_refused_on_the_connection_that_stands(
    producer: Daemon, consumer: Daemon
) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    await producer.inbox.next(PeerAsked)
    producer.trust.replace({})
    consumer.port.ask(link, b"and now?")
    await producer.rejected.until(lambda events: len(events) == 1)
    assert producer.inbox.events == []
    producer.trust.replace({KEYS["consumer"].public: Allowed("consumer")})
    consumer.port.ask(link, b"again")
    asked = await producer.inbox.next(PeerAsked)
    assert without_token(asked) == PeerAsked(b"consumer#1", b"again", KEYS["consumer"].public.hex())


async def test_a_producer_taken_off_the_list_is_neither_asked_nor_believed(producer: Daemon, consumer: Daemon) -> None:
    link = consumer.port.connect(producer.port.address)
    consumer.port.ask(link, b"hello")
    asked = await producer.inbox.next(PeerAsked)
    consumer.trust.replace({})
    assert not consumer.port.ask(link, b"more")
    looked_up = Inbox()
    consumer.trust.name_of = looked_up
    producer.port.answer(asked.sender, b"a lie")
    await looked_up.until(lambda keys: keys == [KEYS["producer"].public])
    assert consumer.inbox.events == []


@pytest.mark.parametrize(
    ("key", "code", "text"),
    [
        ("", ErrorCode.BAD_TICKET, "uses no CURVE and this one does"),
        ("#" + "00" * 32, ErrorCode.NOT_PERMITTED, "is not on the allow-list"),
        ("#" + "00" * 31, ErrorCode.BAD_TICKET, "is not tcp://host:port"),
        ("#" + "0g" * 32, ErrorCode.BAD_TICKET, "is not tcp://host:port"),
    ],
)
async def test_a_ticket_cannot_make_a_daemon_connect_to_whom_it_does_not_trust(
    consumer: Daemon, key: str, code: ErrorCode, text: str
) -> None:
    with pytest.raises(BadRequest, match=text) as caught:
        consumer.port.connect(f"tcp://127.0.0.1:1{key}")
    assert caught.value.code is code


async def test_a_daemon_without_curve_says_so_when_a_ticket_names_a_key() -> None:
    plain = PeerSockets("tcp://127.0.0.1:0", b"plain#1")
    plain.start(lambda event: None)
    with pytest.raises(BadRequest, match="uses CURVE and this one does not"):
        plain.connect(f"tcp://127.0.0.1:1#{'00' * 32}")
    plain.close()


async def test_no_secret_is_shown_by_accident() -> None:
    assert KEYS["producer"].secret.hex() not in repr(KEYS["producer"])


async def test_bytes_recorded_on_the_wire_let_nobody_in_when_they_are_played_again(
    producer: Daemon, consumer: Daemon
) -> None:
    host, port = producer.place.removeprefix("tcp://").split(":")
    recorded = bytearray()
    tasks = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bool) -> None:
        while data := await reader.read(65536):
            if record:
                recorded.extend(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        tasks.append(asyncio.create_task(pump(there_reader, writer, False)))
        tasks.append(asyncio.create_task(pump(reader, there_writer, True)))

    relaying = await asyncio.start_server(relay, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{relaying.sockets[0].getsockname()[1]}#{KEYS['producer'].public.hex()}"
    link = consumer.port.connect(address)
    consumer.port.ask(link, b"claim")
    assert (await producer.inbox.next(PeerAsked)).frame == b"claim"
    consumer.port.disconnect(link)
    await asyncio.gather(*tasks)
    relaying.close()
    await relaying.wait_closed()

    for _ in range(20):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(recorded))
        await writer.drain()
        before = len(producer.rejected.events)
        await producer.rejected.until(lambda events, before=before: len(events) > before)
        writer.close()
        await writer.wait_closed()
    assert producer.inbox.events == []
    assert {event.reason for event in producer.rejected.events} == {Reason.NO_HANDSHAKE}


async def test_replicas_that_share_a_key_speak_for_every_name_of_theirs_and_no_other() -> None:
    shared, other = KEYS["producer"], KEYS["consumer"]
    trust = Trust(shared, "decode-7f-x", {shared.public: Allowed("decode-*"), other.public: Allowed("prefill-*")})
    assert trust.speaks_for(shared.public.hex(), "decode-7f-y")
    assert trust.speaks_for(other.public.hex(), "prefill-0")
    assert not trust.speaks_for(other.public.hex(), "decode-7f-y")
    assert trust.key_of("prefill-3") == other.public
    misnamed = Trust(shared, "decode-7f-x", {shared.public: Allowed("prefill-*")})
    assert misnamed.speaks_for(shared.public.hex(), "decode-7f-x")
    assert not misnamed.speaks_for(shared.public.hex(), "prefill-0")


async def test_replicas_do_not_speak_for_a_daemon_that_has_a_line_of_its_own() -> None:
    own, replicas, seventh, gpus = (keys.generate() for _ in range(4))
    names = {replicas: "decode-*", seventh: "decode-7", gpus: "decode-gpu-*"}
    trust = Trust(own, "prefill", {pair.public: Allowed(name) for pair, name in names.items()})
    spoken_for = {
        pair: [name for name in ("decode-1", "decode-7", "decode-gpu-1") if trust.speaks_for(pair.public.hex(), name)]
        for pair in names
    }
    assert spoken_for == {replicas: ["decode-1"], seventh: ["decode-7"], gpus: ["decode-gpu-1"]}
    assert trust.key_of("decode-7") == seventh.public
