"""Requests to the servers behind the router, with a deadline for each stage."""

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from yarl import URL

from kvd.errors import ErrorCode, Unavailable
from kvd.limits import MAX_ERROR_TEXT
from kvd.router import limits
from kvd.router.events import Beginning, Said
from kvd.router.servers import Server

_FOR_CLIENTS = ("Content-Type", "Retry-After")
"""The headers of an answer that are passed on."""

_FAILURES = (TimeoutError, aiohttp.ClientError, OSError)
"""What aiohttp raises if a server fails."""

_REFUSALS = range(400, 500)
_BUSY = HTTPStatus.TOO_MANY_REQUESTS

_LAST_EVENT = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
"""How a stream ends."""
_LAST_BYTES = max(len(event) for event in _LAST_EVENT)


@dataclass(frozen=True, slots=True)
class Whole:
    """A server's whole answer; of its headers those that a client gets."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ServerFailed(Unavailable):
    """`server` gave no answer, a broken one, a 5xx or a 429. Raised only before any of its answer was passed on.

    `answer`: what the client gets if nobody else serves it, instead of this error. `lost`: the server is at fault for
    certain, since it cannot be reached or broke off; otherwise the request may be one that no server can serve.
    """

    def __init__(
        self, code: ErrorCode, server: Server, what: str, *, answer: Whole | None = None, lost: bool = False
    ) -> None:
        super().__init__(code, f"{server.name} {what}")
        self.server = server
        self.answer = answer
        self.lost = lost

    @property
    def is_certain(self) -> bool:
        """Whether it would not serve the request in another way either: it is lost, late, or has enough to do."""
        return self.lost or self.answer is not None or self.code is ErrorCode.DEADLINE


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that servers may take."""

    prefill: float
    """For a whole prefill."""
    decode: float
    """Until a decode server's first token, and between any two. An answer that is not streamed shows neither."""


class Sent:
    """Whether a server may have got a request, and whether on a connection that was kept."""

    def __init__(self) -> None:
        self.whole = False
        self.reused = False


_sending: ContextVar[Sent] = ContextVar("_sending")
"""What is being sent; whoever makes a connection for it knows nothing else of it."""


class Answer:
    """A server's answer, whose body is read as it comes."""

    def __init__(self, server: Server, response: aiohttp.ClientResponse, deadline: float | None = None) -> None:
        self.server = server
        self._response = response
        self._deadline = deadline
        """In the loop's time, for it to say something."""
        self._last = b""
        self.is_whole = False
        """Whether its end has been read: of a stream its last event, behind which clients may close at once."""
        self.status = response.status
        self.headers = {"Content-Type": "application/json"}
        self.headers |= {name: value for name in _FOR_CLIENTS if _is_fit(value := response.headers.get(name, ""))}
        self.is_stream = self.headers["Content-Type"].lower().startswith("text/event-stream")
        """Whether it consists of events."""

    async def read(self, most: int) -> bytes:
        """The body.

        Raises:
            ServerFailed: It is broken off, late, or longer than `most` bytes.

        """
        parts: list[bytes] = []
        size = 0
        while part := await self.part():
            size += len(part)
            if size > most:
                raise ServerFailed(ErrorCode.TOO_LARGE, self.server, f"answered with more than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    async def refusal(self) -> Whole:
        """All of an answer that only says why the request was not served.

        Raises:
            ServerFailed: It is broken off, late or too long.

        """
        try:
            async with asyncio.timeout(limits.REFUSAL_SECONDS):
                return Whole(self.status, self.headers, await self.read(limits.REFUSAL_BYTES))
        except TimeoutError as error:
            raise _failure(self.server, error) from error

    async def beginning(self) -> bytes:
        """What the body begins with, once it has said something.

        Raises:
            ServerFailed: It says nothing or an error, is broken off or late.

        """
        try:
            async with asyncio.timeout_at(self._deadline):  # each byte is no progress, nor is a comment
                said, first = await self._first()
        except TimeoutError as error:
            raise _failure(self.server, error) from error
        if said is Said.NOTHING:
            raise ServerFailed(ErrorCode.PEER_LOST, self.server, "answered with nothing")
        if said is Said.ERROR:
            text = first[:MAX_ERROR_TEXT].decode(errors="replace").strip()
            raise ServerFailed(ErrorCode.PEER_LOST, self.server, f"failed: {text}")
        return first

    async def _first(self) -> tuple[Said, bytes]:
        if not self.is_stream:
            first = await self.part()
            return Said.SOMETHING if first else Said.NOTHING, first
        beginning, said = Beginning(), Said.NOTHING
        while said is Said.NOTHING and (part := await self.part()):
            said = beginning.add(part)
        return said, bytes(beginning.held)

    async def part(self) -> bytes:
        """More of the body, empty at its end.

        Raises:
            ServerFailed: It is broken off or late.

        """
        try:
            part = await self._response.content.readany()
        except _FAILURES as error:
            raise _failure(self.server, error) from error
        self._last = (self._last + part[-_LAST_BYTES:])[-_LAST_BYTES:]  # the network may have cut the event
        self.is_whole = not part or self._last.endswith(_LAST_EVENT)
        return part


class Upstream:
    """Connections to servers, kept for a moment after each use. Use as an async context manager."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._prefill = aiohttp.ClientTimeout(total=timeouts.prefill, sock_connect=limits.CONNECT_SECONDS)
        self._whole = aiohttp.ClientTimeout(sock_connect=limits.CONNECT_SECONDS)
        self._timeouts = timeouts
        self._probe = aiohttp.ClientTimeout(total=limits.PROBE_SECONDS)

    async def __aenter__(self) -> "Upstream":
        # What is in flight, and the releases, bound the connections.
        self._session = _session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.KEEP_SECONDS, socket_factory=_socket)
        )
        self._again = _session(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket))
        """For what is sent again: each request on a connection of its own."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._again.close()

    @contextlib.asynccontextmanager
    async def post(
        self,
        server: Server,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        sent: Sent,
        *,
        streamed: bool = True,
        early: bool = False,
    ) -> AsyncIterator[Answer]:
        """The server's answer, once its head is there. Leaving early closes the connection, so that it aborts.

        A decode server's answer that is not `streamed` has no deadline here: nothing of it comes before the last token.
        One that gets the request `early` has the time of the prefill, too.

        `sent` tells, also if this fails, whether the server may have got the request.

        Raises:
            ServerFailed: It cannot be reached, breaks off, is late, or answers with a 429, or neither a 200 nor a 4xx.

        """
        deadline = None
        with server.busy():
            timing = self._prefill if server.role == "prefill" else self._whole
            if server.role == "decode" and streamed:
                seconds = self._timeouts.decode + self._timeouts.prefill * early
                timing = aiohttp.ClientTimeout(sock_read=seconds, sock_connect=limits.CONNECT_SECONDS)
                deadline = asyncio.get_running_loop().time() + seconds
            try:
                async with asyncio.timeout_at(deadline):
                    response = await self._posted(server.url + path, body, headers, sent, timing)
            except _FAILURES as error:
                raise _failure(server, error) from error
            try:
                answer = Answer(server, response, deadline)
                if answer.status != HTTPStatus.OK and (answer.status not in _REFUSALS or answer.status == _BUSY):
                    raise _failed(server, await answer.refusal())
                yield answer
            finally:
                response.close()  # one that was read to its end has given its connection back already

    async def _posted(
        self, url: str, body: bytes, headers: Mapping[str, str], sent: Sent, timing: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """The answer's head. What a kept connection that the server closes just then has swallowed is sent again.

        Once, and not on another one that was kept: a server may have closed it for this request.
        """
        session = self._session
        while True:
            sent.reused = sent.whole = True
            _sending.set(sent)
            try:
                response = await session.post(
                    url,
                    data=body if len(body) <= limits.LARGE_BYTES else io.BytesIO(body),  # piece by piece
                    headers=headers,
                    timeout=timing,
                    allow_redirects=False,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                sent.whole = session is self._again  # this time it has not got the request
                raise
            except _FAILURES as error:
                closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if not (closed and sent.reused):
                    raise
                session = self._again
            else:
                return response

    async def params(self, server: Server, room: int) -> bytes:
        """What the bootstrap server of an SGLang's prefill server answers about a room, once its prompt is computed.

        Raises:
            ServerFailed: It cannot be reached, breaks off, is late, or says that the room has no offer.

        """
        host = f"[{server.place.host}]" if ":" in server.place.host else server.place.host
        url = f"http://{host}:{server.place.bootstrap_port}/kvd/rooms/{room}"
        try:
            async with self._session.post(url, timeout=self._prefill, allow_redirects=False) as response:
                body = await Answer(server, response).read(limits.PREFILL_ANSWER_BYTES)
        except _FAILURES as error:
            raise _failure(server, error) from error
        if response.status != HTTPStatus.OK:
            said = body[:MAX_ERROR_TEXT].decode(errors="replace")
            raise ServerFailed(
                ErrorCode.PEER_LOST, server, f"answered at its bootstrap port with status {response.status}: {said}"
            )
        return body

    async def reach(self, server: Server) -> None:
        """Connects to it as a request would, and asks for nothing.

        Raises:
            ServerFailed: It cannot be reached.

        """
        connector = self._session.connector
        assert connector is not None  # noqa: S101  # the session is open
        # A connection of another kind may fail where requests get through: a name has several addresses, is looked up
        # slowly, or by many at once.
        request = aiohttp.ClientRequest("GET", URL(server.url), loop=asyncio.get_running_loop())
        try:
            connection = await connector.connect(request, [], self._whole)
        except TimeoutError as error:
            raise _unreached(server, error) from error
        except _FAILURES as error:
            raise _failure(server, error) from error
        connection.close()

    async def get(self, server: Server, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of what `server` answers within moments.

        Raises:
            ServerFailed: It does not.

        """
        try:
            async with self._session.get(server.url + path, headers=headers, timeout=self._probe) as response:
                answer = Answer(server, response)
                return answer.status, await answer.read(limits.PROBE_BYTES)
        except _FAILURES as error:
            raise _failure(server, error) from error


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=limits.CHUNK_BYTES,
        max_field_size=limits.ANSWER_HEADER_BYTES,
        headers={"Accept-Encoding": "identity"},
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that notices when the other host is no more there, though nothing is to be sent."""
    if sent := _sending.get(None):
        sent.reused = False
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    seconds = limits.PROBES * limits.SILENT_SECONDS
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.SILENT_SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.SILENT_SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, limits.PROBES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    return made


def _is_fit(header: str) -> bool:
    """Whether clients can read it."""
    return 0 < len(header) <= limits.PASSED_ON_CHARS and header.isascii() and header.isprintable()


def _failed(server: Server, answer: Whole) -> ServerFailed:
    said = answer.body[:MAX_ERROR_TEXT].decode(errors="replace")
    code = ErrorCode.OVERLOADED if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else ErrorCode.PEER_LOST
    passed_on = answer if answer.status == _BUSY else None
    return ServerFailed(code, server, f"answered with status {answer.status}: {said}", answer=passed_on)


def _failure(server: Server, error: Exception) -> ServerFailed:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return _unreached(server, error)
        case TimeoutError():
            return ServerFailed(ErrorCode.DEADLINE, server, "did not answer in time")
        case aiohttp.ClientConnectorError():
            return _unreached(server, error.os_error)
        case _:
            text = f"broke off: {error or type(error).__name__}"
    return ServerFailed(ErrorCode.PEER_LOST, server, text, lost=True)


def _unreached(server: Server, error: OSError) -> ServerFailed:
    text = f"cannot be reached: {error.strerror or str(error) or 'it does not answer'}; is it running?"
    return ServerFailed(ErrorCode.PEER_LOST, server, text, lost=True)
