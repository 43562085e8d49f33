"""Daemons of one host: a Unix socket each, and the kernel's word on whose process is at the other end."""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.net import keys
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.keys import Allowed
from kvd.net.peers import PeerSockets
from kvd.net.trust import Reason, Rejection, Trust
from tests.net.conftest import Inbox
from tests.net.test_zmtp import HANDSHAKE, frame
from tests.support.descriptors import no_descriptors_left
from tests.support.patience import PATIENCE

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


class Daemon:
    def __init__(self, path: Path, trust: Trust | None = None) -> None:
        self.inbox, self.rejected = Inbox(), list[Rejection]()
        self.path = Path(f"{path}.peers")
        agent = f"{path.name}#1".encode()
        self.port = PeerSockets(f"ipc://{self.path}", agent, trust=trust, on_rejected=self.rejected.append)
        self.port.start(self.inbox)


@contextmanager
def running(*daemons: Daemon) -> Iterator[None]:
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.port.close()


@contextmanager
def another_user(work: Callable[[], None]) -> Iterator[None]:
    """A process of another user's that does `work`, says so, and stays until the block is left."""
    said, says = os.pipe()
    stays, leave = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(leave)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            os.write(says, b"+")
            os.read(stays, 1)
        finally:
            os._exit(0)
    os.close(says)
    os.close(stays)
    try:
        assert os.read(said, 1) == b"+"
        yield
    finally:
        os.close(leave)
        os.close(said)
        os.waitpid(child, 0)


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where everybody may make and find files."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    folder = tmp_path / "all"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


async def test_daemons_of_one_user_talk_and_nobody_else_may_connect(tmp_path: Path) -> None:
    producer, consumer = Daemon(tmp_path / "p"), Daemon(tmp_path / "d")
    with running(producer, consumer):
        assert stat.S_IMODE(producer.path.stat().st_mode) == 0o600
        assert producer.port.address == f"ipc://{producer.path}"
        link = consumer.port.connect(producer.port.address)
        assert consumer.port.ask(link, b"hello")
        asked = await producer.inbox.next(PeerAsked)
        assert asked.sender.startswith(b"d#1#")
        assert asked.frame == b"hello"
        assert producer.port.answer(asked.sender, b"welcome")
        assert await consumer.inbox.next(PeerAnswered) == PeerAnswered(link, b"welcome")
        assert producer.rejected == consumer.rejected == []


async def test_an_address_that_leads_to_a_daemon_of_another_name_is_refused(tmp_path: Path) -> None:
    producer, consumer = Daemon(tmp_path / "p"), Daemon(tmp_path / "d")
    alias = tmp_path / "alias.peers"
    alias.symlink_to(producer.path)
    with running(producer, consumer):
        with pytest.raises(BadRequest, match=r"leads to the socket of the daemon at .*p\.peers: name that") as caught:
            consumer.port.connect(f"ipc://{alias}")
        assert caught.value.code is ErrorCode.NOT_PERMITTED
    alias.unlink()


async def test_keys_work_over_a_unix_socket_too(tmp_path: Path) -> None:
    pairs = {name: keys.generate() for name in ("p", "d")}
    allowed = {pair.public: Allowed(name) for name, pair in pairs.items()}
    producer, consumer = (Daemon(tmp_path / name, Trust(pairs[name], name, allowed)) for name in ("p", "d"))
    with running(producer, consumer):
        link = consumer.port.connect(producer.port.address)
        consumer.port.ask(link, b"hello")
        assert (await producer.inbox.next(PeerAsked)).key == pairs["d"].public.hex()


@as_root
@pytest.mark.real
async def test_another_user_is_not_heard_even_where_the_socket_lets_it_connect(open_folder: Path) -> None:
    producer, consumer = Daemon(open_folder / "p"), Daemon(open_folder / "d")
    producer.path.chmod(0o666)
    thief = socket.socket(socket.AF_UNIX)

    def ask() -> None:
        thief.connect(str(producer.path))
        thief.sendall(HANDSHAKE + frame(b"hello"))

    with thief, running(producer, consumer), another_user(ask):
        link = consumer.port.connect(producer.port.address)
        while not producer.rejected:
            consumer.port.ask(link, b"mine")
            assert (await producer.inbox.next(PeerAsked)).frame == b"mine"
        assert producer.rejected == [Rejection(Reason.OTHER_USER, address=f"user {NOBODY}")]


@as_root
@pytest.mark.real
async def test_a_daemon_of_another_user_is_not_connected_to(open_folder: Path) -> None:
    consumer = Daemon(open_folder / "d")
    path = open_folder / "p.peers"
    listener = socket.socket(socket.AF_UNIX)

    def listen() -> None:
        listener.bind(str(path))
        listener.listen()

    with running(consumer), another_user(listen), pytest.raises(BadRequest, match=f"runs as user {NOBODY}") as caught:
        consumer.port.connect(f"ipc://{path}")
    listener.close()
    assert caught.value.code is ErrorCode.NOT_PERMITTED
    assert "run both as one, or give both `curve_key` and `curve_peers`" in caught.value.text


@as_root
@pytest.mark.real
async def test_another_user_that_takes_the_place_of_a_daemon_is_not_believed(open_folder: Path) -> None:
    consumer = Daemon(open_folder / "d")
    path = open_folder / "p.peers"
    link = consumer.port.connect(f"ipc://{path}")
    consumer.port.ask(link, b"hello")

    def answer() -> None:
        thief = zmq.Context().socket(zmq.ROUTER)
        thief.bind(f"ipc://{path}")
        Thread(target=lambda: thief.send_multipart([thief.recv_multipart()[0], b"welcome"])).start()

    with running(consumer), another_user(answer):
        await consumer_rejects(consumer)
    assert consumer.inbox.events == []


async def consumer_rejects(consumer: Daemon) -> None:
    other = consumer.port.connect(consumer.port.address)
    while not consumer.rejected:
        consumer.port.ask(other, b"tick")
        await consumer.inbox.next(PeerAsked)


async def test_a_daemon_of_one_host_connects_nowhere_over_tcp(tmp_path: Path) -> None:
    consumer = Daemon(tmp_path / "d")
    with running(consumer), pytest.raises(BadRequest, match="is reached over TCP, where nothing proves who") as caught:
        consumer.port.connect("tcp://127.0.0.1:1")
    assert caught.value.code is ErrorCode.NOT_PERMITTED


async def test_two_daemons_cannot_have_one_path(tmp_path: Path) -> None:
    first = Daemon(tmp_path / "p")
    second = PeerSockets(first.port.address, b"p#2")
    with running(first):
        with pytest.raises(BadRequest, match="another kvd serves"):
            second.start(first.inbox)
        second.close()
        assert first.path.exists()


@pytest.mark.parametrize("path", ["/run/../run/a.peers", "/run//a.peers", f"/{'x' * 105}.peers"])
async def test_a_path_has_one_spelling_that_the_kernel_takes(tmp_path: Path, path: str) -> None:
    consumer = Daemon(tmp_path / "d")
    with running(consumer), pytest.raises(BadRequest, match="of a Unix socket is not the shortest spelling") as caught:
        consumer.port.connect(f"ipc://{path}")
    assert caught.value.code is ErrorCode.BAD_TICKET


async def test_a_ticket_cannot_hide_another_socket_before_a_nul_in_its_address(tmp_path: Path) -> None:
    consumer = Daemon(tmp_path / "d")
    with running(consumer), socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(tmp_path / "victim"))
        victim.listen()
        victim.setblocking(False)
        with pytest.raises(BadRequest, match=r"is not tcp://host:port, nor ipc:///path\.peers") as caught:
            consumer.port.connect(f"ipc://{tmp_path}/victim\0.peers")
        with pytest.raises(BlockingIOError):
            victim.accept()
    (tmp_path / "victim").unlink()
    assert caught.value.code is ErrorCode.BAD_TICKET


async def test_a_routing_id_of_megabytes_costs_its_sender_the_connection_before_it_is_kept(tmp_path: Path) -> None:
    producer = Daemon(tmp_path / "p")
    name = b"Identity"
    size = struct.pack(">I", 2 * limits.MAX_PEER_REQUEST_BYTES)
    ready = (
        b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        + bytes([len(name)])
        + name
        + size
        + bytes(2 * limits.MAX_PEER_REQUEST_BYTES)
    )
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

    def attack() -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(PATIENCE)
            stranger.connect(str(producer.path))
            stranger.sendall(greeting)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(b"\x06" + struct.pack(">Q", len(ready)) + ready)
                while data := stranger.recv(65536):
                    assert b"READY" not in data, "it was let in"

    with running(producer):
        await asyncio.to_thread(attack)
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_peer_for_which_no_descriptor_is_left_is_refused_with_that_name(tmp_path: Path) -> None:
    producer, consumer = Daemon(tmp_path / "p"), Daemon(tmp_path / "d")
    with running(producer, consumer):
        with no_descriptors_left(), pytest.raises(Unavailable, match="Too many open files"):
            consumer.port.connect(producer.port.address)
        consumer.port.connect(producer.port.address)
