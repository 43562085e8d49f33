"""The least that can stand between a client and both servers: `python -m benchmarks.router.relay PREFILL DECODE`.

It wakes up as often as a router does, and understands nothing: what it adds is what a process between them waits for a
core. Each request prefills the same prompt, and the answer is passed on as it comes.
"""

import asyncio
import contextlib
import json
import re
import sys
from urllib.parse import urlsplit

import uvloop

from benchmarks.router.upstream import BODY, PATH, PREFILL

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
"""The last chunk of a stream."""


class _Relay:
    """Between clients and the servers at these URLs; each connection of a client has one to either server."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._servers = [(url.hostname, url.port) for url in (urlsplit(prefill), urlsplit(decode))]
        body = json.dumps(BODY | PREFILL).encode()
        self._prefill = b"POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)) + body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection of a client."""
        (prefill, to_prefill), (decode, to_decode) = [await asyncio.open_connection(*at) for at in self._servers]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has ended
            while True:
                request = await _message(reader)
                to_prefill.write(self._prefill)
                await _message(prefill)
                to_decode.write(request)
                part = b""
                while not part.endswith(_END):
                    part = await decode.read(1 << 16)
                    writer.write(part)
        for each in (to_prefill, to_decode, writer):
            each.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head + await reader.readexactly(int(found[1]) if found else 0)


async def _serve(prefill: str, decode: str) -> None:
    server = await asyncio.start_server(_Relay(prefill, decode).serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"serving on http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(*sys.argv[1:]))
