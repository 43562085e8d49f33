"""The answer to one client: streamed at the client's pace, or an error in the shape of OpenAI's."""

import asyncio
import contextlib
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from kvd.errors import BadRequest, ErrorCode, KvdError, Unavailable
from kvd.router import limits
from kvd.router.events import ENDS

_BAD = {ErrorCode.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ErrorCode.UNKNOWN_REQUEST: HTTPStatus.NOT_FOUND}
_UNAVAILABLE = {
    ErrorCode.OVERLOADED: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
}


class ClientGone(Unavailable):
    """The client takes nothing more."""


class Reply:
    """The answer to `request`."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._last = b""
        self.response: web.StreamResponse | None = None
        """Once it has begun."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the head.

        Raises:
            ClientGone: `CANCELLED`, it has disconnected.

        """
        self.response = web.StreamResponse(status=status, headers=headers)
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone(ErrorCode.CANCELLED, "the client left as its answer began") from error

    async def send(self, part: bytes) -> None:
        """Sends part of the body, and waits until the client has taken most of what was sent.

        Raises:
            ClientGone: `CANCELLED`, it has disconnected, or took nothing for too long.

        """
        assert self.response is not None  # noqa: S101  # it has begun
        self._last = (self._last + part[-4:])[-4:]  # the network may have cut the end of an event
        try:
            async with asyncio.timeout(limits.CLIENT_SECONDS):
                await self.response.write(part)
        except (TimeoutError, ConnectionError) as error:
            raise ClientGone(ErrorCode.CANCELLED, "the client took nothing more of its answer") from error

    async def fail(self, error: KvdError) -> web.StreamResponse:
        """Answers with `error`. An answer that has begun is broken off; a stream of events says why before."""
        if self.response is None:
            return error_answer(error)
        transport = self._request.transport
        if transport is None:
            return self.response
        if isinstance(error, ClientGone):
            transport.abort()  # what it has not taken would keep the connection open
            return self.response
        if self.response.content_type == "text/event-stream" and self._last.endswith(ENDS):
            with contextlib.suppress(ClientGone):
                await self.send(b"data: " + _encode(error) + b"\n\n")
        transport.close()  # without the mark of a whole body
        asyncio.get_running_loop().call_later(limits.CLIENT_SECONDS, _abort, self._request.protocol)
        return self.response


def _abort(protocol: web.RequestHandler) -> None:
    """Closes the connection unless its client has taken all that was left to be sent."""
    if protocol.transport is not None:
        protocol.transport.abort()


def error_answer(error: KvdError) -> web.Response:
    """`error` as OpenAI's clients expect it."""
    if isinstance(error, BadRequest):
        status = _BAD.get(error.code, HTTPStatus.BAD_REQUEST)
    else:
        status = _UNAVAILABLE.get(error.code, HTTPStatus.BAD_GATEWAY)
    headers = {"Retry-After": "1"} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    return web.Response(body=_encode(error), status=status, headers=headers, content_type="application/json")


def _encode(error: KvdError) -> bytes:
    kind = "invalid_request_error" if isinstance(error, BadRequest) else "server_error"
    return msgspec.json.encode({"error": {"message": error.text, "type": kind, "param": None, "code": error.code}})
