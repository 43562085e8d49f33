"""Peers of our own user: what is queued for them, and a DEALER with bytes made by hand at the other end."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.limits import RECONNECT_MAX_MS, SEND_MESSAGES
from kvd.net.local import connection, own_user
from kvd.net.local.connection import Inlet, Outbox
from kvd.net.local.own_user import DealerSocket, OwnUserPeers
from kvd.net.local.zmtp import GREETING, WELCOME, Decoder, command, header, hello
from kvd.net.trust import Reason, Rejection
from kvd.net.unix import Credentials
from tests.net.conftest import Inbox
from tests.support.descriptors import no_descriptors_left
from tests.support.patience import MOMENT

NAME = b"d#1#token"
HANDSHAKE = GREETING + WELCOME


def frame(message: bytes) -> bytes:
    return header(len(message)) + message


class Kernel:
    """The sending side of a connection that takes so many bytes a call; it is gone where no number is left."""

    def __init__(self, takes: list[int]) -> None:
        self.taken = bytearray()
        self._takes = takes

    def sendmsg(self, buffers: list[bytes | memoryview]) -> int:
        if not self._takes:
            raise BrokenPipeError
        size = self._takes.pop(0)
        if not size:
            raise BlockingIOError
        data = b"".join(buffers)[:size]
        self.taken += data
        return len(data)


class TestOutbox:
    @given(
        st.lists(st.one_of(st.binary(max_size=60), st.integers(4000, 9000).map(bytes)), max_size=100),
        st.lists(st.lists(st.integers(0, 12_000), max_size=8), max_size=4),
    )
    def test_each_connection_gets_whole_frames_in_order_and_only_what_the_kernel_had_a_part_of_is_lost(
        self, messages: list[bytes], connections: list[list[int]]
    ) -> None:
        outbox = Outbox(1 << 30)
        for message in messages:
            assert outbox.put(header(len(message)), message)
        sent = list(messages)
        for takes in [*connections, [1 << 30] * len(messages)]:
            kernel, done = Kernel(list(takes)), False
            with contextlib.suppress(BrokenPipeError):
                while not done:
                    done = outbox.flush(cast(socket.socket, kernel))
            outbox.drop_begun()
            decoder = Decoder(1 << 20, of_router=True)
            received = decoder.feed(HANDSHAKE + kernel.taken)[1:]
            assert received == sent[: len(received)]
            del sent[: len(received) + bool(decoder.unfinished)]
        assert done
        assert sent == []

    def test_what_waits_has_a_bound_and_room_comes_back(self) -> None:
        outbox = Outbox(100)
        assert outbox.put(b"h", bytes(99))
        assert not outbox.put(b"h")
        assert not outbox.flush(cast(socket.socket, Kernel([99])))
        assert not outbox.put(b"h")
        assert outbox.flush(cast(socket.socket, Kernel([1])))
        assert outbox.put(b"h")

    def test_so_many_frames_wait_however_small_they_are(self) -> None:
        outbox = Outbox(1 << 30, 2)
        assert outbox.put(b"h")
        assert outbox.put(b"h")
        assert not outbox.put(b"h")


class Other:
    """Who listens where the DEALER connects."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.inbox, self.rejected = Inbox(), list[Rejection]()
        self.listener: socket.socket | None = None
        self.listen()
        self.dealer = DealerSocket(path, NAME, self.inbox, Inlet(), self.rejected.append)

    def listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.setblocking(False)
        self.listener.bind(self.path)
        self.listener.listen()

    async def accept(self, says: bytes = HANDSHAKE) -> socket.socket:
        assert self.listener is not None
        async with asyncio.timeout(MOMENT):
            accepted, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        accepted.setblocking(False)
        if says:
            await asyncio.get_running_loop().sock_sendall(accepted, says)
        return accepted

    def deaf(self) -> None:
        assert self.listener is not None
        self.listener.close()


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[Other]:
    made = Other(str(tmp_path / "o"))
    yield made
    made.dealer.close()
    made.deaf()
    os.unlink(made.path)


async def read(accepted: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or those until the end."""
    data = b""
    async with asyncio.timeout(MOMENT):
        while len(data) < size and (part := await asyncio.get_running_loop().sock_recv(accepted, size - len(data))):
            data += part
    return data


async def test_what_was_sent_before_anybody_answers_comes_first_and_behind_the_handshake(other: Other) -> None:
    assert other.dealer.send(b"one")
    with await other.accept(b"") as accepted:
        assert await read(accepted, len(hello(NAME))) == hello(NAME)
        assert other.dealer.send(b"two")
        with pytest.raises(BlockingIOError):  # it may be one that hangs up on whom it does not know
            accepted.recv(1)
        await asyncio.get_running_loop().sock_sendall(accepted, HANDSHAKE)
        expected = frame(b"one") + frame(b"two")
        assert await read(accepted, len(expected)) == expected
        assert other.dealer.send(b"three")
        assert await read(accepted, 7) == frame(b"three")


async def test_what_the_last_connection_took_no_part_of_goes_to_the_next_one(other: Other) -> None:
    large = bytes(range(256)) * 16384
    with await other.accept() as accepted:
        assert other.dealer.send(large)
        assert other.dealer.send(b"behind it")
        expected = hello(NAME) + frame(large)
        assert await read(accepted, 100_000) == expected[:100_000]
    with await other.accept() as accepted:
        expected = hello(NAME) + frame(b"behind it")
        assert await read(accepted, len(expected)) == expected


async def test_a_message_that_the_other_end_refuses_costs_one_connection(
    listening: tuple[OwnUserPeers, Inbox], tmp_path: Path
) -> None:
    _, inbox = listening
    link = OwnUserPeers(lambda _rejection: None)
    link.connect(1, str(tmp_path / "o"), NAME, lambda _message: None)
    for message in (b"before", bytes(limits.MAX_PEER_REQUEST_BYTES + 1), b"behind"):
        assert link.ask(1, message)
    assert [await inbox.next(tuple) for _ in range(3)] == [(NAME, b"before"), (NAME, b""), (NAME, b"behind")]
    link.close()


async def test_it_comes_again_and_again_until_somebody_listens(other: Other) -> None:
    (await other.accept()).close()
    (await other.accept(b"")).close()
    other.deaf()
    tries = count_calls(other, "_connect")
    async with asyncio.timeout(MOMENT):
        while len(tries) < 3:  # noqa: ASYNC110 - on which attempt it is tells nobody
            await asyncio.sleep(0)
    other.listen()
    with await other.accept() as accepted:
        assert await read(accepted, len(hello(NAME))) == hello(NAME)


def count_calls(other: Other, name: str) -> list[None]:
    calls = list[None]()
    before = getattr(other.dealer, name)
    setattr(other.dealer, name, lambda: (calls.append(None), before()))
    return calls


@pytest.mark.parametrize("said", [b"", HANDSHAKE], ids=["silent", "welcomes"])
async def test_the_pause_doubles_up_to_a_bound_until_a_connection_has_lasted(other: Other, said: bytes) -> None:
    async def pause() -> int:
        while other.dealer._connection is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return other.dealer._pause_ms

    pauses = list[int]()
    for _ in range(7):
        with await other.accept(said):
            while said and other.dealer.welcomed is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        pauses.append(await pause())
    assert pauses == [20, 40, 80, 160, 320, 500, 500]
    with await other.accept() as accepted:
        assert other.dealer.send(b"x")
        assert await read(accepted, len(hello(NAME)) + 3) == hello(NAME) + frame(b"x")
        await asyncio.sleep(RECONNECT_MAX_MS / 1000 + 0.1)  # clocks of loops count milliseconds
    assert await pause() == 20


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n".ljust(64), GREETING + frame(b"early")])
async def test_who_speaks_no_zmtp_is_hung_up_on_and_the_next_one_is_heard(other: Other, said: bytes) -> None:
    with await other.accept(said) as accepted:
        assert await read(accepted, 1000) == hello(NAME)  # and no more
    with await other.accept(HANDSHAKE + frame(b"good")):
        assert await other.inbox.next(bytes) == b"good"


@pytest.mark.parametrize(
    "said", [b"\x01", command(b"\x04PING\x00\x07"), b"\x02" + (limits.MAX_MESSAGE_BYTES + 1).to_bytes(8, "big")]
)
async def test_what_is_no_message_ends_the_connection_and_is_told_and_the_next_one_is_heard(
    other: Other, said: bytes
) -> None:
    with await other.accept(HANDSHAKE + frame(b"good")) as accepted:
        assert await other.inbox.next(bytes) == b"good"
        await asyncio.get_running_loop().sock_sendall(accepted, said)
        assert await other.inbox.next(bytes) == b""
        assert await read(accepted, 1000) == hello(NAME)  # and no more
    with await other.accept(HANDSHAKE + frame(b"again")):
        assert await other.inbox.next(bytes) == b"again"


async def test_who_says_nothing_is_left_for_another_try(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    (await other.accept(b"")).close()
    monkeypatch.setattr(connection, "HANDSHAKE_MS", 50)  # from the next connection on
    with await other.accept(GREETING) as accepted:
        assert await read(accepted, 1000) == hello(NAME)
    with await other.accept(HANDSHAKE + frame(b"here")):
        assert await other.inbox.next(bytes) == b"here"


async def test_nothing_is_said_to_another_users_socket_nor_heard_from_it(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await other.accept()).close()
    monkeypatch.setattr(own_user, "credentials", lambda _: Credentials(1, os.geteuid() + 1, 1))
    other.dealer.send(b"secret")
    with await other.accept(b"") as accepted, contextlib.suppress(ConnectionResetError):
        with contextlib.suppress(BrokenPipeError):
            await asyncio.get_running_loop().sock_sendall(accepted, HANDSHAKE + frame(b"hostile"))
        assert await read(accepted, 1000) == b""
    monkeypatch.undo()
    assert set(other.rejected) == {Rejection(Reason.OTHER_USER, address=f"user {os.geteuid() + 1}")}
    assert other.inbox.events == []


async def test_who_closes_it_in_an_answer_hears_no_more_and_leaves_no_timer(other: Other) -> None:
    def close(_message: bytes) -> None:
        other.dealer.close()
        closed.set()

    closed = asyncio.Event()
    other.dealer._on_message = close
    with await other.accept(HANDSHAKE + 3 * frame(b"x")) as accepted:
        async with asyncio.timeout(MOMENT):
            await closed.wait()
        assert await read(accepted, 1000) == hello(NAME)
    await asyncio.sleep(0)
    assert other.inbox.events == []
    assert other.dealer._again is None


async def test_too_many_for_one_that_reads_nothing_are_refused(other: Other) -> None:
    for _ in range(SEND_MESSAGES):
        assert other.dealer.send(b"small")
    assert not other.dealer.send(b"small")


async def test_too_much_for_one_that_reads_nothing_is_refused(other: Other) -> None:
    message = bytes(limits.MIB)
    sent = 0
    while other.dealer.send(message):
        sent += 1
    assert sent == limits.MAX_UNSENT_BYTES_PER_PEER // limits.MIB
    with await other.accept() as accepted:
        await read(accepted, 2 * limits.MIB)
        assert other.dealer.send(message)


async def test_libzmqs_router_is_talked_to(other: Other) -> None:
    other.deaf()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{other.path}")
        for number in range(100):
            message = bytes([number]) * number * 1000
            assert other.dealer.send(message)
            assert await asyncio.to_thread(router.recv_multipart) == [NAME, message]
            router.send_multipart([NAME, message[::-1]])
            assert await other.inbox.next(bytes) == message[::-1]


@pytest.fixture
async def listening(tmp_path: Path) -> AsyncIterator[tuple[OwnUserPeers, Inbox]]:
    inbox, port = Inbox(), OwnUserPeers(lambda _rejection: None)
    port.listen(str(tmp_path / "o"), lambda sender, _uid, frame: inbox((sender, frame)))
    yield port, inbox
    port.close()
    os.unlink(tmp_path / "o")


async def test_welcomes_that_nobody_reads_lie_in_memory_once(
    listening: tuple[OwnUserPeers, Inbox], tmp_path: Path
) -> None:
    port, inbox = listening
    welcome = os.urandom(2 * limits.MIB)
    with contextlib.ExitStack() as stack:
        names = [b"peer/%d" % number for number in range(20)]
        for name in names:
            connected = stack.enter_context(socket.socket(socket.AF_UNIX))
            connected.connect(str(tmp_path / "o"))
            connected.sendall(hello(name) + frame(b"hello"))
        for _ in names:
            await inbox.next(tuple)
        before = resident_bytes()
        for name in names * 20:
            assert port.answer(name, bytes(bytearray(welcome)))
        assert resident_bytes() - before < 64 * limits.MIB


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def test_an_end_without_descriptors_is_one(listening: tuple[OwnUserPeers, Inbox], tmp_path: Path) -> None:
    port, inbox = listening
    link = OwnUserPeers(lambda _rejection: None)
    link.connect(1, str(tmp_path / "o"), NAME, lambda _message: None)
    link.ask(1, b"first")
    assert await inbox.next(tuple)
    link.ask(1, bytes(limits.MAX_PEER_REQUEST_BYTES))
    with no_descriptors_left():
        link.close()
        port.close()


async def test_one_that_is_reached_by_another_name_is_not_spoken_to(
    listening: tuple[OwnUserPeers, Inbox], tmp_path: Path
) -> None:
    _, inbox = listening
    link = OwnUserPeers(lambda _rejection: None)
    os.link(tmp_path / "o", tmp_path / "alias")
    link.connect(1, str(tmp_path / "alias"), NAME, lambda _message: None)
    link.connect(2, str(tmp_path / "o"), NAME, lambda _message: None)
    assert link.ask(1, b"by another name")
    assert link.ask(2, b"by its own")
    assert await inbox.next(tuple) == (NAME, b"by its own")
    assert link._dealers[1].welcomed is None
    link.close()
    os.unlink(tmp_path / "alias")


async def test_one_whose_user_has_too_much_to_be_closed_is_tried_later(
    listening: tuple[OwnUserPeers, Inbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inbox = listening
    link = OwnUserPeers(lambda _rejection: None)
    with monkeypatch.context() as patched:
        patched.setattr(limits, "MAX_CLOSING_PER_USER", 0)
        link.connect(1, str(tmp_path / "o"), NAME, lambda _message: None)
        assert link._dealers[1]._connection is None
    assert link.ask(1, b"later")
    assert await inbox.next(tuple) == (NAME, b"later")
    link.close()


async def test_a_routing_id_in_use_is_its_owners_until_that_has_gone(
    listening: tuple[OwnUserPeers, Inbox], tmp_path: Path
) -> None:
    _, inbox = listening
    links = [OwnUserPeers(lambda _rejection: None) for _ in range(2)]
    for link in links:
        link.connect(1, str(tmp_path / "o"), NAME, lambda _message: None)
    links[0].ask(1, b"first")
    assert await inbox.next(tuple) == (NAME, b"first")
    links[1].ask(1, b"second")
    links[0].ask(1, b"third")
    assert await inbox.next(tuple) == (NAME, b"third")
    links[0].close()
    assert await inbox.next(tuple) == (NAME, b"second")
    links[1].close()
