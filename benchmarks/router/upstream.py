"""A server that answers at once, as a prefill and as a decode server: `python -m benchmarks.router.upstream`."""

import asyncio
import json
from typing import Any

import uvloop
from aiohttp import web

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": "word " * 800, "max_tokens": 8, "stream": True}
"""What clients send."""
PREFILL = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
"""What a prefill server gets in place of these fields."""

_PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "kvd_ticket": "x" * 1024, "kvd_prompt": 1}
_PREFILLED = json.dumps({"choices": [{"text": "t"}], "kv_transfer_params": _PARAMS}).encode()
_TOKEN = b'data: {"choices": [{"text": "t"}]}\n\n'
_TOKENS = 8


async def _handle(request: web.BaseRequest) -> web.StreamResponse:
    if request.method == "GET":
        return web.Response()
    body = await request.json()
    if not body.get("stream"):
        return web.Response(body=_PREFILLED, content_type="application/json")
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for _ in range(_TOKENS):
        await stream.write(_TOKEN)
    await stream.write(b"data: [DONE]\n\n")
    return stream


async def announced(server: asyncio.Server) -> None:
    """Says where it serves, and serves."""
    host, port = server.sockets[0].getsockname()
    print(f"serving on http://{host}:{port}", flush=True)
    await server.serve_forever()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    await announced(await loop.create_server(web.Server(_handle, access_log=None), "127.0.0.1", 0))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
