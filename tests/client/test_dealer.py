"""The worker's end of the socket for requests, and bytes made by hand at the other."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.client.dealer import MAX_UNSENT_BYTES, Dealer
from kvd.errors import BadRequest, Unavailable
from kvd.net.local import zmtp
from kvd.net.local.zmtp import GREETING, WELCOME, Decoder, Ready, command, header
from tests.support.patience import PATIENCE

NAME = b"session-of-16-by"


@contextmanager
def connected() -> Iterator[tuple[Dealer, socket.socket]]:
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        dealer = Dealer(f"{folder}/s".encode(), NAME)
        daemon_end, _ = listener.accept()
        with daemon_end:
            daemon_end.settimeout(PATIENCE)
            yield dealer, daemon_end
        dealer.close(0.0)


@pytest.fixture
def both() -> Iterator[tuple[Dealer, socket.socket]]:
    with connected() as ends:
        yield ends


@pytest.fixture
def dealer(both: tuple[Dealer, socket.socket]) -> Dealer:
    return both[0]


@pytest.fixture
def daemon_end(both: tuple[Dealer, socket.socket]) -> socket.socket:
    return both[1]


def frame(message: bytes) -> bytes:
    return header(len(message)) + message


def test_what_is_sent_at_once_comes_behind_the_handshake(dealer: Dealer, daemon_end: socket.socket) -> None:
    assert dealer.send(b"first")
    assert dealer.send(b"")
    decoder = Decoder(limits.MAX_MESSAGE_BYTES)
    assert decoder.feed(daemon_end.recv(1 << 16)) == [Ready(NAME), b"first", b""]


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 3000), max_size=8))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = GREETING + WELCOME + b"".join(map(frame, messages))
    ends = [*sorted(cut % len(data) for cut in cuts), len(data)]
    received = []
    with connected() as (dealer, daemon_end):
        for start, end in zip([0, *ends], ends, strict=False):
            daemon_end.sendall(data[start:end])
            while (message := dealer.receive()) is not None:
                received.append(message)
    assert received == messages


def test_what_had_no_room_gets_out_though_nobody_calls(dealer: Dealer, daemon_end: socket.socket) -> None:
    messages = [bytes(range(256)) * 8192, b"behind it"]
    for message in messages:
        assert dealer.send(message)
    decoder, received = Decoder(limits.MAX_MESSAGE_BYTES), []
    while len(received) < 3:
        received += decoder.feed(daemon_end.recv(1 << 16))
    assert received == [Ready(NAME), *messages]
    while dealer._sender.waiting:
        time.sleep(0)


def test_so_much_waits_for_a_daemon_that_does_not_read(dealer: Dealer, daemon_end: socket.socket) -> None:
    most, sent = bytes(limits.MAX_MESSAGE_BYTES), 0
    while dealer.send(most):
        sent += len(most)
    assert MAX_UNSENT_BYTES <= sent < MAX_UNSENT_BYTES + 2 * len(most)
    daemon_end.close()
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()


def test_heartbeats_which_a_daemon_sends_none_of_are_refused(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(GREETING + WELCOME + command(b"\x04PING\x00\x00context") + frame(b"hello"))
    with pytest.raises(BadRequest, match="where a message is due"):
        dealer.receive()


def test_a_send_that_fails_ends_the_connection(
    dealer: Dealer, daemon_end: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next message would be taken for the rest of the one that was cut."""

    class Failing:
        def __init__(self, made: socket.socket) -> None:
            self._made = made

        def send(self, _data: bytes) -> int:
            raise OSError(errno.ENOBUFS, "no buffer space")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._made, name)

    monkeypatch.setattr(dealer, "_socket", Failing(dealer._socket))
    assert dealer.send(b"hello")
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()
    assert Decoder(limits.MAX_MESSAGE_BYTES).feed(daemon_end.recv(1 << 16)) == [Ready(NAME)]
    assert daemon_end.recv(1) == b""


def test_what_came_before_the_end_is_received(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(GREETING + WELCOME + frame(b"last") + frame(b"words"))
    daemon_end.close()
    assert dealer.receive() == b"last"
    assert dealer.unread
    assert dealer.receive() == b"words"
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()


def test_it_is_welcomed_once_the_daemon_has_said_so(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(GREETING)
    assert not dealer.is_welcomed()
    daemon_end.sendall(WELCOME + frame(b"hello"))
    assert dealer.is_welcomed()
    assert dealer.receive() == b"hello"


def test_it_knows_whether_there_may_be_more(dealer: Dealer, daemon_end: socket.socket) -> None:
    """A read of its whole buffer may end just behind a message."""
    daemon_end.sendall(GREETING + WELCOME + frame(b"hello"))
    assert dealer.receive() == b"hello"
    assert dealer.unread
    daemon_end.sendall(frame(b"more"))
    assert dealer.receive() == b"more"
    assert dealer.receive() is None
    assert not dealer.unread


def test_garbage_is_refused(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
    with pytest.raises(BadRequest, match="no greeting of ZMTP"):
        dealer.receive()


def test_what_waits_gets_out_before_it_is_closed(dealer: Dealer, daemon_end: socket.socket) -> None:
    dealer.send(bytes(limits.MIB))
    assert dealer._sender.waiting
    with reading(daemon_end) as read:
        dealer.close(PATIENCE)
    assert bytes(read) == zmtp.hello(NAME) + frame(bytes(limits.MIB))


class Threads:
    """Whether threads can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = False
        start = Thread.start

        def try_to(thread: Thread) -> None:
            if not self.left:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(Thread, "start", try_to)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


@pytest.mark.parametrize("then", [lambda dealer: dealer.send(b"behind it"), lambda dealer: dealer.flush()])
def test_what_waits_for_a_thread_gets_out_once_one_can_be_started(
    dealer: Dealer, daemon_end: socket.socket, threads: Threads, then: Callable[[Dealer], object]
) -> None:
    messages = [bytes(300 * limits.KIB), b"behind it"]
    assert dealer.send(messages[0])
    assert dealer.unsent
    threads.left = True
    then(dealer)
    assert not dealer.unsent
    decoder, received = Decoder(limits.MAX_MESSAGE_BYTES), []
    while len(received) < 2:
        received += decoder.feed(daemon_end.recv(1 << 16))
    assert received[:2] == [Ready(NAME), messages[0]]


def test_one_that_was_full_without_a_thread_takes_more_once_there_is_one(
    dealer: Dealer, daemon_end: socket.socket, threads: Threads
) -> None:
    most = bytes(limits.MAX_MESSAGE_BYTES)
    while dealer.send(most):
        pass
    threads.left = True
    assert not dealer.send(most)
    while not dealer.send(b"more"):
        daemon_end.recv(1 << 20)


def test_what_waits_gets_out_before_it_is_closed_without_a_thread(
    dealer: Dealer, daemon_end: socket.socket, threads: Threads
) -> None:
    dealer.send(bytes(limits.MIB))
    threads.left = True
    with reading(daemon_end) as read:
        threads.left = False
        dealer.close(PATIENCE)
    assert bytes(read) == zmtp.hello(NAME) + frame(bytes(limits.MIB))


@contextmanager
def reading(daemon_end: socket.socket) -> Iterator[bytearray]:
    """What comes until the end."""
    read = bytearray()

    def read_all() -> None:
        while part := daemon_end.recv(1 << 16):
            read.extend(part)

    reader = Thread(target=read_all)
    reader.start()
    yield read
    reader.join()


def test_a_thread_that_fails_ends_the_connection(
    dealer: Dealer, daemon_end: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next message would be taken for the rest of the one that was cut."""

    def fail() -> None:
        raise OSError(errno.ENOBUFS, "no buffer space")

    monkeypatch.setattr(dealer._sender, "_send", fail)
    assert dealer.send(bytes(limits.MIB))  # before anybody reads: a reader that keeps up leaves nothing to a thread
    with reading(daemon_end):
        pass
    assert dealer.send(b"more")
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_forgotten_sends_what_waits_and_hangs_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        dealer = Dealer(bytes(tmp_path / "s"), NAME)
        os.unlink(tmp_path / "s")
        daemon_end, _ = listener.accept()
        with daemon_end:
            daemon_end.settimeout(PATIENCE)
            dealer.send(bytes(limits.MIB))
            del dealer
            read = b"".join(iter(lambda: daemon_end.recv(1 << 16), b""))
    assert read == zmtp.hello(NAME) + frame(bytes(limits.MIB))


LAST_WORDS = """
import atexit, sys
from kvd.client.dealer import Dealer

def end():
    dealer.send(b"last words")
    dealer.close(float(sys.argv[2]))

atexit.register(end)
dealer = Dealer(sys.argv[1].encode(), b"session-of-16-by")
dealer.send(bytes(1 << 20))
"""
"""An engine that registered what it does at its end before it attached."""


def test_what_is_sent_as_the_process_ends_gets_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        arguments = [sys.executable, "-c", LAST_WORDS, str(tmp_path / "s"), str(PATIENCE)]
        with subprocess.Popen(arguments):
            daemon_end, _ = listener.accept()
            with daemon_end:
                daemon_end.settimeout(PATIENCE)
                read = b"".join(iter(lambda: daemon_end.recv(1 << 16), b""))
    os.unlink(tmp_path / "s")
    assert read == zmtp.hello(NAME) + frame(bytes(limits.MIB)) + frame(b"last words")


@pytest.mark.parametrize("waits", ["", "for room", "for a thread"])
def test_the_end_of_a_fork_leaves_the_parents_connection_alone(
    dealer: Dealer, daemon_end: socket.socket, threads: Threads, waits: str
) -> None:
    threads.left = waits == "for room"
    if waits:
        assert dealer.send(bytes(limits.MIB))
    threads.left = True
    child = os.fork()
    if not child:
        dealer.close(PATIENCE)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert dealer.send(b"more")
    expected, read = zmtp.hello(NAME) + frame(bytes(limits.MIB)) * bool(waits) + frame(b"more"), b""
    while len(read) < len(expected):
        read += daemon_end.recv(1 << 16)
    assert read == expected


def test_one_that_does_not_read_delays_the_end_by_so_long_only(dealer: Dealer, daemon_end: socket.socket) -> None:
    dealer.send(bytes(limits.MIB))
    dealer.close(0.01)
    assert dealer.fileno() < 0
