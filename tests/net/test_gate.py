"""The Unix socket for peers: who gets to libzmq's, and what a hostile one can do on the way, there and back."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from kvd import limits
from kvd.net import keys
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.keys import Allowed, KeyPair
from kvd.net.peers import PeerSockets
from kvd.net.trust import Reason, Rejection, Trust
from kvd.net.unix import Party, take_descriptors
from tests.net.conftest import Inbox
from tests.net.test_descriptors import refusing
from tests.net.test_zmtp import HANDSHAKE, frame
from tests.support.lingering import lingering_socket
from tests.support.patience import PATIENCE

PAIRS = {name: keys.generate() for name in ("p", "d")}


def trust(name: str, pairs: dict[str, KeyPair] | None = None) -> Trust:
    pairs = PAIRS if pairs is None else pairs
    return Trust(pairs[name], name, {pair.public: Allowed(known) for known, pair in pairs.items()})


class Daemon:
    def __init__(self, path: Path, known: Trust | None = None) -> None:
        self.inbox, self.rejected = Inbox(), list[Rejection]()
        self.path = f"{path}.peers"
        agent = f"{path.name}#1".encode()
        self.port = PeerSockets(f"ipc://{self.path}", agent, trust=known, on_rejected=self.rejected.append)
        self.port.start(self.inbox)


@pytest.fixture(params=[False, True], ids=["own-user", "keys"])
def with_keys(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def producer(tmp_path: Path, with_keys: bool) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path / "p", trust("p") if with_keys else None)
    yield made
    made.port.close()


@pytest.fixture
async def consumer(tmp_path: Path, with_keys: bool) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path / "d", trust("d") if with_keys else None)
    yield made
    made.port.close()
    await asyncio.get_running_loop().shutdown_default_executor()


async def talk(consumer: Daemon, producer: Daemon) -> int:
    """A link over which both have said something."""
    link = consumer.port.connect(producer.port.address)
    await ask(consumer, producer, link)
    return link


async def ask(consumer: Daemon, producer: Daemon, link: int, content: bytes = b"hello") -> None:
    assert consumer.port.ask(link, content)
    asked = await producer.inbox.next(PeerAsked)
    assert asked.frame == content
    assert producer.port.answer(asked.sender, content[::-1])
    assert await consumer.inbox.next(PeerAnswered) == PeerAnswered(link, content[::-1])


def stranger(path: str, said: bytes = b"") -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(PATIENCE)
    made.connect(path)
    made.sendall(said)
    return made


async def ended(made: socket.socket) -> bool:
    """Waits for the end of what the other side sends."""

    def read() -> bool:
        with contextlib.suppress(ConnectionResetError):
            while made.recv(1 << 16):
                pass
        return True

    return await asyncio.to_thread(read)


async def test_messages_of_megabytes_pass_both_ways_whole_and_in_order(producer: Daemon, consumer: Daemon) -> None:
    link = await talk(consumer, producer)
    for number in range(8):
        assert consumer.port.ask(link, bytes([number]) * (limits.MAX_PEER_REQUEST_BYTES - 1000))
    for number in range(8):
        asked = await producer.inbox.next(PeerAsked)
        assert asked.frame == bytes([number]) * (limits.MAX_PEER_REQUEST_BYTES - 1000)
        assert producer.port.answer(asked.sender, bytes([number]) * (4 * limits.MIB))
    for number in range(8):
        assert (await consumer.inbox.next(PeerAnswered)).frame == bytes([number]) * (4 * limits.MIB)


async def test_a_daemon_that_comes_later_or_again_is_found(tmp_path: Path, consumer: Daemon, with_keys: bool) -> None:
    key = f"#{PAIRS['p'].public.hex()}" if with_keys else ""
    link = consumer.port.connect(f"ipc://{tmp_path / 'p'}.peers{key}")
    for number in range(3):
        producer = Daemon(tmp_path / "p", trust("p") if with_keys else None)
        consumer.port.ask(link, b"%d" % number)
        asked = await producer.inbox.next(PeerAsked)
        assert producer.port.answer(asked.sender, b"last words")
        producer.port.close()
        assert (await consumer.inbox.next(PeerAnswered)).frame == b"last words"


async def test_a_link_that_is_closed_leaves_nothing(producer: Daemon, consumer: Daemon) -> None:
    await talk(consumer, producer)
    before = len(os.listdir("/proc/self/fd"))
    link = await talk(consumer, producer)
    consumer.port.disconnect(link)
    gate = producer.port._server._gate
    assert gate is not None
    while gate._of_user.total() > 1 or len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("with_keys", [True], indirect=True)
@pytest.mark.parametrize("user", [65534, 1000])
async def test_those_without_a_key_take_nobodys_place_and_the_oldest_of_them_makes_room(
    producer: Daemon, consumer: Daemon, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGE_PEERS", 8)
    parties = iter([*(Party(65534, number) for number in range(12)), Party(user, 100)])
    monkeypatch.setattr("kvd.net.local.gate.party_at", lambda _connected: next(parties))
    silent = []
    for _ in range(12):
        silent.append(stranger(producer.path))
        assert await asyncio.to_thread(silent[-1].recv, 1)  # a greeting: it is in
    for oldest in silent[:4]:
        assert await ended(oldest)
    await talk(consumer, producer)
    for each in silent:
        each.close()


async def of_unknown_key(folder: Path, producer: Daemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose key was refused, and which stays: libzmq's own client would hang up."""
    refused = asyncio.Event()
    reader, writer = await asyncio.open_unix_connection(producer.path)

    async def between(inner: asyncio.StreamReader, to_inner: asyncio.StreamWriter) -> None:
        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
                if b"\x05ERROR" in data:
                    return

        there = asyncio.create_task(pass_on(inner, writer))
        await pass_on(reader, to_inner)
        refused.set()
        there.cancel()
        to_inner.close()

    async with await asyncio.start_unix_server(between, folder / "between"):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
            trust("d", {"d": keys.generate()}).secure_client(socket_, PAIRS["p"].public)
            socket_.setsockopt(zmq.LINGER, 0)
            socket_.connect(f"ipc://{folder / 'between'}")
            await refused.wait()
    (folder / "between").unlink()
    return reader, writer


@pytest.mark.parametrize("with_keys", [True], indirect=True)
async def test_those_whose_key_was_refused_stay_strangers_however_long_they_stay(
    producer: Daemon, consumer: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGE_PEERS", 2)
    monkeypatch.setattr(limits, "MAX_PEERS", 4)
    refused = [await of_unknown_key(tmp_path, producer) for _ in range(4)]
    await talk(consumer, producer)
    assert all(rejection.reason is not Reason.TOO_MANY for rejection in producer.rejected)
    for _, writer in refused:
        writer.close()


async def test_processes_and_users_have_shares_and_those_who_are_refused_are_counted(
    producer: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    parties = iter([Party(own, 1), Party(own, 1), Party(own, 2), Party(own, 3), Party(own, 0)])
    monkeypatch.setattr("kvd.net.local.gate.party_at", lambda _connected: next(parties))
    monkeypatch.setattr(limits, "MAX_PEERS_PER_PROCESS", 1)
    monkeypatch.setattr(limits, "MAX_PEERS_PER_USER", 3)
    made = [stranger(producer.path) for _ in range(5)]
    welcome = [await asyncio.to_thread(each.recv, 1) for each in made]
    assert welcome == [b"\xff", b"", b"\xff", b"\xff", b""]
    assert producer.rejected == [Rejection(Reason.TOO_MANY, address=f"user {own}")] * 2
    for each in made:
        each.close()


@refusing
async def test_a_message_with_a_descriptor_is_not_taken_from_a_peer_nor_from_a_daemon(
    producer: Daemon, consumer: Daemon, tmp_path: Path, with_keys: bool
) -> None:
    with stranger(producer.path) as hostile, pytest.raises(PermissionError):
        socket.send_fds(hostile, [b"\xff"], [0])
    key = f"#{PAIRS['p'].public.hex()}" if with_keys else ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.peers"))
        listener.listen()
        listener.settimeout(PATIENCE)
        consumer.port.connect(f"ipc://{tmp_path / 'x.peers'}{key}")
        while True:  # the first connection may be that of the look at its user
            accepted, _ = await asyncio.to_thread(listener.accept)
            with accepted, contextlib.suppress(BrokenPipeError):
                with pytest.raises(PermissionError):
                    socket.send_fds(accepted, [b"\xff"], [0])
                break
    os.unlink(tmp_path / "x.peers")


async def test_where_the_kernel_cannot_refuse_it_the_connection_ends_and_others_are_heard(
    producer: Daemon, consumer: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("listener", "relay", "connection"):
        monkeypatch.setattr(f"kvd.net.local.{module}.take_descriptors", lambda _sock, take: False)
    link = await talk(consumer, producer)
    gate = producer.port._server._gate
    assert gate is not None
    take_descriptors(gate._listener._socket, take=True)
    with lingering_socket() as stuck, stranger(producer.path, HANDSHAKE[:64]) as hostile:
        socket.send_fds(hostile, [frame(b"hello")], [stuck])
        os.close(stuck)
        assert await ended(hostile)
        await ask(consumer, producer, link)


FLOODED = """
import asyncio, resource, sys
from pathlib import Path
from kvd.net import keys
from kvd.net.interface import PeerAsked
from kvd.net.peers import PeerSockets
from kvd.net.trust import Trust

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

async def serve():
    pair = keys.load(Path(sys.argv[2]))
    port = PeerSockets(sys.argv[1], b"p#1", trust=Trust(pair, "p", keys.load_allowed(Path(sys.argv[3]))))
    port.start(lambda event: port.answer(event.sender, event.frame) if isinstance(event, PeerAsked) else None)
    print(port.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    port.close()

asyncio.run(serve())
"""


@pytest.mark.real
@pytest.mark.parametrize("with_keys", [True], indirect=True)
async def test_a_flood_of_connections_neither_ends_a_daemon_nor_keeps_its_peers_away(
    tmp_path: Path, consumer: Daemon
) -> None:
    key, allowed = tmp_path / "key", tmp_path / "allowed"
    keys.save(PAIRS["p"], key)
    allowed.write_text(f"{PAIRS['d'].public.hex()} d\n")
    allowed.chmod(0o644)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    arguments = [f"ipc://{tmp_path / 'x'}.peers", str(key), str(allowed)]
    child = subprocess.Popen(  # noqa: ASYNC220 - it is quick
        [sys.executable, "-c", FLOODED, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    address = (await asyncio.to_thread(child.stdout.readline)).strip()
    flood = []
    try:
        for _ in range(300):
            flood.append(await asyncio.to_thread(stranger, arguments[0].removeprefix("ipc://")))
        link = consumer.port.connect(address)
        assert consumer.port.ask(link, b"hello")
        assert (await consumer.inbox.next(PeerAnswered)).frame == b"hello"
        assert child.poll() is None
    finally:
        for each in flood:
            each.close()
        child.stdin.close()
        child.wait(PATIENCE)
        child.stdout.close()
        key.unlink()
        allowed.unlink()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert child.returncode == 0
