import asyncio
import errno
import fcntl
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from kvd import limits
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.net.interface import OPEN, Intake, SessionClosed, SessionFrame, SessionOpened, WorkerFrame
from kvd.net.local.listener import MAX_CONNECTIONS
from kvd.net.local.reader import FRAMES_PER_TURN
from kvd.net.lock import Lock, PathLock
from kvd.net.stream import HEADER, MAX_DESCRIPTORS, FrameStream, pack
from kvd.net.workers import WorkerSockets
from kvd.protocol.codec import session_replies
from tests.net.conftest import Inbox
from tests.support.patience import MOMENT


class Daemon:
    def __init__(self, path: Path, intake: Intake = OPEN) -> None:
        self.path = str(path / "kvd.sock")
        self.inbox = Inbox()
        self.port = WorkerSockets(self.path)
        self.port.start(self.inbox, intake)

    async def session(self) -> tuple[socket.socket, int]:
        """A connected worker's socket, and the daemon's number of it."""
        worker = socket.socket(socket.AF_UNIX)
        worker.connect(self.path)
        opened = await self.inbox.next(SessionOpened)
        return worker, opened.connection


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.port.close()


async def read_frame(worker: socket.socket) -> tuple[bytes, list[int]]:
    def read() -> tuple[bytes, list[int]]:
        worker.settimeout(MOMENT)
        data, descriptors, _, _ = socket.recv_fds(worker, 1 << 20, 4)
        while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
            data += worker.recv(1 << 20)
        return data[HEADER.size :], list(descriptors)

    return await asyncio.get_running_loop().run_in_executor(None, read)


def drained(worker: socket.socket) -> bool:
    """Reads until the daemon has hung up."""
    worker.settimeout(MOMENT)
    while worker.recv(1 << 20):
        pass
    return True


@pytest.fixture(autouse=True)
async def _executor() -> AsyncIterator[None]:
    yield
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_kernel_says_who_opened_a_session(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(daemon.path)
        opened = await daemon.inbox.next(SessionOpened)
        assert (opened.pid, opened.uid, opened.gid) == (os.getpid(), os.getuid(), os.getgid())


async def test_the_sockets_are_for_their_owner_only_and_go_with_the_daemon(daemon: Daemon) -> None:
    for path in (daemon.path, daemon.path + ".zmq"):
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    daemon.port.close()
    assert os.listdir(os.path.dirname(daemon.path)) == []


async def test_frames_and_descriptors_travel_both_ways(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        ours, theirs = os.pipe()
        socket.send_fds(worker, [pack(b"attach")], [theirs])
        frame = await daemon.inbox.next(SessionFrame)
        assert (frame.connection, frame.frame, len(frame.descriptors)) == (connection, b"attach", 1)
        assert not os.get_inheritable(frame.descriptors[0])
        os.write(frame.descriptors[0], b"through the pipe")
        assert os.read(ours, 100) == b"through the pipe"
        daemon.port.send_session(connection, b"attached", (ours,))
        content, descriptors = await read_frame(worker)
        assert content == b"attached"
        assert os.fstat(ours).st_ino == os.fstat(descriptors[0]).st_ino
        (process,) = descriptors[1:]
        about = Path(f"/proc/self/fdinfo/{process}").read_text()  # noqa: ASYNC240 - /proc does not block
        assert f"Pid:\t{os.getpid()}\n" in about
        for descriptor in (ours, theirs, *frame.descriptors, *descriptors):
            os.close(descriptor)


async def test_frames_sent_in_one_go_arrive_one_by_one(daemon: Daemon) -> None:
    worker, _ = await daemon.session()
    with worker:
        worker.sendall(pack(b"one") + pack(b"two") + pack(b"")[:3])
        assert (await daemon.inbox.next(SessionFrame)).frame == b"one"
        assert (await daemon.inbox.next(SessionFrame)).frame == b"two"
        worker.sendall(pack(b"")[3:])
        assert (await daemon.inbox.next(SessionFrame)).frame == b""


async def test_a_worker_that_goes_away_is_noticed(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    worker.close()
    assert await daemon.inbox.next(SessionClosed) == SessionClosed(connection)
    daemon.port.send_session(connection, b"too late")
    daemon.port.close_session(connection)


async def test_a_frame_larger_than_the_kernels_buffer_arrives_whole(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        large = os.urandom(3 * limits.MIB)
        daemon.port.send_session(connection, large)
        daemon.port.close_session(connection)
        assert (await read_frame(worker))[0] == large
        assert await asyncio.get_running_loop().run_in_executor(None, worker.recv, 1) == b""
    assert daemon.inbox.events == []


async def test_a_frame_larger_than_any_session_request_is_refused_by_its_length(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        worker.sendall(HEADER.pack(limits.MAX_SESSION_FRAME_BYTES + 1))
        closed = await daemon.inbox.next(SessionClosed)
        assert (closed.connection, closed.error and closed.error.code) == (connection, ErrorCode.TOO_LARGE)


async def test_unfinished_frames_of_one_user_have_a_bound_together_and_finished_ones_make_room(daemon: Daemon) -> None:
    size = limits.MAX_SPEC_BYTES - HEADER.size
    part = HEADER.pack(size) + bytes(size - 1)
    sessions = [await daemon.session() for _ in range(limits.MAX_UNFINISHED_BYTES_PER_USER // limits.MAX_SPEC_BYTES)]
    (first, number), (last, _) = sessions[0], sessions[-1]
    loop = asyncio.get_running_loop()
    try:
        for worker, _ in sessions[:-1]:
            await loop.run_in_executor(None, worker.sendall, part)
        await loop.run_in_executor(None, first.sendall, b"." + part)
        assert (await daemon.inbox.next(SessionFrame)).connection == number
        await loop.run_in_executor(None, last.sendall, part)
        while daemon.port._unfinished[os.getuid()] < len(sessions) * len(part):  # noqa: ASYNC110
            await asyncio.sleep(0)
        extra, refused = await daemon.session()
        with extra:
            extra.sendall(part[: limits.MIB // 8])
            closed = await daemon.inbox.next(SessionClosed)
        assert (closed.connection, closed.error and closed.error.code) == (refused, ErrorCode.OVERLOADED)
        last.sendall(b".")
        assert len((await daemon.inbox.next(SessionFrame)).frame) == size
    finally:
        for worker, _ in sessions:
            worker.close()


async def test_what_was_sent_before_hanging_up_is_read(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        worker.sendall(b"\x05\x00")
        daemon.port.send_session(connection, b"refused")
        daemon.port.close_session(connection)
        assert (await read_frame(worker))[0] == b"refused"


async def test_a_worker_that_never_reads_loses_its_session(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        for _ in range(4):
            daemon.port.send_session(connection, bytes(limits.MAX_MESSAGE_BYTES))
        assert await daemon.inbox.next(SessionClosed) == SessionClosed(connection)


async def test_a_worker_that_does_not_read_its_answers_is_not_heard_until_it_does(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        answer = bytes(3 * limits.MIB)
        daemon.port.send_session(connection, answer)
        worker.sendall(pack(b"one more"))
        other, _ = await daemon.session()
        with other:
            other.sendall(pack(b"mine"))
            assert (await daemon.inbox.next(SessionFrame)).frame == b"mine"
            assert not [event for event in daemon.inbox.events if isinstance(event, SessionFrame)]
            assert (await read_frame(worker))[0] == answer
            assert (await daemon.inbox.next(SessionFrame)).frame == b"one more"


async def test_a_worker_that_goes_away_with_answers_unread_is_noticed(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        daemon.port.send_session(connection, bytes(limits.MIB))
        worker.sendall(pack(b"one more"))
        other, _ = await daemon.session()
        other.close()
        await daemon.inbox.next(SessionClosed)
    assert await daemon.inbox.next(SessionClosed) == SessionClosed(connection)


async def test_a_frame_longer_than_any_attach_is_refused_before_it_has_come(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        worker.sendall(HEADER.pack(limits.MAX_SESSION_FRAME_BYTES + 1))
        closed = await daemon.inbox.next(SessionClosed)
        assert (closed.connection, closed.error.code) == (connection, ErrorCode.TOO_LARGE)


async def test_the_lock_is_never_taken_through_somebody_elses_link_file_or_folder(tmp_path: Path) -> None:
    path, precious = str(tmp_path / "kvd.sock"), tmp_path / "precious"
    precious.write_text("mine")
    os.symlink(precious, path + ".lock")
    with pytest.raises(BadRequest, match="cannot make"):
        PathLock(path)
    os.unlink(path + ".lock")
    if os.geteuid() != 0:
        precious.unlink()
        pytest.skip("only root can make files of another user")
    os.close(os.open(path + ".lock", os.O_CREAT))
    os.chown(path + ".lock", 12345, -1)
    with pytest.raises(BadRequest, match=r"kvd\.sock\.lock belongs to user 12345: remove it"):
        PathLock(path)
    os.unlink(path + ".lock")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(BadRequest, match=f"the folder {tmp_path} belongs to user 12345"):
        PathLock(path)
    os.chown(tmp_path, 0, -1)
    PathLock(path).release()
    assert precious.read_text() == "mine"
    precious.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
async def test_a_socket_or_a_locked_lock_that_another_user_laid_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    for laid in (path, path + ".zmq"):
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(laid)
            os.chown(laid, 12345, -1)
            with pytest.raises(BadRequest, match=f"{laid} belongs to user 12345: remove it"):
                Daemon(tmp_path)
        os.unlink(laid)
        assert os.listdir(tmp_path) == []
    descriptor = os.open(path + ".lock", os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.chown(path + ".lock", 12345, -1)
    with pytest.raises(BadRequest, match=r"kvd\.sock\.lock belongs to user 12345: remove it"):
        Daemon(tmp_path)
    os.close(descriptor)
    os.unlink(path + ".lock")


@pytest.mark.parametrize("gone", [".lock", "", ".zmq", ".zmq.lock", "all"])
async def test_files_that_somebody_has_removed_are_not_missed_when_the_daemon_stops(tmp_path: Path, gone: str) -> None:
    daemon = Daemon(tmp_path)
    for name in os.listdir(tmp_path) if gone == "all" else [f"kvd.sock{gone}"]:
        os.unlink(tmp_path / name)
    daemon.port.close()
    daemon.port.close()


async def test_a_daemon_whose_lock_was_removed_leaves_the_files_of_its_successor(tmp_path: Path) -> None:
    first = Daemon(tmp_path)
    for path in (first.path, first.path + ".zmq"):
        os.unlink(path + ".lock")
    second = Daemon(tmp_path)
    first.port.close()
    worker, _ = await second.session()
    worker.close()
    assert sorted(os.listdir(tmp_path)) == ["kvd.sock", "kvd.sock.lock", "kvd.sock.zmq", "kvd.sock.zmq.lock"]
    second.port.close()
    assert os.listdir(tmp_path) == []


class Valve:
    """An intake that admits as many frames as it was given."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[Callable[[], None], None] = {}

    def admits(self, again: Callable[[], None]) -> bool:
        self.room -= 1
        if self.room < 0:
            self.held[again] = None
        return self.room >= 0

    def open(self, room: int) -> None:
        self.room = room
        held, self.held = self.held, {}
        for again in held:
            again()


async def test_sockets_are_read_no_further_than_frames_are_admitted_and_on_when_they_are(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, valve := Valve(1 + 3))
    worker, _ = await daemon.session()
    with worker, zmq.Context() as context, context.socket(zmq.DEALER) as dealer, socket.socket(socket.AF_UNIX) as late:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"session-of-16-by")
        worker.sendall(pack(b"status") * limits.MAX_SESSION_FRAMES)
        await daemon.inbox.until(lambda events: len(events) == 3)
        dealer.connect(daemon.port.endpoint)
        for _ in range(1000):
            dealer.send(b"offer")
        late.connect(daemon.path)
        while len(valve.held) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(daemon.inbox.events) == 3
        valve.open(3 * 1000)
        await daemon.inbox.until(lambda events: len(events) == limits.MAX_SESSION_FRAMES + 1000 + 1)
        assert sum(isinstance(event, SessionFrame) for event in daemon.inbox.events) == limits.MAX_SESSION_FRAMES
    daemon.port.close()


class InTurn:
    """An intake that others never leave alone: who asks out of turn is put off."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.asked = asyncio.Event()
        self.turn = False

    def admits(self, again: Callable[[], None]) -> bool:
        if not self.turn:
            self.waiting.append(again)
            self.asked.set()
        return self.turn

    async def give_turn(self) -> None:
        await asyncio.wait_for(self.asked.wait(), MOMENT)
        self.turn = True
        self.waiting.pop(0)()
        self.turn = False


async def test_a_worker_connects_while_others_keep_the_daemon_busy(tmp_path: Path) -> None:
    intake = InTurn()
    daemon = Daemon(tmp_path, intake)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(daemon.path)
        await intake.give_turn()
        await daemon.inbox.next(SessionOpened)
    daemon.port.close()


async def test_a_garbage_length_ends_the_session_with_a_typed_error_and_leaves_the_others(daemon: Daemon) -> None:
    good, good_connection = await daemon.session()
    bad, bad_connection = await daemon.session()
    with good, bad:
        bad.sendall(b"\xff" * 100)
        closed = await daemon.inbox.next(SessionClosed)
        assert closed.connection == bad_connection
        assert closed.error.code is ErrorCode.TOO_LARGE
        refused = session_replies.decode((await read_frame(bad))[0])
        assert (refused.code, "4294967295 bytes" in refused.text) == ("too_large", True)
        good.sendall(pack(b"attach"))
        assert await daemon.inbox.next(SessionFrame) == SessionFrame(good_connection, b"attach", ())


def no_descriptor_passes(*_: object) -> None:
    raise refusal(ErrorCode.OVERLOADED, "Too many references: cannot splice")


async def test_a_session_that_sent_garbage_ends_also_where_it_cannot_be_told(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, connection = await daemon.session()
    monkeypatch.setattr(FrameStream, "send", no_descriptor_passes)
    with worker:
        worker.sendall(b"\xff" * 100)
        closed = await daemon.inbox.next(SessionClosed)
        assert (closed.connection, closed.error.code) == (connection, ErrorCode.TOO_LARGE)


async def test_a_session_that_was_closed_is_forgotten_also_where_its_last_frame_cannot_be_sent(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, connection = await daemon.session()
    with worker:
        daemon.port.send_session(connection, bytes(3 * limits.MIB))
        daemon.port.close_session(connection)
        assert daemon.port._closing
        monkeypatch.setattr(FrameStream, "flush", no_descriptor_passes)
        assert await asyncio.to_thread(drained, worker)
        assert not daemon.port._closing


@pytest.mark.parametrize("failing", [2, FRAMES_PER_TURN + 1, FRAMES_PER_TURN + 4])
async def test_who_raises_at_a_frame_costs_that_frame_and_none_behind_it(tmp_path: Path, failing: int) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    inbox, port = Inbox(), WorkerSockets(str(tmp_path / "kvd.sock"))

    def raises_once(event: object) -> None:
        inbox(event)
        if isinstance(event, SessionFrame) and event.frame == b"%d" % failing:
            raise ZeroDivisionError

    port.start(raises_once)
    worker = socket.socket(socket.AF_UNIX)
    worker.connect(str(tmp_path / "kvd.sock"))
    worker.sendall(b"".join(pack(b"%d" % number) for number in range(1, 11)))
    worker.close()
    await inbox.next(SessionClosed)
    assert [event.frame for event in inbox.events if isinstance(event, SessionFrame)] == [
        b"%d" % n for n in range(1, 11)
    ]
    port.close()


async def test_more_descriptors_than_a_frame_may_have_end_the_session_and_stay_open_nowhere(daemon: Daemon) -> None:
    worker, connection = await daemon.session()
    with worker:
        ours, theirs = os.pipe()
        socket.send_fds(worker, [pack(b"attach")], [theirs] * (MAX_DESCRIPTORS + 3))
        os.close(theirs)
        closed = await daemon.inbox.next(SessionClosed)
        assert (closed.connection, closed.error.code) == (connection, ErrorCode.BAD_MESSAGE)
        assert os.read(ours, 1) == b""  # end of file: nobody has the other end any more
        os.close(ours)


async def test_descriptors_of_a_frame_cut_short_are_closed(daemon: Daemon) -> None:
    worker, _ = await daemon.session()
    ours, theirs = os.pipe()
    socket.send_fds(worker, [pack(b"attach")[:5]], [theirs])
    os.close(theirs)
    worker.close()
    await daemon.inbox.next(SessionClosed)
    assert os.read(ours, 1) == b""
    os.close(ours)


async def test_frames_after_the_session_was_closed_are_dropped_with_their_descriptors(daemon: Daemon) -> None:
    worker, _ = await daemon.session()
    with worker:
        ours, theirs = os.pipe()
        seen: list[bytes] = []

        def close_at_once(event: object) -> None:
            if isinstance(event, SessionFrame):
                seen.append(event.frame)
                daemon.port.close_session(event.connection)

        daemon.port._on_event = close_at_once
        worker.sendall(pack(b"one") + pack(b"two"))
        socket.send_fds(worker, [pack(b"three")], [theirs])
        os.close(theirs)
        assert await asyncio.get_running_loop().run_in_executor(None, os.read, ours, 1) == b""
        assert seen == [b"one"]
        os.close(ours)


async def test_connections_beyond_the_bound_are_hung_up_on(daemon: Daemon) -> None:
    workers = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS + 1)]
    for worker in workers:
        worker.connect(daemon.path)
    await daemon.inbox.until(lambda events: len(events) == MAX_CONNECTIONS)
    workers[-1].settimeout(MOMENT)
    assert await asyncio.get_running_loop().run_in_executor(None, workers[-1].recv, 1) == b""
    for worker in workers:
        worker.close()


async def test_a_live_daemons_path_is_not_taken(daemon: Daemon) -> None:
    other = WorkerSockets(daemon.path)
    with pytest.raises(BadRequest, match=f"another kvd serves {daemon.path}") as caught:
        other.start(lambda event: None)
    assert caught.value.code is ErrorCode.BAD_CONFIG
    other.close()
    worker, _ = await daemon.session()
    worker.close()


async def test_a_daemon_whose_socket_would_be_the_request_socket_of_another_is_refused(daemon: Daemon) -> None:
    other = WorkerSockets(daemon.path + ".zmq")
    with pytest.raises(BadRequest, match=r"another kvd serves .*kvd\.sock\.zmq: stop it"):
        other.start(daemon.inbox)
    other.close()
    worker, _ = await daemon.session()
    worker.close()


async def test_a_daemon_whose_request_socket_would_be_the_socket_of_another_is_refused(tmp_path: Path) -> None:
    inbox = Inbox()
    first, second = WorkerSockets(str(tmp_path / "kvd.sock.zmq")), WorkerSockets(str(tmp_path / "kvd.sock"))
    first.start(inbox)
    with pytest.raises(BadRequest, match=r"another kvd serves .*kvd\.sock\.zmq: stop it"):
        second.start(inbox)
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(tmp_path / "kvd.sock.zmq"))
        await inbox.next(SessionOpened)
    first.close()


async def test_a_dead_daemons_files_are_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    for name in (path, path + ".zmq"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(name)
    os.close(os.open(path + ".lock", os.O_CREAT))
    daemon = Daemon(tmp_path)
    worker, _ = await daemon.session()
    worker.close()
    daemon.port.close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kvd.sock"
    path.write_text("somebody's notes")
    port = WorkerSockets(str(path))
    with pytest.raises(BadRequest, match="exists and is no socket"):
        port.start(lambda event: None)
    port.close()
    assert path.read_text() == "somebody's notes"
    path.unlink()


async def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    port = WorkerSockets(str(tmp_path / "missing" / "kvd.sock"))
    with pytest.raises(BadRequest, match=r"missing/kvd\.sock"):
        port.start(lambda event: None)
    port.close()


def test_a_name_that_its_lock_cannot_have_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 252))
    with pytest.raises(BadRequest, match=r"cannot make .*\.lock: .*File name too long"):
        PathLock(path)
    assert not Lock(path).taken()


def test_a_file_system_without_locks_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = str(tmp_path / "kvd.sock")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(BadRequest, match=r"cannot lock .*kvd\.sock\.lock: No locks available; put the socket"):
        PathLock(path)
    assert not Lock(path).taken()
    os.unlink(path + ".lock")


async def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(BadRequest, match="too long"):
        WorkerSockets("/run/" + "x" * 100)


class TestRequests:
    """The ZMQ half."""

    @pytest.fixture
    async def dealer(self, daemon: Daemon) -> AsyncIterator["zmq.Socket[bytes]"]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(1000 * MOMENT))
            dealer.setsockopt(zmq.ROUTING_ID, b"session-of-16-by")
            dealer.connect(daemon.port.endpoint)
            yield dealer

    async def test_a_frame_comes_with_its_session_and_is_answered(
        self, daemon: Daemon, dealer: "zmq.Socket[bytes]"
    ) -> None:
        dealer.send(b"offer")
        assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(b"session-of-16-by", b"offer", os.getuid())
        assert daemon.port.send(b"session-of-16-by", b"offered")
        assert await asyncio.get_running_loop().run_in_executor(None, dealer.recv) == b"offered"

    async def test_a_session_id_in_use_is_not_taken_over(self, daemon: Daemon, dealer: "zmq.Socket[bytes]") -> None:
        dealer.send(b"mine")
        await daemon.inbox.next(WorkerFrame)
        with zmq.Context() as context, context.socket(zmq.DEALER) as thief, context.socket(zmq.DEALER) as late:
            for each, name in ((thief, b"session-of-16-by"), (late, b"another-session-")):
                each.setsockopt(zmq.LINGER, 0)
                each.setsockopt(zmq.ROUTING_ID, name)
                each.connect(daemon.port.endpoint)
                each.send(b"stolen" if each is thief else b"late")
                await asyncio.sleep(0)
            await daemon.inbox.until(lambda events: any(event.frame == b"late" for event in events))
            assert daemon.port.send(b"session-of-16-by", b"for the owner")
            assert await asyncio.get_running_loop().run_in_executor(None, dealer.recv) == b"for the owner"
            dealer.send(b"still mine")
            await daemon.inbox.until(lambda events: any(event.frame == b"still mine" for event in events))
            assert not any(event.frame == b"stolen" for event in daemon.inbox.events)

    async def test_a_worker_that_is_not_there_is_told_to_the_sender(self, daemon: Daemon) -> None:
        assert not daemon.port.send(b"session-of-16-by", b"offered")

    async def test_a_worker_that_does_not_read_fills_its_own_queue_only(
        self, daemon: Daemon, dealer: "zmq.Socket[bytes]"
    ) -> None:
        dealer.setsockopt(zmq.RCVHWM, 10)
        dealer.send(b"offer")
        await daemon.inbox.next(WorkerFrame)
        sent = 0
        while daemon.port.send(b"session-of-16-by", bytes(1000)):
            sent += 1
            assert sent < 100_000
            await asyncio.sleep(0)

    async def test_one_flooding_worker_does_not_keep_the_loop(
        self, daemon: Daemon, dealer: "zmq.Socket[bytes]"
    ) -> None:
        dealer.send(b"first")
        await daemon.inbox.next(WorkerFrame)
        for _ in range(500):
            dealer.send(b"flood")
        longest = turn = 0
        while len(daemon.inbox.events) < 500:
            before = len(daemon.inbox.events)
            await asyncio.sleep(0)
            turn = len(daemon.inbox.events) - before
            longest = max(longest, turn)
        assert longest <= 64

    @pytest.mark.parametrize("parts", [[bytes(limits.MAX_MESSAGE_BYTES + 1)], [b"offer", b"and more"]])
    async def test_an_oversize_frame_or_one_in_parts_is_passed_up_as_an_empty_one_and_costs_the_connection(
        self, daemon: Daemon, dealer: "zmq.Socket[bytes]", parts: list[bytes]
    ) -> None:
        dealer.send_multipart(parts)
        assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(b"session-of-16-by", b"", os.getuid())
        while not daemon.inbox.events:  # the dealer connects again
            dealer.send(b"offer", zmq.NOBLOCK)
            await asyncio.sleep(0.01)
        assert daemon.inbox.events[0].frame == b"offer"

    @pytest.mark.parametrize("session", [bytes(16), b"\0" + b"\xff" * 15, b"\xff", b"x" * 255])
    async def test_a_session_id_may_be_any_bytes(self, daemon: Daemon, session: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(1000 * MOMENT))
            dealer.setsockopt(zmq.ROUTING_ID, session)
            dealer.connect(daemon.port.endpoint)
            dealer.send(b"offer")
            assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(session, b"offer", os.getuid())
            assert daemon.port.send(session, b"offered")
            assert await asyncio.get_running_loop().run_in_executor(None, dealer.recv) == b"offered"

    async def test_random_bytes_on_the_socket_change_nothing(self, daemon: Daemon, dealer: "zmq.Socket[bytes]") -> None:
        for _ in range(10):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(daemon.path + ".zmq")
                raw.sendall(os.urandom(500))
        dealer.send(b"offer")
        assert await daemon.inbox.next(WorkerFrame) == WorkerFrame(b"session-of-16-by", b"offer", os.getuid())
        assert daemon.inbox.events == []


async def test_a_stream_tells_what_the_kernel_did_not_take_yet() -> None:
    left, right = socket.socketpair()
    stream, other = FrameStream(left), FrameStream(right)
    stream.send(bytes(limits.MIB))
    assert stream.waiting > 0
    received = []
    while not received:
        stream.flush()
        received = other.receive()
    assert received[0].content == bytes(limits.MIB)
    assert stream.waiting == 0
    stream.close()
    assert other.receive() is None
    other.close()
