"""Descriptors that are passed to sockets: refused where none are taken, closed beside the loop where some are."""

import asyncio
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvd import limits
from kvd.errors import ErrorCode, Unavailable
from kvd.net.interface import SessionClosed, SessionFrame, SessionOpened, WorkerFrame
from kvd.net.stream import HEADER, FrameStream, pack
from kvd.net.unix import readable, take_descriptors
from kvd.net.workers import WorkerSockets
from kvd.protocol.codec import session_replies
from kvd.protocol.worker import Refused
from kvd.transport.samehost.exporter import Exporter
from tests.net.conftest import Inbox
from tests.net.test_zmtp import GREETING, SESSION, frame, ready
from tests.support.descriptors import no_descriptors_left
from tests.support.lingering import lingering_socket

with socket.socket(socket.AF_UNIX) as probe:
    REFUSES = take_descriptors(probe, take=True)
    """Whether this kernel lets a socket refuse descriptors (Linux 6.16)."""
refusing = pytest.mark.skipif(not REFUSES, reason="this kernel passes descriptors to every socket (before Linux 6.16)")


class Daemon:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "kvd.sock")
        self.inbox = Inbox()
        self.admits = True
        self.port = WorkerSockets(self.path, may_pass=lambda _uid, _gid: self.admits)
        self.port.start(self.inbox)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.port.close()


def connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    return made


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket can refuse descriptors."""
    for module in ("net.local.listener", "net.local.connection", "net.workers", "transport.samehost.exporter"):
        monkeypatch.setattr(f"kvd.{module}.take_descriptors", lambda _sock, take: False)


@refusing
async def test_sockets_that_take_no_descriptors_refuse_them_also_before_they_are_accepted(
    daemon: Daemon, tmp_path: Path
) -> None:
    exporter = Exporter(str(tmp_path / "pools"), 0o600)
    for path in (daemon.path, f"{daemon.path}.zmq", str(tmp_path / "pools")):
        daemon.admits = path.endswith(".zmq")  # which nobody else may connect to
        with connected(path) as stranger:
            with pytest.raises(PermissionError):
                socket.send_fds(stranger, [b"\xff"], [0])
            await asyncio.sleep(0)  # it is accepted
            await asyncio.sleep(0)
            with pytest.raises(PermissionError):
                socket.send_fds(stranger, [b"\xff"], [0])
    exporter.close()


@refusing
async def test_a_worker_that_may_attach_passes_a_descriptor_once_it_is_accepted(daemon: Daemon) -> None:
    stream = FrameStream(connected(daemon.path), patient=True)
    stream.send(b"attach", (0,))
    assert stream.waiting > 0
    await daemon.inbox.next(SessionOpened)
    stream.flush()
    assert stream.waiting == 0
    (descriptor,) = (await daemon.inbox.next(SessionFrame)).descriptors
    daemon.port.discard((descriptor,))
    stream.close()


@pytest.mark.usefixtures("old_kernel")
async def test_where_the_kernel_cannot_refuse_them_descriptors_end_the_connection_and_are_closed_beside_the_loop(
    daemon: Daemon, tmp_path: Path
) -> None:
    exporter = Exporter(str(tmp_path / "pools"), 0o600)
    loop = asyncio.get_running_loop()
    hello = GREETING + ready(SESSION)
    with lingering_socket() as one, lingering_socket() as two, connected(f"{daemon.path}.zmq") as honest:
        for path, descriptor, said in ((f"{daemon.path}.zmq", one, hello), (exporter._path, two, b"\1\0\0\0x")):
            stranger = connected(path)
            take_descriptors(stranger, take=True)
            socket.send_fds(stranger, [said], [descriptor])
            os.close(descriptor)
            stranger.settimeout(60)
            with stranger:
                assert await asyncio.to_thread(drained, stranger)
        honest.setblocking(False)
        await loop.sock_sendall(honest, hello + frame(b"offer"))
        assert (await daemon.inbox.next(WorkerFrame)).frame == b"offer"
    exporter.close()
    await loop.shutdown_default_executor()


@pytest.mark.usefixtures("old_kernel")
async def test_descriptors_behind_a_request_that_ends_its_import_are_closed(tmp_path: Path) -> None:
    exporter = Exporter(str(tmp_path / "pools"), 0o600)
    loop = asyncio.get_running_loop()
    kept, passed = os.pipe()
    with connected(exporter._path) as stranger:
        socket.send_fds(stranger, [3 * pack(b"no message")], [passed])
        os.close(passed)
        stranger.settimeout(60)
        assert await asyncio.to_thread(drained, stranger)
    assert await asyncio.to_thread(readable, kept, 60)  # as nobody has its other end any more
    os.close(kept)
    exporter.close()
    await loop.shutdown_default_executor()


def drained(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_what_lingers_holds_up_neither_the_loop_nor_other_sessions(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lingering_socket() as stuck, connected(daemon.path) as honest, connected(daemon.path) as hostile:
        first, second = await daemon.inbox.next(SessionOpened), await daemon.inbox.next(SessionOpened)
        socket.send_fds(hostile, [struct.pack("<I", 3) + b"x"], [stuck])
        os.close(stuck)
        await asyncio.sleep(0)
        hostile.sendall(b"yz" + HEADER.pack(limits.MAX_SESSION_FRAME_BYTES + 1))
        closed = await daemon.inbox.next(SessionClosed)
        assert closed.connection in (first.connection, second.connection)
        honest.sendall(pack(b"status"))
        assert (await daemon.inbox.next(SessionFrame)).frame == b"status"
        # Of this user there are enough.
        monkeypatch.setattr(limits, "MAX_CLOSING_PER_USER", 1)
        with connected(daemon.path) as late:
            late.settimeout(60)
            answer = session_replies.decode((await asyncio.to_thread(late.recv, 4096))[HEADER.size :])
            assert isinstance(answer, Refused)
            assert (answer.code, "are not closed yet" in answer.text) == (ErrorCode.OVERLOADED, True)
    await asyncio.get_running_loop().shutdown_default_executor()


def test_what_is_passed_where_no_descriptor_is_left_is_an_error_that_says_so() -> None:
    left, right = socket.socketpair()
    giver, taker = FrameStream(left), FrameStream(right)
    giver.send(b"a pool", (0,))
    with no_descriptors_left():
        with pytest.raises(Unavailable, match="Too many open files: of this process") as caught:
            taker.receive()
        with pytest.raises(Unavailable, match="Too many open files"):
            giver.send(b"another", (0,))
    assert caught.value.code is ErrorCode.OVERLOADED
    giver.close()
    taker.close()


async def test_the_last_descriptors_are_left_for_what_must_not_fail_and_a_worker_is_told_so(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.net.local.listener.is_scarce", lambda _descriptor: True)
    with connected(daemon.path) as worker:
        worker.settimeout(60)
        answer = session_replies.decode((await asyncio.to_thread(worker.recv, 4096))[HEADER.size :])
    assert isinstance(answer, Refused)
    assert (answer.code, "no descriptors left" in answer.text) == (ErrorCode.OVERLOADED, True)
    assert daemon.inbox.events == []
    await asyncio.get_running_loop().shutdown_default_executor()


def test_descriptors_are_scarce_where_few_numbers_are_free() -> None:
    from kvd.net.local.listener import is_scarce  # noqa: PLC0415

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert not is_scarce(1024 - limits.RESERVED_DESCRIPTORS - 1)
        assert is_scarce(1024 - limits.RESERVED_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert [is_scarce(256 - 33), is_scarce(256 - 32)] == [False, True]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
