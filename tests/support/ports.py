"""Where a process listens, by the kernel's tables, and where one may listen."""

import contextlib
import ipaddress
import os
import random
import socket
from pathlib import Path

import pytest

LISTENING = "0A"
_FIRST_EPHEMERAL_PORT = 32_768
"""Of Linux, unless told otherwise."""

_claims: list[socket.socket] = []
"""One for each port that was given out, until this process ends."""


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that a process listens on."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(f"/proc/{pid}/fd/{entry}")
            if name.startswith("socket:["):
                inodes.add(name[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _address(text: str) -> str:
    """The kernel writes an address as words of the machine's own byte order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def endpoint(address: str) -> tuple[str, int]:
    """Address and port of `host:port`, with or without `tcp://`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def own_address() -> str:
    """An address of this machine that is not the loopback interface's; skips the test if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # for documentation only (RFC 5737): nothing is sent
        except OSError:
            pytest.skip("this machine has no route to other hosts")
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A port that nobody has at any address, and that stays free while its owner is down.

    The kernel gives none of these to those who ask it for any port, as every connection to others does. No other test
    gets it either, whose process may run beside this one: a server needs many seconds until it listens.
    """
    while True:
        port = random.randrange(10_000, _FIRST_EPHEMERAL_PORT)  # noqa: S311 - no secret
        with socket.socket() as probe, contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            claim = undo.enter_context(socket.socket(socket.AF_UNIX))
            claim.bind(f"\0kvd-tests-port-{port}")
            probe.bind(("", port))
            undo.pop_all()
            _claims.append(claim)
            return port
