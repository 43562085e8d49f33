"""A small router, as a process: each completion is prefilled on one server and decoded on the other.

Run as `python -m tests.vllm.testbed.router PORT PREFILL DECODE`. It passes on the kv_transfer_params of the prefill
side without looking into them, as the routers do that people run in front of vLLM.
"""

import asyncio
import json
import sys

from tests.vllm.testbed.client import PATH, prefill
from tests.vllm.testbed.http import HttpError, Response, read_head, request


class Router:
    """Between the servers at `prefill` and `decode` (http://host:port)."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def serve(self, port: int) -> None:
        """Serves on 127.0.0.1, until cancelled."""
        server = await asyncio.start_server(self.connected, "127.0.0.1", port)
        async with server:
            await server.serve_forever()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request."""
        try:
            await self._answer(reader, writer)
        except HttpError as error:
            _reply(writer, error.status or 502, str(error))
        except (OSError, EOFError, ValueError) as error:
            _reply(writer, 400, f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, headers = await read_head(reader)
        method, path, _ = first.split()
        if method == "GET":
            _reply(writer, 200, "")
            return
        if path != PATH:
            raise ValueError(f"{path}: the one path is {PATH}")
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        params = await prefill(self._prefill, body)
        async with request(self._decode, PATH, body | {"kv_transfer_params": params}) as response:
            await _relay(response, writer)


async def _relay(response: Response, writer: asyncio.StreamWriter) -> None:
    """Sends back what the decode side answers, as it comes; an answer that breaks off breaks off here too."""
    kind = response.headers.get("content-type", "application/json")
    writer.write(f"HTTP/1.1 {response.status} -\r\nContent-Type: {kind}\r\n".encode())
    writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
    try:
        async for part in response.parts():
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
    except (OSError, EOFError):
        return
    writer.write(b"0\r\n\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


if __name__ == "__main__":
    asyncio.run(Router(*sys.argv[2:4]).serve(int(sys.argv[1])))
