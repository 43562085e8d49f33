"""Clients' connections: how many there are, and which one goes when there are too many."""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Iterator
from typing import cast

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvd.router import limits
from kvd.router.metrics import Metrics

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""What is no HTTP is answered so and counted: a line for each would let strangers fill the log."""


class Connections:
    """The open ones. One too many closes the oldest of those that wait for a request, of the client with the most."""

    def __init__(self) -> None:
        self._open: set[Connection] = set()
        self._waiting: dict[str, dict[Connection, None]] = {}
        """By client, oldest first: those of which no whole request is here."""

    def opened(self, connection: "Connection") -> None:
        """Counts `connection`."""
        self._open.add(connection)
        self._waiting.setdefault(connection.client, {})[connection] = None
        if len(self._open) > limits.CONNECTIONS:
            most = max(self._waiting.values(), key=len)
            oldest = next(iter(most))
            self._forget(oldest)
            oldest.abort()  # a client that takes nothing of its last answer would keep it open

    def closed(self, connection: "Connection") -> None:
        """It is no more."""
        self._open.discard(connection)
        self._forget(connection)

    @contextlib.contextmanager
    def serving(self, connection: "Connection") -> Iterator[None]:
        """While its request is served, `connection` is not closed for others, and takes no other request."""
        self._forget(connection)
        connection.serves = True
        connection.check_alone()
        try:
            yield
        finally:
            connection.serves = False
            if connection in self._open:
                self._waiting.setdefault(connection.client, {})[connection] = None

    def _forget(self, connection: "Connection") -> None:
        waiting = self._waiting.get(connection.client, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.client, None)


class Connection(web.RequestHandler):
    """One of them. `client` is whose it is: an IPv4 address, or the first half of an IPv6 address."""

    def __init__(self, server: web.Server, connections: Connections, metrics: Metrics) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as `web.Server` allows
            auto_decompress=False,  # what is small on the wire must not grow here
            keepalive_timeout=limits.IDLE_SECONDS,
            max_line_size=limits.HEADER_BYTES,
            max_field_size=limits.HEADER_BYTES,
            max_headers=limits.HEADERS,
            lingering_time=limits.LINGER_SECONDS,
            read_bufsize=limits.CHUNK_BYTES,
            logger=logger,
        )
        self._connections = connections
        self._metrics = metrics
        self.client = ""
        self.serves = False
        """Whether a request of which the whole body is here is served."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts only now: a loop may accept many before it makes the first."""
        super().connection_made(transport)
        self._open_transport = cast("asyncio.Transport", transport)  # aiohttp's is None from the beginning of its close
        peer = transport.get_extra_info("peername")
        self.client = client_of(peer[0]) if peer else ""
        self._connections.opened(self)
        if not peer:  # it has reset the connection already
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Counts it no more."""
        self._connections.closed(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Ends it at once, without what its client has not taken yet; also one that is closing already."""
        self._open_transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes what the client sends."""
        super().data_received(data)
        self.check_alone()

    def check_alone(self) -> None:
        """Ends the connection if the next request has come before the answer to the last one has ended.

        Reading stops behind a few of them, or one large body, and then a client would not be seen to leave.
        """
        if self.serves and self._messages:
            self.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Counts what is no HTTP."""
        if isinstance(exc, HttpProcessingError):
            self._metrics.malformed.inc()
        return super().handle_error(request, status, exc, message)


def connection_of(request: web.BaseRequest) -> Connection:
    """The one that `request` came by."""
    assert isinstance(request.protocol, Connection)  # noqa: S101  # the port makes no others
    return request.protocol


def client_of(host: str) -> str:
    """Whose the address `host` is: one IPv6 client has a whole /64 of them."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))
