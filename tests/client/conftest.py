"""A small scripted daemon over the real sockets, in a thread: it does what a test tells it and nothing else."""

import asyncio
import os
import queue
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvd.errors import KvdError
from kvd.memory.interface import Memory, MemoryProvider
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.net.interface import SessionClosed, SessionFrame, WorkerEvent, WorkerFrame
from kvd.net.workers import WorkerSockets
from kvd.protocol import codec
from kvd.protocol.types import Message
from kvd.protocol.worker import Attach, Attached, Detach, Detached, Notification, Notifications, Refused
from tests.support.closing import wait_until_closed
from tests.support.loops import UvLoop
from tests.support.patience import MOMENT

T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """What `attach` needs of a `CacheSpec`."""

    pool_bytes: int = 65_536

    def encode(self) -> bytes:
        return b"a spec"


class ScriptedDaemon:
    """Attaches whoever asks, keeps what workers send in `inbox`, sends what a test tells it."""

    def __init__(
        self, path: str, incarnation: int = 1, *, own_process: bool = False, provider: MemoryProvider | None = None
    ) -> None:
        """Another process stands for the daemon's, since this one goes on; or it is this one's `own_process`."""
        self.path = path
        self.process = None if own_process else subprocess.Popen(["sleep", "1000"])
        self.incarnation = incarnation
        self.refusal: KvdError | None = None
        self.silent = False
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.sessions: list[tuple[int, bytes]] = []
        self.attaches: list[Attach] = []
        self.pools: dict[str, Memory] = {}
        self._provider = provider or MemfdProvider(Backing.PLAIN)
        self._port = WorkerSockets(path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted daemon")
        self._thread.start()
        self._call(self._start)

    def expect(self, kind: type[T]) -> T:
        """The next thing that a worker sent; it must be of `kind`."""
        message = self.inbox.get(timeout=MOMENT)
        assert isinstance(message, kind), message
        return message

    def send(self, *messages: Message) -> None:
        self.send_raw(*[codec.encode(message) for message in messages])

    def send_raw(self, *frames: bytes) -> None:
        """Sends to the worker that attached last, which must have sent something before."""

        def work() -> None:
            for frame in frames:
                assert self._port.send(self.sessions[-1][1], frame)

        self._call(work)

    def notify(self, first: int, *items: Notification) -> None:
        self.send(Notifications(first, items))

    def try_notify(self, first: int, *items: Notification) -> bool:
        frame = codec.encode(Notifications(first, items))
        return self._call(lambda: self._port.send(self.sessions[-1][1], frame))

    def send_session(self, frame: bytes) -> None:
        self._call(lambda: self._port.send_session(self.sessions[-1][0], frame))

    def hang_up(self) -> None:
        """Ends the session of the worker that attached last."""
        self._call(lambda: self._port.close_session(self.sessions[-1][0]))

    def hang_up_on_requests(self) -> None:
        """Ends the other connection of the worker that attached last, which must have sent something before."""
        self._call(self._port._requests.by_routing_id[self.sessions[-1][1]].close)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile it reads nothing, as if it were paused; connections and bytes wait in the kernel."""
        holding, goes_on = threading.Event(), threading.Event()
        self._loop.call_soon_threadsafe(lambda: (holding.set(), goes_on.wait(MOMENT)))
        assert holding.wait(MOMENT)
        try:
            yield
        finally:
            goes_on.set()

    def stop(self) -> None:
        """Ends as a process that dies: sessions closed, files gone, pools only where somebody has them mapped."""
        self.close()
        self.end_process()

    def end_process(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        self._port.start(self._on_event)
        if self.process is not None:
            os.close(self._port._process)
            self._port._process = os.pidfd_open(self.process.pid)

    def close(self) -> None:
        """Closes sockets, and leaves pools as a daemon does that ends: to whoever has them. The process goes on."""
        if self._thread.is_alive():
            self._call(self._port.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            for pool in self.pools.values():
                pool.close()

    def _call(self, work: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return result.result(MOMENT)

    def _on_event(self, event: WorkerEvent) -> None:
        match event:
            case SessionFrame(connection, frame, descriptors):
                self._session_frame(connection, codec.session_requests.decode(frame), descriptors)
            case WorkerFrame(_, frame, _):
                self.inbox.put(codec.worker_requests.decode(frame))
            case SessionClosed():
                self.inbox.put(event)

    def _session_frame(self, connection: int, request: Attach | Detach, descriptors: tuple[int, ...]) -> None:
        if isinstance(request, Detach):
            self._port.send_session(connection, codec.encode(Detached()))
            return
        self.attaches.append(request)
        if self.refusal is not None or self.silent:
            for descriptor in descriptors:
                os.close(descriptor)
            if self.refusal is not None:
                self._port.send_session(connection, codec.encode(Refused(self.refusal.code, self.refusal.text)))
            return
        kept = request.worker in self.pools or bool(descriptors)
        if request.worker in self.pools:
            for descriptor in descriptors:
                os.close(descriptor)
        elif descriptors:
            self.pools[request.worker] = self._provider.adopt(descriptors[0], Spec().pool_bytes)
        else:
            self.pools[request.worker] = self._provider.allocate(request.worker, Spec().pool_bytes)
        pool = self.pools[request.worker]
        session = os.urandom(16)
        self.sessions.append((connection, session))
        attached = Attached(
            session,
            self._port.endpoint,
            "daemon-0",
            self.incarnation,
            "tcp://127.0.0.1:7071",
            pool.size,
            pool.backing,
            kept,
            device=pool.device,
            pool_length=pool.length,
        )
        self._port.send_session(connection, codec.encode(attached), (pool.descriptor,))


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": UvLoop}


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "kvd.sock")


@pytest.fixture
def daemon(socket_path: str) -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(socket_path)
    yield daemon
    daemon.stop()


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    def kept() -> Counter[str]:
        found = Path("/proc/self/maps").read_text().count("memfd:kvd") * ["mapped pools"]
        for number in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:
                continue
        ours = ("mapped pools", "memfd:kvd", "pidfd", str(tmp_path))
        return Counter(name for name in found if any(part in name for part in ours))

    threads, before = threading.enumerate(), kept()
    yield
    wait_until_closed()
    assert os.listdir(tmp_path) == []
    assert kept() - before == Counter()
    assert [thread.name for thread in threading.enumerate() if thread not in threads] == []
