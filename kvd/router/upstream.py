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

from kvd.errors import ErrorCode
from kvd.limits import MAX_ERROR_TEXT
from kvd.router import limits
from kvd.router.answer import FAILURES, Answer, ServerFailed, failure, unreached
from kvd.router.servers import Server


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
            except FAILURES as error:
                raise failure(server, error) from error
            try:
                answer = Answer(server, response, deadline)
                if not answer.is_for_clients:
                    raise await answer.failed()
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
            except FAILURES as error:
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
        except FAILURES as error:
            raise failure(server, error) from error
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
            raise unreached(server, error) from error
        except FAILURES as error:
            raise failure(server, error) from error
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
        except FAILURES as error:
            raise failure(server, error) from error


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
