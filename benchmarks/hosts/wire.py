"""TCP between two network namespaces: iperf3, raw NIXL and kvd, with UCX's defaults and with larger messages.

UCX is told to use TCP, because it would see that the namespaces share a kernel. The reading side runs as a process on
the consumer's host: `python -m benchmarks.hosts.wire`.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.hosts import namespaces as hosts
from benchmarks.hosts import pulls
from benchmarks.hosts.namespaces import Host, Hosts
from kvd.bench.pair import Pair, Place
from kvd.errors import ErrorCode, InternalError
from kvd.limits import KIB
from kvd.transport.nixl.ucx import TCP_SETTINGS

BLOCK: Final = 256 * KIB
BLOCKS: Final = 256
YARDSTICK: Final = "iperf3, 1 stream"
_STREAMS: Final = {YARDSTICK: 1, "iperf3, 2 streams": 2}
_IPERF_SECONDS: Final = 2
_COMES_WITH: Final = {"UCX_TCP_TX_SEG_SIZE": "8k", "UCX_TCP_RX_SEG_SIZE": "64k"}
"""UCX's own defaults, set explicitly so that kvd does not set its own."""

_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "UCX as it comes": _COMES_WITH,
    "set up as kvd does": {},
}


class Rates(msgspec.Struct, frozen=True):
    """GB/s: the median of the rounds."""

    raw: float
    kvd: float


@dataclass(frozen=True, slots=True)
class Wire:
    """GB/s by what was measured, one mapping per turn."""

    turns: Sequence[Mapping[str, float]]

    def rate(self, what: str) -> float:
        """The median of the turns."""
        return statistics.median(turn[what] for turn in self.turns)

    def ratio(self, what: str) -> float:
        """The rate over that of one iperf3 stream in the same turn, the median."""
        return statistics.median(turn[what] / turn[YARDSTICK] for turn in self.turns)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        ratios = {what: self.ratio(what) for what in self.turns[0]}
        return {"turns": list(self.turns), "ratios": ratios, "settings": TCP_SETTINGS}


def why_not() -> str | None:
    """What this machine lacks for the measurement; None if nothing."""
    if shutil.which("iperf3") is None:
        return "iperf3, which kvd is measured against, is missing: apt-get install iperf3"
    return hosts.why_not()


def measure(turns: int, rounds: int, progress: Callable[[], None]) -> Wire:
    """Measures everything in turns of `rounds` reads each; calls `progress` after each turn."""
    found = []
    with Hosts("producer", "consumer") as (producer, consumer):
        for _ in range(turns):
            turn = {what: _iperf(producer, consumer, streams) for what, streams in _STREAMS.items()}
            for name, settings in _SETTINGS.items():
                rates = read_between(producer, consumer, rounds, settings)
                turn |= {f"raw NIXL, {name}": rates.raw, f"kvd, {name}": rates.kvd}
            found.append(turn)
            progress()
    return Wire(found)


def _iperf(source: Host, sink: Host, streams: int) -> float:
    """GB/s from one host to the other."""
    serve = [*sink.within, "iperf3", "--server", "--one-off", "--forceflush"]
    ask = [*source.within, "iperf3", "--client", sink.address, "--json", "--time", str(_IPERF_SECONDS)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:  # noqa: S603 - the command is ours
        try:
            assert server.stdout is not None  # noqa: S101 - it is a pipe
            if not any(b"listening" in line for line in iter(server.stdout.readline, b"")):
                raise InternalError(
                    ErrorCode.INTERNAL, f"iperf3 does not listen on {sink.address}: status {server.wait()}"
                )
            command = [*ask, "--parallel", str(streams)]
            ran = subprocess.run(command, capture_output=True, check=True)  # noqa: S603 - the command is ours
        finally:
            server.kill()
    bits: float = msgspec.json.decode(ran.stdout)["end"]["sum_received"]["bits_per_second"]
    return bits / 8e9


def read_between(producer: Host, consumer: Host, rounds: int, settings: Mapping[str, str]) -> Rates:
    """Reads from the producer's host on the consumer's, with `settings` in the environment of both."""
    command = [*consumer.within, sys.executable, "-m", "benchmarks.hosts.wire", str(rounds)]
    command += [json.dumps(producer.within), producer.address, consumer.address]
    environment = {**os.environ, "UCX_TLS": "tcp", **settings}
    ran = subprocess.run(command, capture_output=True, env=environment, check=False)  # noqa: S603 - ours
    if ran.returncode:
        raise InternalError(ErrorCode.INTERNAL, f"the reading side failed: {ran.stderr.decode()[-2000:]}")
    return msgspec.json.decode(ran.stdout, type=Rates)


def _read(rounds: int, places: Mapping[str, Place]) -> Rates:
    """On the consumer's host: kvd and raw NIXL, the same blocks."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder, Pair(Path(folder), places) as pair:
        pool = pair.pool("wire", BLOCKS, BLOCK)
        ids = list(range(BLOCKS))
        descriptors, tickets = pool.descriptors(ids, ids), pool.tickets(ids, rounds + 1)
        pool.pull(tickets.pop(), ids)
        pool.check(ids, ids)
        pulls.check_path(pool)
        kvd = [pool.pull(ticket, ids) for ticket in tickets]
        raw = [pool.raw(descriptors) for _ in range(rounds)]
        pair.quiet_raw()
    size = BLOCKS * BLOCK / 1e9
    return Rates(raw=size / statistics.median(raw), kvd=size / statistics.median(kvd))


def main() -> None:
    """The reading side; exits without NIXL's teardown (see `kvd.transport.nixl.process`)."""
    rounds, within, producer, consumer = sys.argv[1:]
    places = {"producer": Place(tuple(json.loads(within)), producer), "consumer": Place((), consumer)}
    rates = _read(int(rounds), places)
    sys.stdout.buffer.write(msgspec.json.encode(rates))
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
