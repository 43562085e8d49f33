"""The least that can stand between a client and both servers: `python -m benchmarks.router.relay KIND PREFILL DECODE`.

It wakes up as often as a router does, and decides nothing. `bytes` passes them on, so that what it adds is what a
process between them waits for a core. `http` serves and asks by the router's library, and adds what that takes.
"""

import asyncio
import contextlib
import json
import re
import sys
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.router.upstream import BODY, PATH, PREFILL, announced

KINDS: Final = ("bytes", "http")
_PREFILL: Final = json.dumps(BODY | PREFILL).encode()
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_END: Final = b"0\r\n\r\n"
"""The last chunk of a stream."""


class _Bytes:
    """Between clients and the servers at these URLs; each connection of a client has one to either server."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._servers = [(url.hostname, url.port) for url in (urlsplit(prefill), urlsplit(decode))]
        head = b"POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
        self._prefill = head % (PATH.encode(), len(_PREFILL)) + _PREFILL

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection of a client."""
        (prefill, to_prefill), (decode, to_decode) = [await asyncio.open_connection(*at) for at in self._servers]
        with contextlib.suppress(EOFError, ConnectionError):  # the client or a server has ended
            while True:
                request = await _message(reader)
                to_prefill.write(self._prefill)
                await _message(prefill)
                to_decode.write(request)
                part = b""
                while not part.endswith(_END):
                    part = await decode.read(1 << 16)
                    if not part:
                        raise EOFError
                    writer.write(part)
        for each in (to_prefill, to_decode, writer):
            each.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head + await reader.readexactly(int(found[1]) if found else 0)


class _Http:
    """The same by aiohttp."""

    def __init__(self, prefill: str, decode: str, session: aiohttp.ClientSession) -> None:
        self._prefill, self._decode = prefill + PATH, decode + PATH
        self._session = session

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serves one request."""
        body = await request.read()
        async with self._session.post(self._prefill, data=_PREFILL) as answer:
            await answer.read()
        async with self._session.post(self._decode, data=body) as answer:
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            async for part in answer.content.iter_any():
                await stream.write(part)
        return stream


async def _serve(kind: str, prefill: str, decode: str) -> None:
    async with aiohttp.ClientSession() as session:
        if kind == "bytes":
            server = await asyncio.start_server(_Bytes(prefill, decode).serve, "127.0.0.1", 0)
        else:
            handler = web.Server(_Http(prefill, decode, session).handle, access_log=None)
            server = await asyncio.get_running_loop().create_server(handler, "127.0.0.1", 0)
        await announced(server)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(*sys.argv[1:]))
