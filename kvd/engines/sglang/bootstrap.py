"""SGLang's bootstrap server of a prefill server, which runs beside its engine, in another process."""

import asyncio

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvd.engines.sglang.desk import Desk
from kvd.engines.sglang.messages import Address
from kvd.errors import KvdError

_LOOKS_SECONDS = 1.0
"""How often it looks whether a router still waits."""


class KvdBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Where decode engines ask for the prefill engine's control socket, and routers for a room's ticket."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self._desk: Desk | None = None
        self.app.router.add_post("/kvd/rooms/{room:[0-9]{1,19}}", self._room)

    async def _room(self, request: web.Request) -> web.Response:
        """The parameters of a room's offer, as `kv_transfer_params`."""
        self._desk = self._desk or Desk(self._engine)
        asked = asyncio.ensure_future(self._desk.params(int(request.match_info["room"])))
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOKS_SECONDS))[0]:
                if request.transport is None or request.transport.is_closing():
                    asked.cancel()  # the router is gone
            params = await asked
        except KvdError as error:
            return web.json_response({"error": {"message": error.text, "code": str(error.code)}}, status=503)
        return web.json_response({"kv_transfer_params": params})

    def _engine(self) -> tuple[Address, ...]:
        if not self._is_ready():
            return ()
        ranks = self.prefill_port_table[0][0]
        return tuple((ranks[number][0].rank_ip, ranks[number][0].rank_port) for number in sorted(ranks))
