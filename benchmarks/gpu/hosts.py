"""Pulls between two daemons that take themselves for two hosts, with pools on one GPU or in host memory.

So their bytes go by way of pinned host memory and over NIXL with TCP, as between hosts.

`python -m benchmarks.gpu.hosts HOST FLAGS` is such a daemon: `kvd serve FLAGS` on the host with this name.
"""

import sys
from typing import Any, Final
from unittest.mock import patch

import ifaddr

from benchmarks.gpu.kills import Pulls, kill_daemon
from benchmarks.gpu.steps import Skipped, needs_nixl
from kvd.bench.gpu import ComparedPulls, Side, two_sides
from kvd.bench.spec import pattern
from kvd.limits import KIB, MIB
from kvd.processes import Child

_PAIRS: Final = (("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0"))
"""Memory of the pools that are read, and of those that read."""
_PORTS: Final = {"p": 7710, "d": 7711}
_SIZES: Final = (16 * KIB, MIB)


class _FarSide(Side):
    def run(self, log: str) -> Child:
        address = _address()
        flags = {
            "name": self.name,
            "socket": str(self.socket),
            "device": self.memory,
            "listen": f"tcp://{address}:{_PORTS[self.name]}",
            "insecure": "true",
            "unprotected-transport": address,
            "log-format": "json",
        }
        return self.processes.start(
            log, "benchmarks.gpu.hosts", self.name, *(f"--{name}={value}" for name, value in flags.items())
        )


def pulls(*, quick: bool) -> dict[str, Any]:
    """GB/s of pulls, and how those ended during which a daemon was killed; every byte is compared."""
    needs_nixl()
    if not _address():
        raise Skipped("no interface but loopback has an IPv4 address, and kvd lets no peers of other hosts in there")
    rows: list[dict[str, Any]] = []
    for pair in _PAIRS:
        with two_sides(*pair, kind=_FarSide) as sides:
            row: dict[str, Any] = dict(zip(("of", "into"), pair, strict=True))
            rows.append(row | _speeds(sides, quick=quick) | _kills(sides, quick=quick))
    return {"hosts": rows}


def _address() -> str:
    """The first IPv4 address of this machine that is not of loopback; empty if it has none."""
    found = (address.ip for adapter in ifaddr.get_adapters() for address in adapter.ips if address.is_IPv4)
    return next((str(ip) for ip in found if not str(ip).startswith("127.")), "")


def _speeds(sides: tuple[Side, Side], *, quick: bool) -> dict[str, float]:
    total, rounds = (MIB, 1) if quick else (64 * MIB, 5)
    found = {}
    for size in _SIZES:
        count = 2 * total // size
        source, target = (side.attach(count, size) for side in sides)
        measured = ComparedPulls(source, target, pattern(count, size))
        seconds = measured.median("scattered", range(0, count, 2), range(1, count, 2), rounds)
        found[f"blocks of {size // KIB} KiB, GB/s"] = total / seconds / 1e9
        source.leave()
        target.leave()
    return found


def _kills(sides: tuple[Side, Side], *, quick: bool) -> dict[str, int]:
    killed = Pulls(sides, (256, 16 * KIB) if quick else (1024, 64 * KIB))
    return killed.counts(kill_daemon, "daemon", 2 if quick else 4)


def main(host: str, flags: list[str]) -> int:
    """Serves until it is told to end."""
    from kvd.cli.main import main as kvd  # noqa: PLC0415 - the check itself needs none of it

    with patch("kvd.daemon.parts.boot_id", return_value=host):
        return kvd(["serve", *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
