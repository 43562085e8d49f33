"""The daemon's end of ZMTP: the decoder alone, then the router with connections made by hand."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import WorkerFrame
from kvd.net.local import connection, zmtp
from kvd.net.local.reader import FRAMES_PER_TURN
from kvd.net.local.zmtp import GREETING, Decoder, Ping, Ready, Received, command, header
from kvd.net.unix import Credentials
from kvd.net.workers import WorkerSockets
from tests.fuzz.zmtp import frame, ready
from tests.net.conftest import Inbox
from tests.support.patience import MOMENT

BOUND = 1000
SESSION = b"session-of-16-by"
HANDSHAKE = GREETING + ready(SESSION)


def decode(pieces: list[bytes]) -> list[Received]:
    decoder = Decoder(BOUND)
    return [received for piece in pieces for received in decoder.feed(piece)]


def refusal(data: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode([data])
    return caught.value


received = st.one_of(
    st.binary(max_size=BOUND).map(lambda body: (header(len(body)) + body, body)),
    st.binary(max_size=BOUND).map(lambda body: (frame(body), body)),
    st.binary(max_size=16).map(lambda context: (command(b"\x04PING\x00\x07" + context), Ping(context))),
)


class TestDecoder:
    @given(st.lists(received, max_size=20), st.lists(st.integers(0, 10_000)), st.binary(min_size=1, max_size=255))
    def test_every_split_of_the_bytes_gives_the_same_frames(
        self, frames: list[tuple[bytes, Received]], cuts: list[int], routing_id: bytes
    ) -> None:
        data = GREETING + ready(routing_id) + b"".join(sent for sent, _ in frames)
        ends = [*sorted(cut % len(data) for cut in cuts), len(data)]
        pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert decode(pieces) == [Ready(routing_id), *(content for _, content in frames)]

    @given(st.sampled_from([b"", GREETING, HANDSHAKE]), st.lists(st.binary(max_size=300)))
    def test_garbage_is_accepted_or_raises_the_one_error(self, before: bytes, garbage: list[bytes]) -> None:
        with contextlib.suppress(BadRequest):
            decode([before, *garbage])

    @given(st.integers(0, len(HANDSHAKE) - 1), st.integers(0, 255))
    def test_a_handshake_with_a_wrong_byte_is_accepted_or_raises_the_one_error(self, at: int, byte: int) -> None:
        with contextlib.suppress(BadRequest):
            decode([HANDSHAKE[:at] + bytes([byte]) + HANDSHAKE[at + 1 :]])

    @pytest.mark.parametrize(
        ("data", "code", "text"),
        [
            (b"GET / HTTP/1.1\r\n".ljust(64), "bad_message", "no greeting of ZMTP 3.x without security"),
            (GREETING.replace(b"NULL\0", b"CURVE"), "bad_message", "no greeting of ZMTP 3.x without security"),
            (GREETING + frame(b"early"), "bad_message", "where READY is due"),
            (GREETING + command(b"\x05ERROR\x00"), "bad_message", "where READY is due"),
            (GREETING + command(b"\x05READY"), "bad_message", "no routing id"),
            (GREETING + ready(b""), "bad_message", "no routing id"),
            (GREETING + command(b"\x05READY\x08Identity\x00\x00\x00\x09x"), "bad_message", "exceeds READY"),
            (GREETING + command(b"\x05READY\xffx"), "bad_message", "exceeds READY"),
            (GREETING + ready(bytes(256)), "too_large", "a routing id of 256 bytes, the bound is 255"),
            (GREETING + ready(bytes(2000))[:9], "too_large", "the bound is 1024"),
            (HANDSHAKE + frame(b"x", more=True)[:1], "bad_message", "a message in several parts"),
            (HANDSHAKE + b"\x48", "bad_message", "a frame with flags 0x48"),
            (HANDSHAKE + frame(b"", declared=BOUND + 1), "too_large", "announces 1001 bytes, the bound is 1000"),
            (HANDSHAKE + frame(b"", declared=2**64 - 1), "too_large", "the bound is 1000"),
            (HANDSHAKE + command(b"\x04PING\x00"), "bad_message", "where a message or PING is due"),
            (HANDSHAKE + command(b"\x09SUBSCRIBE"), "bad_message", "where a message or PING is due"),
        ],
    )
    def test_what_is_wrong_is_said(self, data: bytes, code: str, text: str) -> None:
        error = refusal(data)
        assert (error.code, bool(re.search(re.escape(text), error.text))) == (ErrorCode(code), True), error.text


class Daemon:
    def __init__(self, folder: Path) -> None:
        self.inbox = Inbox()
        self.port = WorkerSockets(str(folder / "kvd.sock"))
        self.port.start(self.inbox)

    async def connect(self, sent: bytes = HANDSHAKE) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        made.connect(self.port.endpoint.removeprefix("ipc://"))
        await asyncio.get_running_loop().sock_sendall(made, sent)
        return made


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.port.close()


async def read(made: socket.socket, size: int) -> bytes:
    """The next `size` bytes; fewer where the daemon hung up."""
    data, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(MOMENT):
        with contextlib.suppress(ConnectionResetError):
            while len(data) < size and (more := await loop.sock_recv(made, size - len(data))):
                data += more
    return data


async def welcomed(made: socket.socket) -> bool:
    expected = GREETING + zmtp.WELCOME
    return await read(made, len(expected)) == expected


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_endless_parts_cost_their_sender_the_connection_and_no_memory(daemon: Daemon) -> None:
    part = frame(bytes(limits.MIB), more=True)
    with await daemon.connect() as greedy:
        await read(greedy, len(GREETING + zmtp.WELCOME))
        before, sent = resident(), 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 100:
                await asyncio.get_running_loop().sock_sendall(greedy, part)
                sent += 1
        assert resident() - before < 8 * limits.MIB
        assert sent < 100


@pytest.mark.parametrize("size", [256, 8 * limits.MIB])
async def test_a_routing_id_above_its_bound_is_hung_up_on_before_it_is_kept(daemon: Daemon, size: int) -> None:
    with await daemon.connect(GREETING) as greedy:
        said = ready(b"x" * size)
        before = resident()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.get_running_loop().sock_sendall(greedy, said)
        assert len(await read(greedy, 1000)) <= len(GREETING)
        assert resident() - before < 4 * limits.MIB


async def test_a_message_is_taken_to_its_bound_and_not_a_byte_beyond(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    with await daemon.connect() as made:
        most = os.urandom(limits.MAX_MESSAGE_BYTES)
        await loop.sock_sendall(made, frame(most))
        assert (await daemon.inbox.next(WorkerFrame)).frame == most
        await loop.sock_sendall(made, frame(b"", declared=limits.MAX_MESSAGE_BYTES + 1))
        assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(SESSION, b"", os.getuid())
        assert await welcomed(made)
        assert await read(made, 1) == b""
    assert not daemon.port.send(SESSION, b"too late")


async def test_a_handshake_that_takes_too_long_is_ended(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with await daemon.connect() as quick:
        assert await welcomed(quick)
        monkeypatch.setattr(connection, "HANDSHAKE_MS", 50)  # from the next connection on
        with await daemon.connect(HANDSHAKE[:-1]) as slow:
            assert await read(slow, 1000) == GREETING
        [kept] = daemon.port._requests.connections
        assert kept._deadline.cancelled()
        await asyncio.get_running_loop().sock_sendall(quick, frame(b"still here"))
        assert (await daemon.inbox.next(WorkerFrame)).frame == b"still here"


async def test_thousands_of_frames_that_come_at_once_are_decoded_as_others_have_their_turns(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, decode = list[None](), Decoder.next

    def count(decoder: Decoder) -> Received | None:
        decoded.append(None)
        return decode(decoder)

    with await daemon.connect() as flooding, await daemon.connect(GREETING + ready(b"quiet")) as quiet:
        assert await welcomed(flooding)
        assert await welcomed(quiet)
        monkeypatch.setattr(Decoder, "next", count)
        flooding.sendall(4000 * frame(b""))
        quiet.sendall(frame(b"heard"))
        most = 0
        while len(daemon.inbox.events) < 4001:
            before = len(decoded)
            await asyncio.sleep(0)
            most = max(most, len(decoded) - before)
        assert most <= 2 * (FRAMES_PER_TURN + 1)
        assert [event.session for event in daemon.inbox.events].index(b"quiet") < 100


async def test_what_comes_before_garbage_is_heard(daemon: Daemon) -> None:
    with await daemon.connect(HANDSHAKE + frame(b"good") + b"\x01"):
        for expected in (b"good", b""):
            assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(SESSION, expected, os.getuid())


async def test_who_may_not_attach_makes_no_requests(tmp_path: Path) -> None:
    inbox, port = Inbox(), WorkerSockets(str(tmp_path / "kvd.sock"), may_pass=lambda _uid, _gid: False)
    port.start(inbox)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        stranger.connect(port.endpoint.removeprefix("ipc://"))
        with contextlib.suppress(ConnectionResetError):
            assert await read(stranger, 1) == b""
    assert inbox.events == []
    port.close()


async def test_unfinished_frames_of_a_user_have_a_bound_together_and_finished_ones_make_room(daemon: Daemon) -> None:
    loop, most = asyncio.get_running_loop(), limits.MAX_MESSAGE_BYTES - limits.KIB
    part = frame(bytes(most - 1), declared=most)
    with contextlib.ExitStack() as stack:
        names = [bytes([number]) * 16 for number in range(limits.MAX_UNFINISHED_BYTES_PER_USER // most)]
        held = [stack.enter_context(await daemon.connect(GREETING + ready(name))) for name in names]
        for each in held:
            await loop.sock_sendall(each, part)
        while daemon.port._unfinished_requests[os.getuid()] < len(held) * len(part):  # noqa: ASYNC110
            await asyncio.sleep(0)
        extra = stack.enter_context(await daemon.connect(GREETING + ready(b"extra")))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await loop.sock_sendall(extra, part)
        assert (await daemon.inbox.next(WorkerFrame)).session == b"extra"
        await read(extra, limits.MIB)  # to the end: it is hung up on
        await loop.sock_sendall(held[0], b".")
        assert len((await daemon.inbox.next(WorkerFrame)).frame) == most
        again = stack.enter_context(await daemon.connect(GREETING + ready(b"again") + frame(bytes(limits.MIB))))
        assert len((await daemon.inbox.next(WorkerFrame)).frame) == limits.MIB
        again.close()
    for left in tuple(daemon.port._requests.connections):
        left.close()
    assert not daemon.port._unfinished_requests


async def test_all_strangers_together_have_a_bound_on_unfinished_frames_however_many_users_they_are(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([7, 8, 9, os.geteuid()])
    monkeypatch.setattr("kvd.net.workers.credentials", lambda _: Credentials(1, next(users), 1))
    monkeypatch.setattr(limits, "MAX_UNFINISHED_BYTES_OF_STRANGERS", 2 * limits.MIB + 1000)
    loop, part = asyncio.get_running_loop(), frame(bytes(limits.MIB), declared=2 * limits.MIB)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(await daemon.connect(GREETING + ready(bytes([n]) * 16))) for n in range(4)]
        for each in (made[0], made[1], made[3]):
            await loop.sock_sendall(each, part)
        while daemon.port._unfinished_requests.total() < 3 * len(part):  # noqa: ASYNC110
            await asyncio.sleep(0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await loop.sock_sendall(made[2], part)
        assert (await daemon.inbox.next(WorkerFrame)).session == bytes([2]) * 16


async def test_heartbeats_whose_answers_are_not_read_take_some_kilobytes_before_the_connection_ends(
    daemon: Daemon,
) -> None:
    loop, ping = asyncio.get_running_loop(), command(b"\x04PING\x00\x00" + bytes(1000))
    with await daemon.connect() as made:
        assert await welcomed(made)
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < limits.MAX_MESSAGE_BYTES:
                await loop.sock_sendall(made, 15 * ping)
                sent += 15 * len(ping)
        assert sent < limits.MIB


async def test_heartbeats_are_answered_until_their_sender_stops_reading(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    with await daemon.connect() as made:
        assert await welcomed(made)
        await loop.sock_sendall(made, command(b"\x04PING\x00\x00context"))
        pong = command(b"\x04PONGcontext")
        assert await read(made, len(pong)) == pong
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                await loop.sock_sendall(made, 1000 * command(b"\x04PING\x00\x00context"))


async def test_libzmqs_heartbeats_keep_a_connection(daemon: Daemon) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 10)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * MOMENT))
        dealer.setsockopt(zmq.ROUTING_ID, SESSION)
        events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(daemon.port.endpoint)
        dealer.send(b"offer")
        assert (await daemon.inbox.next(WorkerFrame)).frame == b"offer"
        loop = asyncio.get_running_loop()
        assert not await loop.run_in_executor(None, events.poll, 300)
        assert daemon.port.send(SESSION, b"answer")
        assert await loop.run_in_executor(None, dealer.poll, int(1000 * MOMENT))
        dealer.disable_monitor()
        events.close()
        await loop.shutdown_default_executor()


async def test_a_routing_id_in_use_is_refused_until_its_owner_has_gone(daemon: Daemon) -> None:
    with await daemon.connect() as owner:
        assert await welcomed(owner)
        with await daemon.connect(HANDSHAKE + frame(b"stolen")) as thief:
            assert await read(thief, 1000) == GREETING
        assert daemon.port.send(SESSION, b"for the owner")
        assert await read(owner, 15) == header(13) + b"for the owner"
    assert daemon.inbox.events == []
    with await daemon.connect() as successor:
        assert await welcomed(successor)


async def test_connections_beyond_the_bound_are_hung_up_on(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.net.workers.MAX_CONNECTIONS", 1)
    with await daemon.connect(GREETING) as first:
        assert await read(first, len(GREETING)) == GREETING
        with contextlib.suppress(BrokenPipeError), await daemon.connect() as second:
            assert await read(second, 1000) == b""


async def test_other_users_leave_room_for_each_other_and_for_ours(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([7, 7, 8, 9, os.geteuid()])
    monkeypatch.setattr("kvd.net.workers.credentials", lambda _: Credentials(1, next(users), 1))
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_USER", 1)
    monkeypatch.setattr(limits, "MAX_STRANGERS", 2)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(await daemon.connect(b"")) for _ in range(5)]
        assert [len(await read(each, len(GREETING))) > 0 for each in made] == [True, False, True, False, True]


async def test_closing_delivers_what_is_read_and_waits_for_a_dead_reader_no_longer_than_the_linger_time(
    daemon: Daemon,
) -> None:
    words = bytes(3 * limits.MIB)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(await daemon.connect())
        dead = stack.enter_context(await daemon.connect(GREETING + ready(b"dead")))
        assert await welcomed(reader)
        assert await welcomed(dead)
        assert daemon.port.send(SESSION, words)
        assert daemon.port.send(b"dead", words)
        loop = asyncio.get_running_loop()
        reader.settimeout(MOMENT)
        stream = stack.enter_context(reader.makefile("rb"))
        heard = loop.run_in_executor(None, stream.read, 9 + len(words))
        begin = loop.time()
        daemon.port.close()
        assert 0.1 < loop.time() - begin < MOMENT
        assert await heard == header(len(words)) + words
        await loop.shutdown_default_executor()
