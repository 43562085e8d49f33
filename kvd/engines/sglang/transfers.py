"""The thread that has the session with the daemon and the control socket to other engines.

Neither waits for a step of the engine: a pull begins when its ticket arrives. The engine's thread makes `call`s, which
run on this one.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import zmq
import zmq.asyncio

from kvd.client import AsyncWorker, DaemonError, Disconnected, Reattached
from kvd.client.events import Event, name_of
from kvd.engines.kernels import Event as Kernels
from kvd.engines.pool import attach, log_session
from kvd.engines.sglang import messages
from kvd.engines.sglang.control import read_messages
from kvd.engines.sglang.settings import Settings
from kvd.errors import ErrorCode, KvdError
from kvd.layout import CacheSpec

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 3600.0
_LOOKS_SECONDS = 0.001
_AGAIN_SECONDS = 0.01

_What = TypeVar("_What")


class Half(Protocol):
    """The producer or the consumer."""

    def told(self, message: messages.Message) -> None:
        """Another engine's message."""

    def on_event(self, event: Event) -> None:
        """The daemon's event."""

    def abandon(self, number: int, reason: str) -> None:
        """Fails a room."""


class Transfers:
    """`attach`, then `serve`; `client` belongs to this thread."""

    client: AsyncWorker

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = ""
        self._defects = 0
        threading.Thread(target=self._loop.run_forever, name="kvd", daemon=True).start()

    def attach(self, settings: Settings, spec: CacheSpec) -> None:
        """Attaches to the daemon.

        Raises:
            KvdError: as `Worker.attach`.

        """
        self._name = settings.worker

        def here(*args: Any, **kwargs: Any) -> AsyncWorker:
            return asyncio.run_coroutine_threadsafe(AsyncWorker.attach(*args, **kwargs), self._loop).result()

        self.client = attach(here, settings.socket, settings.worker, spec, settings.attach_timeout)

    def serve(self, half: Half, control: zmq.Socket[bytes]) -> None:
        """From now on `half` hears the daemon's events and the messages that arrive at `control`."""

        async def serve() -> None:
            for coroutine in (self._events(half), self._messages(half, control)):
                self._start(coroutine)

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(serve(), self._loop)])

    def call(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Calls `function` on this thread; calls are made in order."""
        self._loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def cancel(self, name: str) -> None:
        """Cancels a pull or an offer: again and again while the queue to the daemon is full.

        If the daemon is away, it ends with its time, or with the daemon.
        """
        try:
            self.client.cancel(name)
        except KvdError as error:
            if error.code is ErrorCode.OVERLOADED:
                self._loop.call_later(_AGAIN_SECONDS, self.cancel, name)

    def call_after(self, kernels: Kernels, call: Callable[[], None]) -> None:
        """Calls it on this thread once the kernels have ended, or nobody can know: who is called asks again."""

        async def wait() -> None:
            with contextlib.suppress(Exception):
                while not kernels.query():  # noqa: ASYNC110 - CUDA tells nobody
                    await asyncio.sleep(_LOOKS_SECONDS)
            call()

        self._start(wait())

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_end)

    async def _events(self, half: Half) -> None:
        while True:
            for event in await self.client.wait(_WAIT_SECONDS):
                if isinstance(event, Disconnected | Reattached | DaemonError):
                    log_session(event, self._name)
                self._tell(half, half.on_event, event, _room_of(event))

    async def _messages(self, half: Half, control: zmq.Socket[bytes]) -> None:
        socket = zmq.asyncio.Socket.from_socket(control)
        await read_messages(socket, lambda message: self._tell(half, half.told, message, message.room))

    def _tell(self, half: Half, tell: Callable[[_What], None], what: _What, room: int | None) -> None:
        """Fails the room if it raises, which is a defect: all other rooms go on."""
        try:
            tell(what)
        except Exception as error:
            self._defects += 1
            if self._defects.bit_count() == 1:  # the 1st, 2nd, 4th, ...: perhaps anybody can bring it about
                logger.exception("%d defects, the last one of room %s; it fails, others go on", self._defects, room)
            if room is not None:
                self._tell(half, lambda reason: half.abandon(room, reason), f"a defect: {error!r}", None)


def _room_of(event: Event) -> int | None:
    """The number with which the halves begin the names of their pulls and offers."""
    number = name_of(event).partition("#")[0]
    return int(number) if number.isdecimal() else None


def _log_end(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("transfers have ended: their requests will run into their time-outs", exc_info=error)
