"""Waits at the start for what a daemon that was killed still holds: ports, and the locks of sockets."""

import asyncio

import structlog

from kvd import limits
from kvd.daemon.config import Config
from kvd.daemon.systemd import Notifier
from kvd.holders import Place, Ports, wait_until_free
from kvd.net.addresses import check_own
from kvd.net.lock import Lock
from kvd.protocol.address import REQUESTS, export_path, is_local

_TRANSPORT_PORTS = 2
"""Those of NIXL's process, and of the one that tries foreign metadata."""

_log = structlog.get_logger("kvd")


async def wait_for_predecessor(config: Config, stopping: asyncio.Event, notifier: Notifier) -> None:
    """Returns when all is free that this daemon opens, after `limits.PREDECESSOR_SECONDS`, or when it is to stop.

    Raises:
        BadRequest: `BAD_CONFIG`, the address to listen on is malformed.

    """

    def tell(what: str) -> None:
        _log.warning("waiting for what another process has", what=what, seconds=limits.PREDECESSOR_SECONDS)
        # As long again for the rest of the start.
        notifier.starting(f"waiting for {what}", 2 * limits.PREDECESSOR_SECONDS)

    await wait_until_free(_places(config), stopping, tell)


def _places(config: Config) -> list[Place]:
    listen, socket = config.listen, str(config.socket)
    paths = {socket, socket + REQUESTS, export_path(listen, socket)}
    places: list[Place] = [*Ports.of(config.http)]
    if (path := check_own(listen)["path"]) is not None:
        paths.add(path)
    else:
        places += Ports.of(listen.removeprefix("tcp://"))
    if not is_local(listen):
        first, last = map(int, config.transport_ports.split("-"))
        places.append(Ports(config.unprotected_transport, first, last, _TRANSPORT_PORTS))
    return [*places, *(Lock(path) for path in sorted(paths))]
