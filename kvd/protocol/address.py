"""What the address of a daemon, `tcp://host:port` with or without a `#key`, says about who can reach it."""

import ipaddress
from typing import Final

_EVERY_HOST: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - recognised, not bound


def host_of(address: str) -> str:
    """The host in an address, without the brackets of IPv6."""
    return address.partition("#")[0].removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether only processes of the daemon's own host can reach it."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(address: str) -> bool:
    """Whether it stands for every address of a host: good to listen on, and nowhere to connect to."""
    return host_of(address) in _EVERY_HOST
