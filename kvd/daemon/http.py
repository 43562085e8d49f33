"""The HTTP port: /metrics for Prometheus, /livez and /readyz for supervisors.

It has a thread and a loop of its own, so that it still answers when the daemon's loop hangs. A connection is for one
request and limited in time; if too many are open, the oldest of the address with the most is closed. It rests after
each connection and each read, so that it takes a small part of the interpreter's time, however many there are.
"""

import asyncio
import collections
import contextlib
import socket
import threading
import time
from http import HTTPStatus
from typing import NamedTuple

import h11
import structlog
from prometheus_client import CollectorRegistry, Counter

from kvd import limits
from kvd.daemon.health import Health
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.exposition import Exposition

_TEXT = "text/plain; charset=utf-8"
_ACCEPT_PAUSE_SECONDS = 0.5

_log = structlog.get_logger("kvd.http")


class _Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    kind: str = _TEXT


class HttpServer:
    """Serves until closed. `address` is host:port; port 0 takes a free one.

    Raises:
        BadRequest: `BAD_CONFIG`, the address cannot be bound.

    """

    def __init__(self, address: str, registry: CollectorRegistry, health: Health) -> None:
        self._exposition = Exposition(registry)
        self._health = health
        self._malformed = Counter(
            "kvd_http_malformed",
            "Requests to the HTTP port that are no HTTP, or have a header that says nothing; answered with status 4xx.",
            registry=registry,
        )
        self._open: dict[asyncio.Task[None], str] = {}
        """Remote address by connection, oldest first."""
        self._defects: set[type[BaseException]] = set()
        self._used = self._rested = 0.0
        """Seconds of a core that this thread has used, and when it has rested for them."""
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            name = host.strip("[]").encode("idna").decode()  # `bind` would do it, and leave its socket where it fails
            self._socket = socket.create_server((name, int(port)), family=family, backlog=limits.HTTP_BACKLOG)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the latter two of names that are none
            raise refusal(ErrorCode.BAD_CONFIG, f"http: cannot listen on {address!r}: {error}") from error
        bound, number = self._socket.getsockname()[:2]
        self.address = f"[{bound}]:{number}" if family == socket.AF_INET6 else f"{bound}:{number}"
        """The host:port of the listening socket."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stopping.wait()
        accepting.cancel()
        self._socket.close()

    async def _accept(self) -> None:
        self._socket.setblocking(False)
        while True:
            try:
                accepted, (address, *_) = await self._loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is left, or the client has gone already
                _log.warning("HTTP connection not accepted", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._open) >= limits.MAX_HTTP_CONNECTIONS:
                self._make_room()
            task = asyncio.create_task(self._connected(accepted))
            self._open[task] = address
            task.add_done_callback(self._closed)
            await asyncio.sleep(self._rest(time.monotonic(), time.thread_time()))

    def _rest(self, now: float, used: float) -> float:
        """Seconds until it goes on, for this thread to have no more than its share of a core."""
        rested = max(self._rested, now) + (used - self._used) / limits.HTTP_SHARE
        self._rested = min(rested, now + limits.HTTP_REST_SECONDS)
        self._used = used
        return self._rested - now

    async def _connected(self, accepted: socket.socket) -> None:
        # A time-out or a lost connection concerns nobody.
        with accepted, contextlib.suppress(TimeoutError, OSError):
            accepted.setblocking(False)
            async with asyncio.timeout(limits.HTTP_SECONDS):
                await self._converse(accepted)

    def _closed(self, task: "asyncio.Task[None]") -> None:
        self._open.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None or type(error) in self._defects:
            return
        self._defects.add(type(error))  # each kind is logged once: whoever causes it may do so without end
        _log.error("an HTTP request failed, which is a defect; such ones are not logged again", exc_info=error)

    def _make_room(self) -> None:
        """Closes the oldest connection of the address with the most."""
        ((busiest, _),) = collections.Counter(self._open.values()).most_common(1)
        oldest = next(task for task, address in self._open.items() if address == busiest)
        del self._open[oldest]
        oldest.cancel()

    async def _converse(self, accepted: socket.socket) -> None:
        """Answers one request; then the client closes."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.MAX_HTTP_REQUEST_BYTES)
        try:
            lines = 0
            while (event := connection.next_event()) is h11.NEED_DATA:
                received = await self._receive(accepted)
                lines += received.count(b"\n")
                _check_lines(lines)
                connection.receive_data(received)
        except h11.RemoteProtocolError as error:
            self._malformed.inc()
            answer, wanted = _Answer(HTTPStatus(error.error_status_hint), f"{error}\n".encode()), True
        else:
            if not isinstance(event, h11.Request):
                return
            answer, wanted = self._answer(event), event.method != b"HEAD"
        headers = [("Content-Type", answer.kind), ("Content-Length", str(len(answer.body))), ("Connection", "close")]
        head = h11.Response(status_code=answer.status, reason=answer.status.phrase, headers=headers)
        parts = [
            connection.send(part) or b""
            for part in (head, h11.Data(data=answer.body if wanted else b""), h11.EndOfMessage())
        ]
        await self._loop.sock_sendall(accepted, b"".join(parts))
        accepted.shutdown(socket.SHUT_WR)
        while await self._receive(accepted):
            pass  # closing first would cut the answer short

    async def _receive(self, accepted: socket.socket) -> bytes:
        """What the client sends next: it may send without end, as fast as it can or in single bytes."""
        received = await self._loop.sock_recv(accepted, limits.MAX_HTTP_REQUEST_BYTES)
        await asyncio.sleep(self._rest(time.monotonic(), time.thread_time()))
        return received

    def _answer(self, request: h11.Request) -> _Answer:
        if request.method not in {b"GET", b"HEAD"}:
            return _Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET and HEAD are all there is\n")
        path = request.target.partition(b"?")[0]
        if path == b"/metrics":
            return self._scraped(dict(request.headers).get(b"accept", b"").decode("latin-1"))
        if path == b"/livez":
            if self._health.alive:
                return _Answer(HTTPStatus.OK, b"alive\n")
            why = b"the event loop, an actor or the transport does not answer\n"
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE, why)
        if path == b"/readyz":
            reasons = self._health.reasons
            lines = [f"{name}: {reason}" for name, reason in sorted(reasons.items())] or ["ready"]
            text = "\n".join((*lines, *self._health.notes(limits.MAX_REPORTED_PEERS), ""))
            return _Answer(HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, text.encode())
        return _Answer(HTTPStatus.NOT_FOUND, b"paths: /metrics, /livez, /readyz\n")

    def _scraped(self, accept: str) -> _Answer:
        try:
            body, kind = self._exposition.answer(accept)
        except BadRequest as error:
            self._malformed.inc()
            return _Answer(HTTPStatus.BAD_REQUEST, f"{error.text}\n".encode())
        return _Answer(HTTPStatus.OK, body, kind)


def _check_lines(lines: int) -> None:
    """Refuses a head before it is taken apart, line by line."""
    if lines > limits.MAX_HTTP_LINES:
        raise h11.RemoteProtocolError(f"more than {limits.MAX_HTTP_LINES} lines", error_status_hint=431)
