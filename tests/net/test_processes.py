"""The daemon hears when the process of a session has ended."""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvd.net import unix
from kvd.net.interface import ProcessEnded, SessionClosed, SessionOpened
from kvd.net.local.session import WatchedProcesses
from kvd.net.workers import WorkerSockets
from tests.net.conftest import Inbox

pytestmark = pytest.mark.real

_CONNECT = """
import socket, sys
worker = socket.socket(socket.AF_UNIX)
worker.connect(sys.argv[1])
sys.stdin.read(1)
worker.close()
print(flush=True)
sys.stdin.read(1)
"""


class Other:
    """Another process: connects, hangs up at the first byte that it is sent, and ends at the second."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CONNECT, path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self.pid = self._process.pid

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kvd.sock")


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def port(path: str, inbox: Inbox) -> AsyncIterator[WorkerSockets]:
    port = WorkerSockets(path)
    port.start(inbox)
    yield port
    port.close()


@pytest.fixture
def other(path: str, port: WorkerSockets) -> Iterator[Other]:
    other = Other(path)
    yield other
    other.end()


@pytest.fixture(params=["SO_PEERPIDFD", "pidfd_open"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pidfd_open":
        monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)  # ENOPROTOOPT, as before Linux 6.5


@pytest.mark.usefixtures("kernel")
async def test_the_end_of_a_session_and_that_of_its_process_are_two_events(inbox: Inbox, other: Other) -> None:
    opened = await inbox.next(SessionOpened)
    assert (opened.pid, opened.watched) == (other.pid, True)
    other.step()
    await inbox.next(SessionClosed)
    assert inbox.events == []
    other.step()
    assert (await inbox.next(ProcessEnded)).connection == opened.connection


async def test_a_process_that_is_forgotten_leaves_no_descriptor(
    inbox: Inbox, port: WorkerSockets, other: Other
) -> None:
    opened = await inbox.next(SessionOpened)
    other.step()
    await inbox.next(SessionClosed)
    assert port._peers is not None
    pidfd = port._peers._pidfds[opened.connection]
    os.fstat(pidfd)
    port.forget_process(opened.connection)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)
    port.forget_process(opened.connection)


async def test_a_number_that_is_not_visible_is_not_watched_on_old_kernels(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)
    watched = WatchedProcesses(inbox)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert not watched.watch(1, ours, 0)


async def test_a_number_whose_connection_is_over_may_be_another_process_s(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)
    watched = WatchedProcesses(inbox)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.close()
    with ours:
        assert not watched.watch(1, ours, os.getpid())


async def test_a_process_that_was_gone_before_it_was_watched_has_ended(path: str, inbox: Inbox) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".other")
        listener.listen()
        other = Other(path + ".other")
        accepted, _ = listener.accept()
        other.end()
        watched = WatchedProcesses(inbox)
        with accepted:
            assert watched.watch(5, accepted, other.pid)
    assert (await inbox.next(ProcessEnded)).connection == 5
    os.unlink(path + ".other")
