"""The honest neighbour, a process of its own: pulls one block into and out of the daemon under attack, again and again.

Each order on standard input is answered by a line: the seconds of every pull since the last one, and what went wrong.
"""

import itertools
import select
import sys
import time

import msgspec
import numpy as np

from kvd.bench.spec import flat_spec
from kvd.client import Blocks, Done, Worker
from kvd.errors import KvdError
from tests.support.patience import PATIENCE

BLOCKS, BLOCK_BYTES = 16, 16 * 1024
PULL_SECONDS = PATIENCE
PAUSE_SECONDS = 0.003


class Pulls(msgspec.Struct):
    """What one order is answered with."""

    seconds: list[float]
    failures: list[str]


class Pair:
    """A producer's worker at one daemon, a consumer's at another."""

    def __init__(self, producer: str, consumer: str, name: str) -> None:
        spec = flat_spec(BLOCKS, BLOCK_BYTES)
        self.producer = Worker.attach(producer, name=f"honest-{name}-from", spec=spec, timeout=PATIENCE)
        self.consumer = Worker.attach(consumer, name=f"honest-{name}-to", spec=spec, timeout=PATIENCE)
        self.source, self.destination = (
            np.frombuffer(worker.pool, dtype=np.uint8).reshape(BLOCKS, BLOCK_BYTES)
            for worker in (self.producer, self.consumer)
        )

    def pull(self, number: int) -> float:
        """Seconds from the pull to `Done`; raises AssertionError where it ends otherwise or with other bytes."""
        block, name = [Blocks(group=0, first=0, ids=[number % BLOCKS])], f"honest-{number}"
        self.producer.poll()
        self.source[number % BLOCKS] = number % 251
        ticket = self.producer.offer(name, tokens=16, blocks=block, ttl=PATIENCE, timeout=PATIENCE)
        begun = time.perf_counter()
        self.consumer.pull(name, ticket, blocks=block, timeout=PULL_SECONDS)
        event = self._ended(name, begun + PULL_SECONDS + 5.0)
        taken = time.perf_counter() - begun
        assert event == Done(name), f"a pull ended as {event}"
        assert (self.destination[number % BLOCKS] == number % 251).all(), "other bytes than those that were offered"
        return taken

    def _ended(self, name: str, until: float) -> object:
        while (now := time.perf_counter()) < until:
            for event in self.consumer.wait(until - now):
                if getattr(event, "request", None) == name:
                    return event
        return "nothing"


def main() -> None:
    """Pulls until standard input ends."""
    target, near = sys.argv[1:]
    pairs = itertools.cycle((Pair(near, target, "in"), Pair(target, near, "out")))
    pulls = Pulls([], [])
    numbers = itertools.count(1)
    while True:
        if select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            if not sys.stdin.readline():
                return
            sys.stdout.buffer.write(msgspec.json.encode(pulls) + b"\n")
            sys.stdout.buffer.flush()
            pulls = Pulls([], [])
        try:
            pulls.seconds.append(next(pairs).pull(next(numbers)))
        except (KvdError, AssertionError) as error:
            pulls.failures.append(str(error))
            select.select([], [], [], 0.1)


if __name__ == "__main__":
    main()
