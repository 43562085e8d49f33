"""Ends of connections whose other end left bytes unread: the kernel reports an error, and uvloop watches no more."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.net.interface import SessionClosed, SessionFrame, SessionOpened, WorkerFrame
from kvd.net.local.relay import Relay
from kvd.net.local.zmtp import hello
from kvd.net.stream import pack
from kvd.net.unix import ReadWatch, readable
from kvd.net.workers import WorkerSockets
from tests.fuzz.zmtp import frame
from tests.net.conftest import Inbox
from tests.support.patience import MOMENT


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


@pytest.mark.parametrize("written_to", [False, True])
@pytest.mark.parametrize("said", [b"", b"last words"])
async def test_all_is_read_to_the_end(pair: tuple[socket.socket, socket.socket], said: bytes, written_to: bool) -> None:
    ours, theirs = pair
    read, ended = bytearray(), asyncio.Event()

    def readable() -> None:
        try:
            part = ours.recv(1)
        except ConnectionResetError:
            part = b""
        read.extend(part)
        if not part:
            watch.stop()
            ended.set()

    watch = ReadWatch(ours.fileno(), readable)
    watch.start()
    ours.send(b"never read")
    theirs.send(said)
    theirs.close()
    if written_to:
        asyncio.get_running_loop().add_writer(ours.fileno(), lambda: None)
    async with asyncio.timeout(MOMENT):
        await ended.wait()
    asyncio.get_running_loop().remove_writer(ours.fileno())
    assert read == said


async def test_one_that_is_stopped_in_a_call_is_not_called_again(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    calls = list[None]()

    def readable() -> None:
        calls.append(None)
        watch.stop()

    watch = ReadWatch(ours.fileno(), readable)
    watch.start()
    ours.send(b"never read")
    theirs.send(b"last words")
    theirs.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(calls) == 1


async def test_the_end_of_a_worker_that_left_its_last_frames_unread_is_told(tmp_path: Path, inbox: Inbox) -> None:
    port = WorkerSockets(str(tmp_path / "kvd.sock"))
    port.start(inbox)
    with socket.socket(socket.AF_UNIX) as session, socket.socket(socket.AF_UNIX) as requests:
        session.connect(str(tmp_path / "kvd.sock"))
        requests.connect(port.endpoint.removeprefix("ipc://"))
        requests.send(hello(b"session") + frame(b"first"))
        assert await inbox.next(WorkerFrame)
        opened = await inbox.next(SessionOpened)
        port.send_session(opened.connection, b"never read")
        assert port.send(b"session", b"never read")
        session.send(pack(b"last"))
        requests.send(frame(b"last"))
    assert await inbox.next(SessionFrame)
    assert await inbox.next(SessionClosed)
    assert (await inbox.next(WorkerFrame)).frame == b"last"
    async with asyncio.timeout(MOMENT):
        while port.send(b"session", b"is it gone?"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    port.close()


async def test_a_relay_ends_with_either_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ended = asyncio.Event()
    (outside, peer), (inside, libzmq) = pair, socket.socketpair()
    with inside, libzmq:
        inside.setblocking(False)
        Relay(outside, inside, lambda _relay: ended.set())
        libzmq.send(b"never read")
        while not readable(peer.fileno()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        peer.send(b"last words")
        peer.close()
        async with asyncio.timeout(MOMENT):
            await ended.wait()
