"""Whether a prefill and a decode server answer."""

import asyncio
import time
from collections.abc import Sequence

from kvd.router.limits import PROBE_SECONDS
from kvd.router.servers import Server, Servers
from kvd.router.upstream import ServerFailed, Upstream


class Health:
    """Asks servers for /health when somebody wants to know, and again only when the answer is old."""

    def __init__(self, groups: Sequence[Servers], upstream: Upstream) -> None:
        self._groups = groups
        self._upstream = upstream
        self._lock = asyncio.Lock()
        self._asked = -PROBE_SECONDS
        self._reasons: list[str] = []

    async def reasons(self) -> list[str]:
        """Why the router is not ready, a line for each role of which no server is healthy."""
        async with self._lock:
            if time.monotonic() - self._asked >= PROBE_SECONDS:
                self._reasons = [reason for servers in self._groups if (reason := await self._why_not(servers))]
                self._asked = time.monotonic()
            return self._reasons

    async def _why_not(self, servers: Servers) -> str:
        reasons = await asyncio.gather(*(self._failure(server) for server in servers.all))
        return "" if "" in reasons else f"no {servers.role} server is healthy: {'; '.join(reasons)}\n"

    async def _failure(self, server: Server) -> str:
        try:
            status, _ = await self._upstream.get(server, "/health", {})
        except ServerFailed as failure:
            return failure.text
        return "" if status == 200 else f"{server.name} answered with status {status}"
