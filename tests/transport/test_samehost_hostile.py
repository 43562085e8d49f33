"""The transport within a host against peers that do not keep the protocol, and short of descriptors."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvd import limits
from kvd.errors import Unavailable
from kvd.memory.memfd import MemfdProvider
from kvd.net.stream import FrameStream, pack
from kvd.protocol.codec import encode
from kvd.protocol.export import ExportAddress, Exported, ExportedPool, Import, Withdrawn
from kvd.protocol.types import Message
from kvd.transport.interface import Event, PeerAdded, PeerFailed, Region, Registered, RegisterFailed
from kvd.transport.samehost import transport
from kvd.transport.samehost.importer import ImportedPools, import_pools
from kvd.transport.samehost.lent import map_host_pool
from kvd.transport.samehost.transport import SameHostTransport
from tests.support.closing import wait_until_closed
from tests.support.descriptors import no_descriptors_left
from tests.support.lingering import lingering_socket
from tests.support.patience import MOMENT, PATIENCE

SIZE = 2 << 20
TOKEN = bytes(16)


class Agent:
    """A transport, and what it reports."""

    def __init__(self, folder: Path, name: str) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.path = str(folder / f"{name}.pools")
        self.transport = SameHostTransport(name, asyncio.get_running_loop(), self.path, host="this", threads=1)
        self.transport.start(self.events.put_nowait)

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.stop()


@contextlib.contextmanager
def descriptors_taken(*, below: int, limit: int) -> Iterator[None]:
    """Takes all descriptors below `below`, under a limit of `limit`; the process may have any of them already.

    What an earlier test has passed to threads that close it is closed first: it would be free again only then.
    """
    wait_until_closed()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        with contextlib.suppress(OSError):  # none is left
            while taken[-1] < below:
                taken.append(os.dup(taken[0]))
        if taken[-1] >= below:
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_peer_is_read_with_stamps_by_a_daemon_of_more_than_a_thousand_descriptors(tmp_path: Path) -> None:
    pool = MemfdProvider().allocate("pool", SIZE)
    with Agent(tmp_path, "producer") as producer, Agent(tmp_path, "consumer") as consumer:
        producer.transport.register(1, Region(pool.base, SIZE, pool.descriptor, length=SIZE))
        with descriptors_taken(below=1100, limit=2048):
            consumer.transport.add_peer("producer", producer.transport.metadata)
            added = await consumer.events.get()
            assert isinstance(added, PeerAdded)
            assert added.stamps
    pool.close()


async def test_a_pool_that_cannot_be_lent_fails_to_register_and_leaves_nothing(tmp_path: Path) -> None:
    pool = MemfdProvider().allocate("pool", SIZE)
    with Agent(tmp_path, "a") as agent:
        with descriptors_taken(below=256, limit=256):
            agent.transport.register(1, Region(pool.base, SIZE, pool.descriptor, length=SIZE))
        assert isinstance(await agent.events.get(), RegisterFailed)
        agent.transport.register(1, Region(pool.base, SIZE, pool.descriptor, length=SIZE))
        assert isinstance(await agent.events.get(), Registered)
    pool.close()


async def test_who_shows_a_token_that_covers_nothing_is_hung_up_on(tmp_path: Path) -> None:
    with Agent(tmp_path, "a") as agent:
        reader, writer = await asyncio.open_unix_connection(agent.path)
        content = encode(Import(TOKEN))
        writer.write(len(content).to_bytes(4, "little") + content)
        assert b"the token covers no pool here" in await reader.read()  # and then the end
        writer.close()


async def test_exporters_that_do_not_answer_keep_no_other_work_waiting(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with Agent(tmp_path, "a") as agent, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "x.pools"))
        silent.listen(64)
        for number in range(40):
            name = f"x{number}"
            metadata = encode(ExportAddress(name, "this", str(tmp_path / "x.pools"), TOKEN))
            agent.transport.add_peer(name, metadata)
        await loop.run_in_executor(None, os.getpid)
        assert agent.events.empty()  # so that did not wait for an import to fail


@contextlib.contextmanager
def import_in_a_queue(path: str) -> Iterator[tuple[socket.socket, "Future[ImportedPools]", int]]:
    """A listener with a full queue, an import that waits for its turn there, and the thread that waits."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(path)
        listener.listen(0)
        listener.settimeout(MOMENT)
        other.connect(path)
        with ThreadPoolExecutor(1) as thread:
            ident = thread.submit(threading.get_ident).result()
            importing = thread.submit(import_pools, ExportAddress("x", "this", path, TOKEN), map_host_pool)
            with pytest.raises(TimeoutError):
                importing.result(timeout=0.1)
            yield listener, importing, ident


def serve_in_turn(listener: socket.socket, importing: "Future[ImportedPools]") -> None:
    listener.accept()[0].close()
    stream = FrameStream(listener.accept()[0])
    stream.send(encode(Exported(bytes(8), bytes(8))))
    importing.result().hang_up()
    stream.close()


def test_an_import_waits_its_turn_while_others_are_queued_to_connect(tmp_path: Path) -> None:
    with import_in_a_queue(str(tmp_path / "x.pools")) as (listener, importing, _):
        serve_in_turn(listener, importing)


def test_an_import_that_was_interrupted_in_a_queue_goes_on_waiting(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with import_in_a_queue(str(tmp_path / "x.pools")) as (listener, importing, thread):
            signal.pthread_kill(thread, signal.SIGUSR1)
            with pytest.raises(TimeoutError):
                importing.result(timeout=0.1)
            serve_in_turn(listener, importing)
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_a_peer_whose_import_raises_what_nobody_expects_is_lost_and_the_log_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> ImportedPools:
        raise MemoryError

    monkeypatch.setattr(transport, "import_pools", fail)
    with Agent(tmp_path, "producer") as producer, Agent(tmp_path, "consumer") as consumer, capture_logs() as logged:
        consumer.transport.add_peer("producer", producer.transport.metadata)
        failed = await consumer.events.get()
    assert failed == PeerFailed("producer", "internal MemoryError; see the daemon's log")
    assert [entry["event"] for entry in logged] == ["an import failed"]


async def test_a_peer_that_comes_while_the_daemon_stops_is_ignored(tmp_path: Path) -> None:
    with Agent(tmp_path, "a") as agent:
        agent.transport.stop()
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", str(tmp_path / "x.pools"), TOKEN)))
        assert agent.events.empty()


@pytest.mark.parametrize("address", ["ipc:///run/x.peers", "tcp://127.0.0.1:1"])
@pytest.mark.parametrize("hidden", ["{}\0.pools", "{}\0/x.pools"])
async def test_a_peer_cannot_hide_another_socket_before_a_nul_in_the_path_of_its_own(
    tmp_path: Path, hidden: str, address: str
) -> None:
    path = hidden.format(tmp_path / "victim")
    with Agent(tmp_path, "a") as agent, socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(tmp_path / "victim"))
        victim.listen()
        victim.setblocking(False)
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", path, TOKEN)), address)
        failed = await agent.events.get()
        assert isinstance(failed, PeerFailed)
        assert "is not the shortest spelling of a path that ends in .pools" in failed.reason
        with pytest.raises(BlockingIOError):
            victim.accept()


@pytest.mark.parametrize("lent", ["x.sock", "sub/../x.pools", "elsewhere/x.pools", "other.pools"])
async def test_a_peer_that_leads_to_a_socket_that_is_not_its_own_is_refused_before_anybody_connects(
    tmp_path: Path, lent: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "elsewhere").mkdir()
    path = f"{tmp_path}/{lent}"
    with Agent(tmp_path, "a") as agent, socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(path)
        foreign.listen()
        foreign.setblocking(False)
        metadata = encode(ExportAddress("x", "this", path, TOKEN))
        agent.transport.add_peer("x", metadata, f"ipc://{tmp_path}/x.peers#{'ab' * 32}")
        failed = await agent.events.get()
        assert isinstance(failed, PeerFailed)
        assert f"it lends its pools at {path}" in failed.reason.replace("'", "")
        with pytest.raises(BlockingIOError):
            foreign.accept()


@pytest.mark.parametrize("path", ["x.pools", "\0abstract.pools"])
async def test_what_is_no_path_of_a_file_is_refused_whatever_the_peers_address(tmp_path: Path, path: str) -> None:
    with Agent(tmp_path, "a") as agent:
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", path, TOKEN)), "tcp://127.0.0.1:1")
        assert "is not the shortest spelling of a path" in (await agent.events.get()).reason


async def test_a_peer_whose_folder_would_be_reached_through_a_link_is_not_imported(tmp_path: Path) -> None:
    """Links of others could form a maze: daemons tell their path without them."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with Agent(tmp_path / "run", "p") as producer, Agent(tmp_path, "c") as consumer:
        consumer.transport.add_peer("p", producer.transport.metadata, f"ipc://{tmp_path}/link/p.peers")
        assert "which is not beside its own socket" in (await consumer.events.get()).reason
        consumer.transport.add_peer("p", producer.transport.metadata, f"ipc://{tmp_path}/run/p.peers")
        assert isinstance(await consumer.events.get(), PeerAdded)


@contextlib.contextmanager
def exporter_that_lends_sockets(path: Path) -> Iterator[None]:
    """An exporter that lends everybody, as a pool, a socket that lingers."""
    pool = pack(encode(ExportedPool((4096).to_bytes(8, "little"), SIZE, SIZE)))
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as lingering:
        listener.bind(str(path))
        listener.listen(64)

        def serve() -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as streams:
                while True:
                    accepted = streams.enter_context(listener.accept()[0])
                    stuck = lingering.enter_context(lingering_socket())
                    socket.send_fds(accepted, [pool[:1]], [stuck])
                    os.close(stuck)  # before the importer has the whole frame: the last close is the importer's
                    accepted.sendall(pool[1:])

        with ThreadPoolExecutor(1) as thread:
            thread.submit(serve)
            try:
                yield
            finally:
                listener.shutdown(socket.SHUT_RDWR)


async def test_what_a_hostile_exporter_lends_holds_no_import_thread_however_long_it_takes_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CLOSING_PER_USER", 1000)  # here all are one user's
    monkeypatch.setattr(limits, "IMPORT_SECONDS", PATIENCE)
    with (
        exporter_that_lends_sockets(tmp_path / "x.pools"),
        Agent(tmp_path, "a") as agent,
        Agent(tmp_path, "b") as honest,
    ):
        many = 2 * limits.MAX_HANDSHAKES
        for number in range(many):
            metadata = encode(ExportAddress(f"x{number}", "this", str(tmp_path / "x.pools"), TOKEN))
            agent.transport.add_peer(f"x{number}", metadata)
        failed = [await agent.events.get() for _ in range(many)]
        reasons = {event.reason for event in failed if isinstance(event, PeerFailed)}
        assert {reason for reason in reasons if "cannot be mapped" not in reason} == set()
        agent.transport.add_peer("b", honest.transport.metadata)
        assert isinstance(await agent.events.get(), PeerAdded)
        monkeypatch.setattr(limits, "MAX_CLOSING_PER_USER", 10)
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", str(tmp_path / "x.pools"), TOKEN)))
        refused = await agent.events.get()
        assert isinstance(refused, PeerFailed)
        assert "are not closed yet" in refused.reason


def test_an_import_without_a_descriptor_left_fails_with_that_name_and_at_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.pools"))
        listener.listen()
        address = ExportAddress("x", "this", str(tmp_path / "x.pools"), TOKEN)
        with descriptors_taken(below=256, limit=256), pytest.raises(Unavailable, match="Too many open files"):
            import_pools(address, map_host_pool)


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        (Withdrawn((4096).to_bytes(8, "little")), "0x1000 is withdrawn that was not lent"),
        (Exported(bytes(8), bytes(8)), "Exported after all of its pools had come"),
    ],
)
async def test_an_exporter_that_says_what_it_should_not_is_lost(tmp_path: Path, late: Message, reason: str) -> None:
    with Agent(tmp_path, "a") as agent, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.pools"))
        listener.listen()
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", str(tmp_path / "x.pools"), TOKEN)))
        connected, _ = await asyncio.to_thread(listener.accept)
        stream = FrameStream(connected)
        stream.send(encode(Exported(bytes(8), bytes(8))))
        assert isinstance(await agent.events.get(), PeerAdded)
        stream.send(encode(late))
        lost = await agent.events.get()
        assert isinstance(lost, PeerFailed)
        assert reason in lost.reason
        stream.close()


async def test_an_exporter_that_passes_a_descriptor_too_many_is_lost_where_none_is_left(tmp_path: Path) -> None:
    with Agent(tmp_path, "a") as agent, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.pools"))
        listener.listen()
        agent.transport.add_peer("x", encode(ExportAddress("x", "this", str(tmp_path / "x.pools"), TOKEN)))
        connected, _ = await asyncio.to_thread(listener.accept)
        with connected:
            connected.sendall(pack(encode(Exported(bytes(8), bytes(8)))))
            assert isinstance(await agent.events.get(), PeerAdded)
            with no_descriptors_left():
                late = pack(encode(Withdrawn(bytes(8))))
                socket.send_fds(connected, [late], [connected.fileno()])
                lost = await agent.events.get()
        assert isinstance(lost, PeerFailed)
        assert "Too many open files" in lost.reason
