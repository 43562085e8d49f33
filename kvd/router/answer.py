"""What a server answers, and the ways in which it fails to."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from kvd.errors import ErrorCode, Unavailable
from kvd.limits import MAX_ERROR_TEXT
from kvd.router import limits
from kvd.router.events import Beginning, Said
from kvd.router.servers import Server

_FOR_CLIENTS = ("Content-Type", "Retry-After")
"""The headers of an answer that are passed on."""

FAILURES = (TimeoutError, aiohttp.ClientError, OSError)
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

    @property
    def is_for_clients(self) -> bool:
        """Whether the server has served the request, or says what is wrong with it."""
        return self.status == HTTPStatus.OK or (self.status in _REFUSALS and self.status != _BUSY)

    async def failed(self) -> ServerFailed:
        """The error of an answer that is not for clients.

        Raises:
            ServerFailed: It is broken off, late or too long.

        """
        answer = await self.refusal()
        said = answer.body[:MAX_ERROR_TEXT].decode(errors="replace")
        code = ErrorCode.OVERLOADED if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else ErrorCode.PEER_LOST
        passed_on = answer if answer.status == _BUSY else None
        return ServerFailed(code, self.server, f"answered with status {answer.status}: {said}", answer=passed_on)

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
            raise failure(self.server, error) from error

    async def beginning(self) -> bytes:
        """What the body begins with, once it has said something.

        Raises:
            ServerFailed: It says nothing or an error, is broken off or late.

        """
        try:
            async with asyncio.timeout_at(self._deadline):  # each byte is no progress, nor is a comment
                said, first = await self._first()
        except TimeoutError as error:
            raise failure(self.server, error) from error
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
        except FAILURES as error:
            raise failure(self.server, error) from error
        self._last = (self._last + part[-_LAST_BYTES:])[-_LAST_BYTES:]  # the network may have cut the event
        self.is_whole = not part or self._last.endswith(_LAST_EVENT)
        return part


def _is_fit(header: str) -> bool:
    """Whether clients can read it."""
    return 0 < len(header) <= limits.PASSED_ON_CHARS and header.isascii() and header.isprintable()


def failure(server: Server, error: Exception) -> ServerFailed:
    """What one of `FAILURES` says of `server`."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return unreached(server, error)
        case TimeoutError():
            return ServerFailed(ErrorCode.DEADLINE, server, "did not answer in time")
        case aiohttp.ClientConnectorError():
            return unreached(server, error.os_error)
        case _:
            text = f"broke off: {error or type(error).__name__}"
    return ServerFailed(ErrorCode.PEER_LOST, server, text, lost=True)


def unreached(server: Server, error: OSError) -> ServerFailed:
    """The error of a server to which no connection could be made."""
    text = f"cannot be reached: {error.strerror or str(error) or 'it does not answer'}; is it running?"
    return ServerFailed(ErrorCode.PEER_LOST, server, text, lost=True)
