"""What somebody waits for goes before parts of what is still to come: `python -m benchmarks.growing`.

Prefills of equal length offer chunk by chunk, at times that are drawn, so that one ends while others go on. Measured is
the time from the close of an offer to the end of its pull: what a request waits for after its prefill. In turns, the
consumer's daemon serves reads as it does, and in plain fairness, as if it did not know which of them are parts.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import make_parser, run
from kvd.bench import report
from kvd.bench.spec import flat_spec, tokens_of
from kvd.cli.main import main as kvd_main
from kvd.client import Blocks, Done, Worker
from kvd.errors import ErrorCode, refusal
from kvd.processes import START_SECONDS, Processes
from kvd.transport import slices

_BLOCK = 256 << 10
_PLAIN = "plainly-fair"
"""Makes this command a daemon that does not know which reads are parts."""


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` prefills of `chunks` chunks of `blocks` blocks each, which take `period` seconds a chunk."""

    streams: int
    chunks: int
    blocks: int
    period: float

    @property
    def nbytes(self) -> int:
        """Of a chunk."""
        return self.blocks * _BLOCK


class Pair:
    """A producer's and a consumer's daemon, with a pool for all streams on either side.

    If it is `plain`, the consumer's does not know which reads are parts.
    """

    def __init__(self, processes: Processes, folder: Path, name: str, load: Load, *, plain: bool) -> None:
        self.name = name
        spec = flat_spec(load.streams * load.chunks * load.blocks, _BLOCK)
        producer, consumer = (f"{name}-{side}" for side in "pd")
        sockets = {daemon: str(folder / f"{daemon}.sock") for daemon in (producer, consumer)}
        processes.start_daemon(producer, sockets[producer])
        if plain:
            flags = "--name", consumer, "--socket", sockets[consumer], "--log-format", "json"
            processes.start(consumer, "benchmarks.growing", _PLAIN, *flags)
        else:
            processes.start_daemon(consumer, sockets[consumer])
        self.workers = [
            Worker.attach(socket, name="w", spec=spec, timeout=START_SECONDS) for socket in sockets.values()
        ]
        self._rounds = 0

    def waits(self, load: Load, seed: int) -> list[float]:
        """Seconds from the close of each stream to the end of its pull."""
        self._rounds += 1
        producer, consumer = self.workers
        order = random.Random(seed)  # noqa: S311  # no secret
        due = sorted(
            ((begin + chunk) * load.period, stream, chunk)
            for stream in range(load.streams)
            for begin in [order.uniform(0, load.chunks)]
            for chunk in range(load.chunks)
        )
        closed: dict[str, float] = {}
        waited: dict[str, float] = {}
        start = time.perf_counter()
        while len(waited) < load.streams:
            now = time.perf_counter() - start
            while due and due[0][0] <= now:
                _, stream, chunk = due.pop(0)
                self._chunk(load, stream, chunk, closed)
            for event in consumer.wait(max(0.0, min(0.01, due[0][0] - now)) if due else 0.01):
                if not isinstance(event, Done):
                    raise refusal(ErrorCode.INTERNAL, f"a pull of the benchmark ended as {event}")
                waited[event.request] = time.perf_counter() - closed[event.request]
            producer.poll()
        return list(waited.values())

    def _chunk(self, load: Load, stream: int, chunk: int, closed: dict[str, float]) -> None:
        producer, consumer = self.workers
        name, first = f"{self._rounds}-{stream}", stream * load.chunks * load.blocks
        if chunk == 0:
            ticket = producer.open_offer(name, ttl=60.0)
            ids = range(first, first + load.chunks * load.blocks)
            consumer.pull(name, ticket, blocks=[Blocks(0, 0, ids)], timeout=60.0)
        position = chunk * load.blocks
        blocks = [Blocks(0, position, range(first + position, first + position + load.blocks))]
        tokens = tokens_of(position + load.blocks)
        if chunk < load.chunks - 1:
            producer.extend_offer(name, tokens=tokens, blocks=blocks)
        else:
            closed[name] = time.perf_counter()
            producer.close_offer(name, tokens=tokens, blocks=blocks)

    def close(self) -> None:
        """Ends the sessions."""
        for worker in self.workers:
            worker.close()


def report_waits(waits: Mapping[str, Sequence[float]]) -> None:
    """Prints the seconds that were waited with each rule."""
    for name, times in waits.items():
        p90 = statistics.quantiles(times, n=10)[-1]
        text = f"{name:>14}: close to done, median {1e3 * statistics.median(times):.1f} ms"
        print(f"{text}, 90th percentile {1e3 * p90:.1f} ms, of {len(times)}")


def measure(args: argparse.Namespace) -> None:
    """Runs and prints."""
    load = Load(args.streams, args.chunks, args.chunk_mib * 4, args.period_ms / 1e3)
    rate = load.streams * load.nbytes / load.period / 1e9
    print(f"{load.streams} streams, {load.chunks} chunks of {args.chunk_mib} MiB, up to {rate:.1f} GB/s at once")
    with tempfile.TemporaryDirectory(prefix="kvd-growing-") as folder, Processes(Path(folder)) as processes:
        pairs = [Pair(processes, Path(folder), name, load, plain=name == _PLAIN) for name in ("waited-for", _PLAIN)]
        for pair in pairs:
            pair.waits(load, seed=0)  # faults pages in
        waits: dict[str, list[float]] = {pair.name: [] for pair in pairs}
        for number in range(args.rounds):
            for pair in pairs if number % 2 else pairs[::-1]:
                waits[pair.name] += pair.waits(load, seed=1 + number)
        for pair in pairs:
            pair.close()
    report_waits(waits)
    report.write_json(args.json, {"waits": waits})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = make_parser("growing", __doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-mib", type=int, default=16)
    parser.add_argument("--period-ms", type=float, default=30.0, help="between two chunks of a stream")
    parser.add_argument("--rounds", type=int, default=20)
    return run(parser, measure, arguments)


def _serve_plainly() -> int:
    slices._Read.rank = property(lambda read: (False, read.posted, read.age))  # type: ignore[method-assign, assignment]
    return kvd_main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(_serve_plainly() if sys.argv[1:2] == [_PLAIN] else main())
