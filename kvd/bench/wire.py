"""TCP between two hosts of one machine: iperf3, raw NIXL as UCX comes, raw NIXL as kvd sets it up, and kvd.

The hosts are network namespaces (`kvd.bench.hosts`), and UCX is told to use TCP, since it would see that they share a
kernel. The part that reads runs as a process on the consumer's host: `python -m kvd.bench.wire`.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvd.bench import hosts
from kvd.bench.hosts import Host, Hosts
from kvd.bench.pair import Pair, Place
from kvd.errors import ErrorCode, InternalError
from kvd.limits import KIB
from kvd.transport.nixl import TCP_SETTINGS

_BLOCK: Final = 256 * KIB
_BLOCKS: Final = 256
_STREAMS: Final = (1, 2)
_IPERF_SECONDS: Final = 3
_UCX_DEFAULTS: Final = {"UCX_TCP_TX_SEG_SIZE": "8k", "UCX_TCP_RX_SEG_SIZE": "64k"}
"""What UCX has where nobody says anything, said, so that kvd's choice does not come instead."""


class Rates(msgspec.Struct, frozen=True):
    """GB/s: the median of the rounds."""

    raw: float
    kvd: float


@dataclass(frozen=True, slots=True)
class Wire:
    """GB/s. `iperf` by streams, the mean of before and after the rest."""

    bytes: int
    iperf: dict[int, float]
    raw_default: float
    raw_tuned: float
    kvd: float

    @property
    def ratio(self) -> float:
        """What kvd has of one stream of iperf3."""
        return self.kvd / self.iperf[1]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "settings": TCP_SETTINGS}


def why_not() -> str | None:
    """What is missing here for this measurement; None where nothing is."""
    if shutil.which("iperf3") is None:
        return "iperf3 is what kvd is measured against here: apt-get install iperf3"
    return hosts.why_not()


def measure(rounds: int, progress: Callable[[], None]) -> Wire:
    """Measures everything in turns; calls `progress` four times."""
    with Hosts("producer", "consumer") as (producer, consumer):
        before = _iperf(producer, consumer)
        progress()
        default = _run(producer, consumer, rounds, _UCX_DEFAULTS)
        progress()
        tuned = _run(producer, consumer, rounds, {})
        progress()
        after = _iperf(producer, consumer)
        progress()
    iperf = {streams: (before[streams] + after[streams]) / 2 for streams in _STREAMS}
    return Wire(_BLOCK * _BLOCKS, iperf, default.raw, tuned.raw, tuned.kvd)


def _iperf(source: Host, sink: Host) -> dict[int, float]:
    """GB/s from one host to the other, by streams."""
    found = {}
    for streams in _STREAMS:
        serve = [*sink.within, "iperf3", "--server", "--one-off", "--forceflush"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:  # noqa: S603 - the command is ours
            assert server.stdout is not None  # noqa: S101 - it is a pipe
            while b"listening" not in server.stdout.readline():
                pass
            ask = ["iperf3", "--client", sink.address, "--json", "--time", str(_IPERF_SECONDS)]
            command = [*source.within, *ask, "--parallel", str(streams)]
            ran = subprocess.run(command, capture_output=True, check=True)  # noqa: S603 - the command is ours
        report = msgspec.json.decode(ran.stdout)
        found[streams] = report["end"]["sum_received"]["bits_per_second"] / 8e9
    return found


def _run(producer: Host, consumer: Host, rounds: int, settings: dict[str, str]) -> Rates:
    command = [*consumer.within, sys.executable, "-m", "kvd.bench.wire", str(rounds)]
    command += [producer.namespace, producer.address, consumer.address]
    environment = {**os.environ, "UCX_TLS": "tcp", **settings}
    ran = subprocess.run(command, capture_output=True, env=environment, check=False)  # noqa: S603 - ours
    if ran.returncode:
        raise InternalError(ErrorCode.INTERNAL, f"the reading side failed: {ran.stderr.decode()[-2000:]}")
    return msgspec.json.decode(ran.stdout, type=Rates)


def _read(rounds: int, places: dict[str, Place]) -> Rates:
    """On the consumer's host: raw NIXL and kvd in turns, the same blocks."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder, Pair(Path(folder), places) as pair:
        pool = pair.pool("wire", _BLOCKS, _BLOCK)
        ids = list(range(_BLOCKS))
        descriptors, tickets = pool.descriptors(ids, ids), pool.tickets(ids, rounds + 1)
        pool.pull(tickets.pop(), ids)
        pool.check(ids, ids)
        kvd = [pool.pull(ticket, ids) for ticket in tickets]
        raw = [pool.raw(descriptors) for _ in range(rounds)]
    size = _BLOCKS * _BLOCK / 1e9
    return Rates(raw=size / statistics.median(raw), kvd=size / statistics.median(kvd))


def main() -> None:
    """The reading side; leaves without NIXL's teardown (`kvd.transport.nixl`)."""
    rounds, namespace, producer, consumer = sys.argv[1:]
    within = ("ip", "netns", "exec", namespace)
    rates = _read(int(rounds), {"producer": Place(within, producer), "consumer": Place((), consumer)})
    sys.stdout.buffer.write(msgspec.json.encode(rates))
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
