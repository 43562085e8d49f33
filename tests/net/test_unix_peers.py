"""Daemons of one host: a Unix socket each, and the kernel's word on whose process is at the other end."""

import asyncio
import contextlib
import errno
import gc
import os
import socket
import stat
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.limits import RECONNECT_MAX_MS
from kvd.net import addresses, keys
from kvd.net.interface import PeerAnswered, PeerAsked
from kvd.net.keys import Allowed
from kvd.net.local import connect, own_user, relay
from kvd.net.local.gate import Gate
from kvd.net.peers import PeerSockets
from kvd.net.trust import Reason, Rejection, Trust
from tests.net.conftest import Inbox, until
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
    os.link(producer.path, alias)
    with running(producer, consumer):
        with pytest.raises(BadRequest, match=r"leads to the socket of the daemon at .*p\.peers: name that") as caught:
            consumer.port.connect(f"ipc://{alias}")
        assert caught.value.code is ErrorCode.NOT_PERMITTED
    alias.unlink()


def with_keys(tmp_path: Path, *names: str) -> list[Daemon]:
    pairs = {name: keys.generate() for name in names}
    allowed = {pair.public: Allowed(name) for name, pair in pairs.items()}
    return [Daemon(tmp_path / name, Trust(pairs[name], name, allowed)) for name in names]


@pytest.mark.parametrize("keyed", [False, True], ids=["no_keys", "keys"])
async def test_links_that_come_to_lead_to_a_peer_are_told_and_cost_it_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    accepted, tried = list[None](), Counter[str]()
    gate_accepted, connect_to_peer = Gate._accepted, connect.connect_to_peer

    def counting(gate: Gate, connected: socket.socket) -> None:
        accepted.append(None)
        gate_accepted(gate, connected)

    def trying(path: str) -> socket.socket:
        tried[path] += os.path.lexists(path)
        return connect_to_peer(path)

    monkeypatch.setattr(Gate, "_accepted", counting)
    monkeypatch.setattr(relay if keyed else own_user, "connect_to_peer", trying)
    monkeypatch.setattr(relay if keyed else own_user, "REFUSED_MS", 50)
    names = ("p", "d")
    producer, consumer = with_keys(tmp_path, *names) if keyed else [Daemon(tmp_path / name) for name in names]
    aliases = [tmp_path / f"alias{number}.peers" for number in range(30)]
    with running(producer, consumer):
        for alias in aliases:
            consumer.port.connect(producer.port.address.replace(str(producer.path), str(alias)))
        links = list(consumer.port._links)
        for alias in aliases:
            alias.symlink_to(producer.path)
        await until(lambda: all(tried[str(alias)] > 2 for alias in aliases))
        assert accepted == producer.rejected == []
        why = "leads through a link of the file system; name it as it is without links (`realpath`)"
        assert [consumer.port.trouble(link) for link in links] == [f"{alias} {why}" for alias in aliases]
        # Its own name is unharmed, and one that leads to nobody any more is as good as new.
        own = consumer.port.connect(producer.port.address)
        assert consumer.port.ask(own, b"hello")
        assert (await producer.inbox.next(PeerAsked)).frame == b"hello"
        assert consumer.port.trouble(own) == ""
        aliases[0].unlink()
        await until(lambda: consumer.port.trouble(links[0]) == "")
    for alias in aliases[1:]:
        alias.unlink()


@contextmanager
def listens(name: Path | bytes) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fsencode(name))
        listening.listen()
        yield listening
    os.unlink(name)


def test_a_name_that_leads_elsewhere_by_now_is_what_it_was_when_it_was_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped, first, second = (tmp_path / f"{name}.peers" for name in ("swapped", "first", "second"))
    connect_to = connect.connect_to

    def late(path: str) -> socket.socket:
        swapped.unlink()
        os.link(second, swapped)
        return connect_to(path)

    monkeypatch.setattr(connect, "connect_to", late)
    with listens(first), listens(second) as other:
        os.link(first, swapped)
        with pytest.raises(BadRequest, match=f"leads to the socket of the daemon at {first}: name that"):
            connect.connect_to_peer(str(swapped))
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
    swapped.unlink()


def descriptors() -> list[str]:
    """All of this process, but for those of what nobody has any more."""
    gc.collect()
    return os.listdir("/proc/self/fd")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed, whatever is in it."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        yield Path(folder)


kernels = pytest.mark.parametrize("call", [connect._OPENAT2, 1 << 20], ids=["openat2", "no openat2"])


@kernels
def test_a_path_without_links_is_looked_up(tree: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_OPENAT2", call)
    before = len(descriptors())
    with listens(tree / "p.peers"):
        held = connect.look_up(str(tree / "p.peers"))
        assert os.path.samestat(os.fstat(held), os.stat(tree / "p.peers"))
        os.close(held)
    assert len(descriptors()) == before


@kernels
@pytest.mark.parametrize("path", ["link", "link/f", "loop", "loop/f", "maze/f", "absent link", "proc"])
def test_no_link_is_followed_wherever_it_leads(
    tree: Path, path: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_OPENAT2", call)
    (tree / "a").mkdir()
    (tree / "a/f").touch()
    maze = "a/../" * 800
    links = {"link": "a", "loop": "loop", "last": maze, "maze": f"{maze}last", "absent link": "absent"}
    for link, target in links.items():
        os.symlink(target, tree / link)
    held = os.open(tree, os.O_PATH)
    before = descriptors()
    with pytest.raises(BadRequest, match="leads through a link of the file system; name it as it is") as caught:
        connect.look_up(f"/proc/self/fd/{held}/a" if path == "proc" else str(tree / path))
    assert caught.value.code is ErrorCode.NOT_PERMITTED
    assert descriptors() == before
    os.close(held)


@kernels
@pytest.mark.parametrize("path", ["absent/f", "f/f"])
def test_a_path_that_leads_nowhere_holds_no_descriptor(
    tree: Path, path: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_OPENAT2", call)
    (tree / "f").touch()
    before = descriptors()
    with pytest.raises((FileNotFoundError, NotADirectoryError)):
        connect.look_up(str(tree / path))
    assert descriptors() == before


@kernels
async def test_one_that_comes_late_is_met_as_soon_whatever_the_kernel_has(
    tree: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_OPENAT2", call)
    pauses, try_again = list[int](), own_user.DealerSocket._try_again

    def counting(dealer: own_user.DealerSocket, least_ms: int = 0) -> None:
        pauses.append(least_ms)
        try_again(dealer, least_ms)

    monkeypatch.setattr(own_user.DealerSocket, "_try_again", counting)
    consumer = Daemon(tree / "d")
    with running(consumer):
        link = consumer.port.connect(f"ipc://{tree}/p.peers")
        await until(lambda: len(pauses) > 2)
        producer = Daemon(tree / "p")
        with running(producer):
            assert consumer.port.ask(link, b"hello")
            assert (await producer.inbox.next(PeerAsked)).frame == b"hello"
    assert not any(pauses)


def test_a_file_that_cannot_be_looked_at_holds_no_descriptor(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a server of FUSE that has ended."""

    def fails(_held: int) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "not connected")

    (tree / "p.peers").touch()
    before = descriptors()
    monkeypatch.setattr(addresses.os, "fstat", fails)
    addresses.check_user(str(tree / "p.peers"))
    monkeypatch.undo()
    assert descriptors() == before


def test_a_socket_of_our_own_user_that_we_may_not_connect_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_path: str) -> socket.socket:
        raise PermissionError(errno.EACCES, "permission denied")

    monkeypatch.setattr(addresses, "connect_to_peer", refuses)
    with listens(tmp_path / "p.peers"), pytest.raises(BadRequest, match="runs as another user"):
        addresses.check_user(str(tmp_path / "p.peers"))


@as_root
async def test_another_users_daemon_is_refused_without_a_connection(open_folder: Path) -> None:
    consumer = Daemon(open_folder / "d")
    with running(consumer), listens(open_folder / "theirs.peers") as theirs:
        os.chown(open_folder / "theirs.peers", NOBODY, -1)
        with pytest.raises(BadRequest, match=f"runs as user {NOBODY}, this one as user 0"):
            consumer.port.connect(f"ipc://{open_folder}/theirs.peers")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.accept()


async def test_without_descriptors_a_passage_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, accept = list[None](), relay.Passage._accept

    def counting(passage: relay.Passage) -> None:
        tries.append(None)
        accept(passage)

    monkeypatch.setattr(relay.Passage, "_accept", counting)
    passage = relay.Passage(str(tmp_path / "absent.peers"), str(tmp_path))
    with socket.socket(socket.AF_UNIX) as dealer:
        with no_descriptors_left():
            dealer.connect(passage.address.removeprefix("ipc://"))
            await until(lambda: bool(tries))
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(tries) == 1
        await until(lambda: passage._inside is not None)
    passage.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (b"\xff\n\x1b[31m.peers", "leads to the socket of the daemon at {}/???[31m.peers: name that"),
        (b"of a service", "leads to no daemon's socket"),
    ],
    ids=["no text", "no peer"],
)
def test_what_is_told_of_a_socket_is_text_and_of_a_daemon(tmp_path: Path, name: bytes, told: str) -> None:
    alias = tmp_path / "alias.peers"
    with listens(os.fsencode(tmp_path) + b"/" + name):
        os.link(os.fsencode(tmp_path) + b"/" + name, alias)
        with pytest.raises(BadRequest) as caught:
            connect.connect_to_peer(str(alias))
    alias.unlink()
    assert caught.value.text == f"{alias} {told.format(tmp_path)}"


async def test_with_keys_the_pause_doubles_until_a_connection_has_lasted(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    passage = relay.Passage(str(tmp_path / "p.peers"), str(tmp_path))

    async def pause(lasts: float) -> float:
        """What the next one waits after a connection that says a byte and ends."""
        with socket.socket(socket.AF_UNIX) as dealer:
            dealer.setblocking(False)
            await loop.sock_connect(dealer, passage.address.removeprefix("ipc://"))
            accepted, _ = await loop.sock_accept(listening)
            with accepted:
                accepted.send(b"x")
                assert await loop.sock_recv(dealer, 2) == b"x"
                await asyncio.sleep(lasts)
            assert await loop.sock_recv(dealer, 2) == b""
        return passage._pause

    with listens(tmp_path / "p.peers") as listening:
        listening.setblocking(False)
        assert [await pause(0) for _ in range(6)] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5]
        assert await pause(RECONNECT_MAX_MS / 1000 + 0.1) == 0
    passage.close()


async def test_keys_work_over_a_unix_socket_too(tmp_path: Path) -> None:
    producer, consumer = with_keys(tmp_path, "p", "d")
    with running(producer, consumer):
        link = consumer.port.connect(producer.port.address)
        consumer.port.ask(link, b"hello")
        assert consumer.port.address.endswith(f"#{(await producer.inbox.next(PeerAsked)).key}")


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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_has_the_digits_that_libzmq_reads(host: str) -> None:
    with pytest.raises(BadRequest, match="is not tcp://host:port"):
        addresses.check_address(f"tcp://{host}:\u0663", ErrorCode.BAD_TICKET)


def test_a_path_that_the_file_systems_encoding_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.os, "fsencode", lambda path: path.encode("ascii"))
    with pytest.raises(BadRequest, match="cannot be said in this process's encoding") as caught:
        addresses.check_address("ipc:///run/\u4e2d.peers", ErrorCode.BAD_TICKET)
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
