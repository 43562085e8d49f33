"""The worker's end of the socket for requests, and bytes made by hand at the other."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from threading import Thread

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
        dealer = Dealer(f"{folder}/s", NAME)
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


def test_a_large_message_gets_out_as_the_daemon_reads(dealer: Dealer, daemon_end: socket.socket) -> None:
    message = bytes(range(256)) * 8192
    assert dealer.send(message)
    assert dealer.unsent
    decoder, received = Decoder(limits.MAX_MESSAGE_BYTES), []
    while len(received) < 2:
        received += decoder.feed(daemon_end.recv(1 << 16))
        dealer.flush()
    assert received == [Ready(NAME), message]
    assert not dealer.unsent


def test_so_much_waits_for_a_daemon_that_does_not_read(dealer: Dealer, daemon_end: socket.socket) -> None:
    most, sent = bytes(limits.MAX_MESSAGE_BYTES), 0
    while dealer.send(most):
        sent += len(most)
    assert MAX_UNSENT_BYTES <= sent < MAX_UNSENT_BYTES + 2 * len(most)
    daemon_end.close()
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()
    dealer.flush()
    assert not dealer.unsent


def test_a_heartbeat_is_answered(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(GREETING + WELCOME + command(b"\x04PING\x00\x00context") + frame(b"hello"))
    assert dealer.receive() == b"hello"
    sent = zmtp.hello(NAME) + command(b"\x04PONGcontext")
    assert daemon_end.recv(len(sent), socket.MSG_WAITALL) == sent


def test_what_came_before_the_end_is_received(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(GREETING + WELCOME + frame(b"last") + frame(b"words"))
    daemon_end.close()
    assert dealer.receive() == b"last"
    assert dealer.unread
    assert dealer.receive() == b"words"
    with pytest.raises(Unavailable, match="ended the connection for requests"):
        dealer.receive()


def test_garbage_is_refused(dealer: Dealer, daemon_end: socket.socket) -> None:
    daemon_end.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))
    with pytest.raises(BadRequest, match="no greeting of ZMTP"):
        dealer.receive()


def test_what_waits_gets_out_before_it_is_closed(dealer: Dealer, daemon_end: socket.socket) -> None:
    read: list[bytes] = []
    reader = Thread(target=lambda: read.extend(iter(lambda: daemon_end.recv(1 << 16), b"")))
    dealer.send(bytes(limits.MIB))
    assert dealer.unsent
    reader.start()
    dealer.close(PATIENCE)
    reader.join()
    assert b"".join(read) == zmtp.hello(NAME) + frame(bytes(limits.MIB))


def test_one_that_does_not_read_delays_the_end_by_so_long_only(dealer: Dealer, daemon_end: socket.socket) -> None:
    dealer.send(bytes(limits.MIB))
    dealer.close(0.01)
    assert dealer.fileno() < 0
