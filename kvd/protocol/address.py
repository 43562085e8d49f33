"""Where daemons are: peers at `tcp://host:port`, or `ipc:///path` on one host; with CURVE `#<key>` follows."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from kvd.errors import ErrorCode, refusal

DEFAULT_SOCKET: Final = "/run/kvd/kvd.sock"
"""Session socket of a daemon that was given no other."""

REQUESTS: Final = ".zmq"
PEERS: Final = ".peers"
POOLS: Final = ".pools"
LOCK: Final = ".lock"
"""Endings of what lies beside the session socket: the sockets for the requests of workers, for peers and for those that
import pools; and of the lock's file of each of these."""

SOCKET_PATH: Final = re.compile(r"/[^#\s\0\ud800-\udfff]+")
"""A path that can stand in an address: UTF-8 without spaces and `#`."""

LAST_PORT: Final = 65535

_EVERY_HOST: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - recognised, not bound


def host_of(address: str) -> str:
    """The host in an address, without the brackets of IPv6."""
    return address.partition("#")[0].removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_unix(address: str) -> bool:
    """Whether the address is a Unix socket, where the kernel says which user is at the other end."""
    return address.startswith("ipc://")


def is_local(address: str) -> bool:
    """Whether only processes on the daemon's own host can reach it: a Unix socket, or loopback."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return is_unix(address) or host == "localhost"


def export_path(address: str, socket: str) -> str:
    """Where the daemon that listens for peers at `address`, and for workers at `socket`, lends its pools."""
    own = address.partition("#")[0].removeprefix("ipc://").removesuffix(PEERS)
    return (own if is_unix(address) else socket) + POOLS


def key_of(address: str) -> str:
    """The daemon's public key in hexadecimal; empty without CURVE."""
    return address.partition("#")[2]


def is_everywhere(address: str) -> bool:
    """Whether it means every address of a host: one to listen on, not to connect to."""
    return host_of(address) in _EVERY_HOST


def check_mutual(own: str, addresses: Iterable[str]) -> None:
    """Checks that the daemons at `addresses` could reach the one at `own`, too.

    Raises:
        BadRequest: `BAD_CONFIG`, one of them is on another host, where `own` means that host itself.

    """
    abroad = sorted(address for address in addresses if not is_local(address))
    if abroad and is_local(own):
        text = (
            f"peers would look for this daemon at {own.partition('#')[0]}, which on {abroad[0]}'s host means "
            "that host itself; set `listen` (or `advertise`) to an address that other hosts reach"
        )
        raise refusal(ErrorCode.BAD_CONFIG, text)
