"""The process of the NIXL transport: what the daemon makes of its ends, and of what it says; with a scripted one."""

import asyncio
import errno
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from kvd import limits
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.net.stream import Frame, pack
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    NetworkDown,
    NetworkEvent,
    NetworkUp,
    Notified,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    Region,
    Registered,
    RegisterFailed,
)
from kvd.transport.nixl import keeper, messages
from kvd.transport.nixl import transport as module
from kvd.transport.nixl.child import Child
from kvd.transport.nixl.keeper import HUNG_PINGS, Keeper
from kvd.transport.nixl.messages import (
    AddPeer,
    ExpectReaders,
    Metadata,
    NotOpened,
    Opened,
    Ping,
    Read,
    Register,
    encode,
)
from kvd.transport.nixl.transport import NixlTransport
from kvd.transport.nixl.ucx import environment_of
from tests.support.lingering import lingering_socket
from tests.support.patience import PATIENCE
from tests.transport.descriptors import descriptors, request

NOT_UNICODE = msgspec.Raw(messages.encode([PeerFailed("p", "")]).replace(b"\xa1p", b"\xa1\xff"))
PEER = encode(Metadata(b"nixl's", b"process1", {}))


class ScriptedChild:
    """What the daemon has of a process, without one. `says` and `dies` are what the process does."""

    born: "list[ScriptedChild]"
    first: Opened | NotOpened | None

    def __init__(self, _agent: str, _held: tuple[int, ...]) -> None:
        self.pid, self.fault = len(self.born) + 1, ""
        self.commands: list[messages.Command] = []
        self.told = self.taken = 0
        self.reads = True
        self._frames: list[Frame] | None = []
        self.born.append(self)

    def open(self, _seconds: float) -> Opened | NotOpened | None:
        return self.first

    def watch(self, _loop: object, hear: Callable[[], object], ended: Callable[[], None]) -> None:
        self._hear, self._ended = hear, ended

    def send(self, command: messages.Command, _descriptors: tuple[int, ...] = ()) -> None:
        self.commands.append(command)
        self.told += len(messages.encode(command))
        if self.reads:
            self.taken = self.told

    def receive(self) -> list[Frame] | None:
        frames, self._frames = self._frames, None
        return None if self.fault else frames

    def kill(self, fault: str) -> None:
        self.fault = self.fault or fault

    def wait(self) -> str:
        return f"{self.fault} (signal SIGKILL)"

    def close(self) -> None:
        pass

    def hang_up(self) -> None:
        pass

    def says(self, *frames: object) -> None:
        self._frames = [Frame(messages.encode(frame), ()) for frame in frames]
        self._hear()

    def dies(self, *last_words: object) -> None:
        self._frames = [Frame(messages.encode(frame), ()) for frame in last_words]
        self._ended()


class Run:
    """A transport whose process is scripted, and what it has told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[NetworkEvent] = []
        ScriptedChild.born, ScriptedChild.first = [], Opened(b"first")
        monkeypatch.setattr(keeper, "Child", ScriptedChild)
        monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.0)
        monkeypatch.setattr(module, "nixl_name", lambda: "scripted")
        self.transport = NixlTransport("a", asyncio.get_running_loop())
        self.transport.start(self.events.append)

    @property
    def child(self) -> ScriptedChild:
        return ScriptedChild.born[-1]

    async def reborn(self, metadata: bytes = b"second") -> ScriptedChild:
        """The next process, once it takes commands."""
        count = len(ScriptedChild.born)
        async with asyncio.timeout(PATIENCE):
            while len(ScriptedChild.born) == count:  # noqa: ASYNC110 - a timer of the transport's
                await asyncio.sleep(0)
        self.child.says(Opened(metadata))
        return self.child

    def registered(self, pool: int) -> None:
        self.transport.register(pool, Region(pool << 30, 4096, 0, length=4096))
        self.child.says([Registered(pool, b"with %d" % pool)])

    def taken(self) -> list[NetworkEvent]:
        events, self.events[:] = list(self.events), []
        return events


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


async def test_the_end_of_the_process_ends_what_it_had_open_once_and_its_last_words_hold(run: Run) -> None:
    run.registered(1)
    run.registered(2)
    run.transport.add_peer("p", PEER)
    run.child.says([PeerAdded("p", PEER)])
    for read in (1, 2):
        run.transport.read(request(read, descriptors([(0, 0, 1)])))
    run.transport.deregister(2)
    run.transport.describe((1,))
    run.taken()
    run.child.dies([Landed(1, 0.5)])
    reason = "the process that reads from other hosts ended:  (signal SIGKILL)"
    assert run.taken() == [
        Landed(1, 0.5),
        NetworkDown(reason),
        PeerFailed("p", reason),
        ReadFailed(2, reason),
        Described((1,), b""),
        Deregistered(2, b""),
    ]
    assert run.transport.metadata == b""


async def test_the_next_process_gets_the_pools_and_whoever_was_asked_for_meanwhile(run: Run) -> None:
    for pool in (1, 2):
        run.registered(pool)
    run.transport.expect_readers(True)
    run.child.dies()
    run.taken()
    run.transport.deregister(2)
    run.transport.register(3, Region(3 << 30, 4096, 0, length=4096))
    run.transport.add_peer("p", PEER)
    run.transport.add_peer("q", PEER)
    run.transport.remove_peer("q")
    run.transport.abort(7)
    run.transport.describe((1,))
    run.transport.read(request(9, descriptors([(0, 0, 1)])))
    run.transport.ping(5)
    refused = ReadFailed(9, "the transport to other hosts is being started again")
    assert run.taken() == [Deregistered(2, b""), Described((1,), b""), refused, Answered(5)]
    child = await run.reborn()
    assert child.commands == [
        Register(1, 1 << 30, 4096, 4096),
        Register(3, 3 << 30, 4096, 4096),
        ExpectReaders(True),
        AddPeer("p", PEER),
    ]
    child.says([Registered(1, b"one")], [Registered(3, b"all")])
    assert run.taken() == [NetworkUp(b"one"), Registered(3, b"all")]
    assert run.transport.metadata == b"all"


async def test_a_pool_that_cannot_be_registered_anew_costs_the_process_and_not_the_pool(run: Run) -> None:
    run.registered(1)
    run.child.dies()
    child = await run.reborn()
    run.taken()
    child.says([RegisterFailed(1, "no memory")])
    assert child.fault == "a pool cannot be registered anew: no memory"
    child.dies()
    assert [type(event) for event in run.taken()] == [NetworkDown], "it says why it is still down"
    child = await run.reborn()
    child.says([Registered(1, b"at last")])
    assert run.taken() == [NetworkUp(b"at last")]


@pytest.mark.parametrize(
    "event",
    [
        Landed(4711, 0.0),
        ReadFailed(4711, ""),
        Registered(4711, b""),
        RegisterFailed(4711, ""),
        Deregistered(4711, b""),
        Described((4711,), b""),
        PeerAdded("q", b""),
        PeerFailed("q", ""),
        Answered(4711),
    ],
    ids=lambda event: type(event).__name__,
)
async def test_a_process_that_tells_of_what_nobody_asked_for_is_ended_and_not_heard(run: Run, event: Event) -> None:
    run.transport.read(request(1, descriptors([(0, 0, 1)])))
    run.child.says([event, Landed(1, 0.0)])
    assert run.child.fault == f"it told of what nobody asked for: {type(event).__name__}"
    assert run.taken() == []


async def test_a_peer_that_was_removed_meanwhile_may_be_told_of_but_not_without_end(run: Run) -> None:
    run.transport.add_peer("p", PEER)
    run.transport.remove_peer("p")
    run.child.says([PeerAdded("p", PEER), PeerFailed("p", "")])
    assert not run.child.fault
    run.child.says([PeerFailed("p", "")])
    assert run.child.fault == "it told of what nobody asked for: PeerFailed"
    assert run.taken() == []


@pytest.mark.parametrize(
    "event",
    [
        Landed(1, 0.0, stamp=7),
        ReadFailed(1, "", unproven=True),
        PeerAdded("p", PEER, same_host=True),
        PeerAdded("p", PEER, stamps=True),
        PeerAdded("p", PEER, detour="it is far"),
    ],
    ids=repr,
)
async def test_a_process_that_tells_what_only_copies_within_the_host_can_is_not_believed(
    run: Run, event: Event
) -> None:
    run.transport.add_peer("p", PEER)
    run.transport.read(request(1, descriptors([(0, 0, 1)])))
    run.child.says([event])
    assert run.child.fault.startswith("it told of copies within the host")
    assert run.taken() == []


async def test_messages_of_peers_fill_no_turn_of_the_loop_and_those_above_the_bound_are_dropped(run: Run) -> None:
    some = [Notified("p", b"%d" % number) for number in range(limits.MAX_NOTIFICATIONS_AT_ONCE)]
    more = [Notified("p", b"more")] * messages.MAX_EVENTS
    run.transport.ping(1)
    run.child.says(some, more, [*more[1:], Answered(1)])
    assert run.taken() == [*some, Answered(1)]
    assert not run.child.fault
    run.child.says([Notified("p", b"later")])
    assert run.taken() == [Notified("p", b"later")]


LONG = "x" * limits.MIB
HUGE = bytes(limits.MAX_METADATA_BYTES)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense",
        ["nonsense"],
        [{"type": "TransportDied", "reason": ""}],
        NOT_UNICODE,
        [],
        [Answered(0)] * (messages.MAX_EVENTS + 1),
        [ReadFailed(1, LONG)],
        [PeerFailed("p", LONG)],
        [RegisterFailed(1, LONG)],
        [PeerAdded("p", PEER, LONG)],
        [Registered(1, HUGE)],
        [Deregistered(1, HUGE)],
        [Described((1,), HUGE)],
        [Landed(1, math.nan)],
        [Landed(1, math.inf)],
        [Landed(1, -1.0)],
    ],
    ids=range(16),
)
async def test_a_process_that_sends_what_is_no_message_is_ended(run: Run, nonsense: object) -> None:
    run.child.says(nonsense)
    assert run.child.fault.startswith("it sent no message: ")
    assert run.taken() == []


async def test_a_process_that_leaves_pings_unanswered_is_ended_and_one_that_answers_is_not(run: Run) -> None:
    for number in range(3 * HUNG_PINGS):
        run.transport.ping(number)
        run.child.says([Answered(number)])
    assert not run.child.fault
    for pool in range(3 * HUNG_PINGS):  # it registers one large pool after the other, and gets to no ping meanwhile
        run.transport.ping(pool)
        run.registered(pool)
    assert not run.child.fault
    for number in range(HUNG_PINGS):
        run.transport.ping(number)
    assert not run.child.fault
    run.transport.ping(0)
    assert run.child.fault == f"it did not answer {HUNG_PINGS} pings"


async def test_a_process_that_says_much_and_answers_no_ping_is_ended(run: Run) -> None:
    run.transport.add_peer("p", PEER)
    for read in range(HUNG_PINGS):
        run.transport.ping(read)
        run.transport.read(request(read, descriptors([(0, 0, 1)])))
        run.child.says([Landed(read, 0.0)])
    assert not run.child.fault
    run.transport.ping(HUNG_PINGS)
    assert run.child.fault == f"it did not answer {HUNG_PINGS} pings"


async def test_a_process_that_does_not_read_and_guesses_which_pings_it_was_sent_is_ended(run: Run) -> None:
    run.transport.ping(1)
    run.child.says([Answered(1)])
    run.child.reads = False
    run.transport.ping(2)
    assert not run.child.fault
    run.child.says([Answered(2)])
    assert run.child.fault == "it told of what nobody asked for: Answered"
    assert run.taken() == [Answered(1)]


async def test_a_process_with_few_free_descriptors_is_replaced_when_nobody_reads_through_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(number: int, *, crowded: bool) -> str:
        run.transport.ping(number)
        run.child.says([Answered(number, crowded)])
        return run.child.fault

    assert not answers(1, crowded=True), "it has just been started"
    monkeypatch.setattr(keeper, "CROWDED_AFTER", 0.0)
    assert not answers(2, crowded=False)
    run.transport.expect_readers(True)
    assert not answers(3, crowded=True)
    run.transport.expect_readers(False)
    run.transport.read(request(1, descriptors([(0, 0, 1)])))
    assert not answers(4, crowded=True)
    run.child.says([Landed(1, 0.0)])
    assert answers(5, crowded=True) == "few descriptors are free: peers that were forgotten have the others"


async def test_a_process_that_does_not_open_is_tried_again(run: Run) -> None:
    run.child.dies()
    await run.reborn()
    run.child.dies()
    count = len(ScriptedChild.born)
    async with asyncio.timeout(PATIENCE):
        while len(ScriptedChild.born) == count:  # noqa: ASYNC110 - a timer of the transport's
            await asyncio.sleep(0)
    run.child.says(NotOpened("no device"))
    assert run.child.fault == "no device"
    run.child.dies()
    await run.reborn()
    assert [type(event) for event in run.taken()] == [NetworkDown, NetworkUp, NetworkDown, NetworkDown, NetworkUp]


async def test_a_long_table_of_descriptors_travels_as_a_memfd_and_a_short_one_in_the_frame() -> None:
    for count in (1, 100_000):
        asked = request(1, descriptors((i, 2 * i, 3 * i) for i in range(count)))
        command, passed = messages.read_command(asked)
        assert bool(passed) is (count > 1)
        decoded = messages.command(messages.encode(command))
        assert isinstance(decoded, Read)
        found = messages.request_of(decoded, passed)
        for descriptor in passed:
            os.close(descriptor)
        assert found.descriptors.copies == asked.descriptors.copies


def test_the_process_gets_no_variable_that_neither_nixl_nor_ucx_nor_python_reads() -> None:
    ours = {"UCX_TLS": "tcp", "PATH": "/bin", "PYTHONPATH": "x"}
    others = {"KVD_CURVE_KEY": "/k", "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=x", "NOTIFY_SOCKET": "/s"}
    assert environment_of(ours | others) == ours


@pytest.mark.real
def test_workers_are_told_that_nothing_writes_any_more_only_when_the_process_has_ended_too() -> None:
    pytest.importorskip("nixl_cu12", reason="nixl is not installed")
    alive, ends = os.pipe()
    child = Child("a", (alive,))
    assert isinstance(child.open(PATIENCE), Opened)
    os.close(alive)  # as the end of the daemon does
    poller = select.poll()
    poller.register(ends, select.POLLIN)
    assert not poller.poll(0)
    child.kill("")
    assert child.wait() == f"signal {signal.SIGKILL.name}"
    assert poller.poll(0)
    child.close()
    os.close(ends)


@pytest.mark.real
def test_the_process_has_its_own_descriptors_alone_and_ends_with_its_daemon() -> None:
    pytest.importorskip("nixl_cu12", reason="nixl is not installed")
    secret = os.memfd_create("secret", 0)  # inherited by whoever is started carelessly
    child = Child("a", ())
    assert isinstance(child.open(PATIENCE), Opened)
    links = {os.readlink(f"/proc/{child.pid}/fd/{number}") for number in os.listdir(f"/proc/{child.pid}/fd")}
    assert not [link for link in links if "secret" in link]
    child.close()
    assert child.wait() == "status 0"
    os.close(secret)


class Script(Child):
    """The daemon's end of a process that runs `script`."""

    script = ""

    def __init__(self, agent: str, held: tuple[int, ...]) -> None:
        start = subprocess.Popen
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                subprocess, "Popen", lambda _command, **how: start([sys.executable, "-c", self.script], **how)
            )
            super().__init__(agent, held)


class Dies(Script):
    """It hands its socket on to a process of its own, and dies."""

    script = f"""
import os, socket, subprocess, sys
daemon = socket.socket(fileno=0)
daemon.sendall({pack(messages.encode(Opened(b"first")))!r})
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.buffer.read()"], stdin=daemon)
daemon.sendall({pack(messages.encode([Answered(7)]))!r})
os.kill(os.getpid(), 9)
"""


class SaysAllAtOnce(Script):
    """Its first word and its last one come together."""

    script = f"""
import os, socket
words = {pack(messages.encode(Opened(b"first"))) + pack(messages.encode([Answered(7)]))!r}
socket.socket(fileno=0).sendall(words)
os.kill(os.getpid(), 9)
"""


@pytest.mark.real
@pytest.mark.parametrize("child", [Dies, SaysAllAtOnce])
async def test_what_a_process_said_last_is_heard_and_what_it_has_started_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, child: type[Child]
) -> None:
    monkeypatch.setattr(keeper, "Child", child)
    heard: list[Event] = []
    ended = asyncio.get_running_loop().create_future()
    kept = Keeper(
        "a",
        asyncio.get_running_loop(),
        (),
        opened=lambda _metadata: None,
        heard=lambda event: heard.append(event) or True,
        ended=ended.set_result,
    )
    kept.start()
    kept.ping(7)
    async with asyncio.timeout(PATIENCE):
        assert await ended == "signal SIGKILL"
    assert heard == [Answered(7)]
    await asyncio.to_thread(kept.stop)


class Passes(Script):
    """It passes two descriptors, the second of which nobody receives, keeps neither, and tells through a pipe."""

    @classmethod
    def begin(cls, one: int, two: int) -> "Passes":
        told, tell = os.pipe()
        cls.script = f"""
import os, socket
daemon = socket.socket(fileno=0)
try:
    for descriptor in ({one}, {two}):
        socket.send_fds(daemon, [{pack(messages.encode([Answered(7)]))!r}], [descriptor])
        os.close(descriptor)
finally:
    os.write({tell}, b".")
daemon.recv(1)
"""
        child = cls("a", (one, two, tell))
        for descriptor in (one, two, tell):
            os.close(descriptor)
        assert os.read(told, 1)
        os.close(told)
        return child


@pytest.mark.real
def test_descriptors_that_a_process_passes_are_refused_before_they_are_here() -> None:
    one, two = (os.memfd_create("passed") for _ in range(2))
    child = Passes.begin(one, two)
    assert child.wait() == "status 1"  # EPERM
    assert child.receive() is None
    assert not child.fault
    child.close()


@pytest.mark.real
def test_where_the_kernel_cannot_refuse_them_they_end_it_and_nobody_waits_for_those_that_linger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.transport.nixl.child.take_descriptors", lambda _sock, take: take)
    with lingering_socket() as one, lingering_socket() as two:
        child = Passes.begin(one, two)
        assert child.receive() is None
        assert child.wait() == "it sent descriptors (signal SIGKILL)"
        child.close()


class Sleeps(Script):
    script = "import sys; sys.stdin.read()"


class Stream:
    """One that cannot send, with so many bytes waiting."""

    def __init__(self, error: Exception, waiting: int) -> None:
        self._error, self.waiting = error, waiting

    def send(self, _content: bytes, _descriptors: tuple[int, ...] = ()) -> None:
        raise self._error


NONE_LEFT = refusal(ErrorCode.OVERLOADED, "none left")


@pytest.mark.real
@pytest.mark.parametrize(
    ("error", "waiting", "how"),
    [
        (NONE_LEFT, 1, "commands to it were lost: overloaded: none left (signal SIGKILL)"),
        (
            OSError(errno.ENOBUFS, "no room"),
            0,
            f"commands to it were lost: [Errno {errno.ENOBUFS}] no room (signal SIGKILL)",
        ),
        (BrokenPipeError(errno.EPIPE, "gone"), 0, "signal SIGKILL"),
    ],
    ids=["descriptors", "memory", "gone"],
)
def test_a_process_that_did_not_get_a_command_is_ended(
    error: Exception, waiting: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Sleeps("a", ())
    with monkeypatch.context() as patch:
        patch.setattr(child, "_stream", Stream(error, waiting))
        child.send(Ping(1))
    assert child.wait() == how
    child.close()


@pytest.mark.real
def test_a_command_whose_descriptor_cannot_be_passed_is_refused_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Sleeps("a", ())
    with monkeypatch.context() as patch:
        patch.setattr(child, "_stream", Stream(NONE_LEFT, 0))
        with pytest.raises(Unavailable):
            child.send(Ping(1))
    assert not child.fault
    child.close()
    assert child.wait() == "status 0"
