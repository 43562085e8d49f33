"""HTTP/1.1 as the laboratory needs it: one request a connection, and answers that are read as they arrive."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, Final

LIMIT: Final = 16 * 1024 * 1024
"""Longest line or body that is read, in bytes."""


class HttpError(Exception):
    """The other side answered with an error, with something that is not HTTP, or stopped in the middle."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}" if status else text)
        self.status = status
        """Status of the answer; 0 where there was none."""


class Response:
    """An answer whose body has not been read yet."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        """By their names in small letters."""
        self._reader = reader

    async def read(self) -> bytes:
        """The body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in the parts that the other side wrote."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
        else:
            yield await self._reader.read(LIMIT)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The data of server-sent events, until the one that says that it was the last.

        Raises:
            HttpError: The body ended before that one.

        """
        rest = b""
        async for part in self.parts():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        raise HttpError(0, "the stream of tokens ended before its end")


@contextlib.asynccontextmanager
async def request(
    url: str, path: str, body: object | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Response]:
    """Asks `url` (http://host:port) for `path`: GET, or POST where there is a body, which is sent as JSON.

    `headers` are sent beside those that HTTP needs.

    Raises:
        HttpError: Nobody answered, not to the end, or not with HTTP.

    """
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=LIMIT)
        try:
            writer.write(_head(f"{host}:{port}", path, body, headers))
            yield await _response(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    except (OSError, EOFError, ValueError) as error:
        raise HttpError(0, f"{url}{path}: {type(error).__name__}: {error}") from error


def _head(host: str, path: str, body: object | None, headers: Mapping[str, str]) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def _response(reader: asyncio.StreamReader) -> Response:
    status, headers = await read_head(reader)
    return Response(int(status.split()[1]), headers, reader)


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The first line of a request or an answer, and its headers by their names in small letters."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


async def get(url: str, path: str) -> bytes:
    """The body of an answer to GET.

    Raises:
        HttpError: There was none, or its status is not 200.

    """
    async with request(url, path) as response:
        return _checked(response, await response.read())


async def post(url: str, path: str, body: object) -> Any:
    """The JSON of an answer to POST.

    Raises:
        HttpError: There was none, or its status is not 200.

    """
    async with request(url, path, body) as response:
        return json.loads(_checked(response, await response.read()))


def _checked(response: Response, body: bytes) -> bytes:
    if response.status != 200:
        raise HttpError(response.status, body.decode(errors="replace"))
    return body
