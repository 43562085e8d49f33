"""Pulls between two daemons on one GPU, during which a daemon or a worker is killed.

`python -m benchmarks.gpu.kills NAME SOCKET BLOCKS BYTES REQUEST TICKET` is a worker that is killed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvd.bench.gpu import SECONDS, Side, attach, two_sides
from kvd.bench.spec import pattern
from kvd.client import Done, Worker
from kvd.client.events import Event
from kvd.errors import KvdError
from kvd.limits import KIB

T = TypeVar("T")


def kills(*, quick: bool) -> dict[str, Any]:
    """One is killed during each pull, at another moment each time: in turn that of the producer and the consumer."""
    shape, rounds = ((256, 16 * KIB), 2) if quick else ((4096, 64 * KIB), 12)
    with two_sides("cuda:0", "cuda:0") as sides:
        pulls = Pulls(sides, shape)
        found = pulls.counts(kill_daemon, "daemon", rounds)
        return found | pulls.counts(_kill_worker, "worker", rounds)


class Pulls:
    """Pulls of every other block of a pool of `shape` into those beside them."""

    def __init__(self, sides: tuple[Side, Side], shape: tuple[int, int]) -> None:
        self.sides = sides
        self.shape = shape
        self.pools = [side.attach(*shape) for side in sides]
        """The producer's and the consumer's."""
        self.source, self.target = _halves(shape[0])
        self._content = pattern(*shape)
        self.found: dict[str, int] = {}

    def counts(self, kill: Callable[["Pulls", int, str], None], victim: str, rounds: int) -> dict[str, int]:
        """How pulls ended during each of which `kill` was called."""
        self.found = dict.fromkeys(("pulls", "done", "failed", "pools kept"), 0)
        for turn in range(rounds):
            kill(self, turn, f"{victim}-{turn}")
        return {f"{what}, a {victim} killed": count for what, count in self.found.items()}

    def fill(self) -> None:
        """Gives the producer's pool its content, and the consumer's zeros."""
        prefill, decode = self.pools
        prefill.write(self._content)
        decode.write(np.zeros_like(self._content))
        self.found["pulls"] += 1

    def check(self, name: str, ended: Event | None) -> None:
        """Compares both pools after a pull; `ended` is None if the worker is gone that would have been told."""
        prefill, decode = self.pools
        got, offered = decode.read(), self._content[self.source]
        if got[self.source].any():
            raise AssertionError(f"{name}: bytes outside of its blocks")
        if isinstance(ended, Done) and not np.array_equal(got[self.target], offered):
            raise AssertionError(f"{name}: done with wrong bytes")
        if ended is not None:
            self.found["done" if isinstance(ended, Done) else "failed"] += 1
        if not np.array_equal(prefill.read(), self._content):
            raise AssertionError(f"{name}: the producer's pool has other bytes than before")
        self.found["pools kept"] += 1


def _halves(count: int) -> tuple[list[int], list[int]]:
    return list(range(0, count, 2)), list(range(1, count, 2))


def kill_daemon(pulls: Pulls, turn: int, name: str) -> None:
    """Kills the daemon of one side during a pull with this name, and starts the next one."""
    (prefill, decode), victim = pulls.pools, pulls.sides[turn % 2]
    pulls.fill()
    decode.pull(name, prefill.offer(name, pulls.source), pulls.target)
    time.sleep(0.001 * turn)
    os.kill(victim.daemon.pid, signal.SIGKILL)
    victim.daemon.wait(SECONDS)
    victim.start()
    pulls.check(name, decode.end_of(name))
    for pool in pulls.pools:
        _again("attach again", partial(_status, pool.worker))


def _kill_worker(pulls: Pulls, turn: int, name: str) -> None:
    """Another process has a pool in the place of ours, until it is killed and we get that pool."""
    victim = turn % 2
    (prefill, decode), side = pulls.pools, pulls.sides[victim]
    pulls.fill()
    ticket = prefill.offer(name, pulls.source) if victim else ""
    pulls.pools[victim].leave()
    command = [sys.executable, "-m", "benchmarks.gpu.kills", side.name, str(side.socket), *map(str, pulls.shape), name]
    with subprocess.Popen([*command, ticket], stdout=subprocess.PIPE, text=True) as worker:  # noqa: S603 - ours
        said = worker.stdout.readline().strip() if worker.stdout is not None else ""
        if not said:
            raise AssertionError(f"the worker ended by itself, with status {worker.wait()}")
        if not victim:
            decode.pull(name, said, pulls.target)
        time.sleep(0.001 * turn)
        worker.kill()
    ended = None if victim else decode.end_of(name)
    pulls.pools[victim] = successor = _again("attach", lambda: side.attach(*pulls.shape))
    if not successor.worker.kept:
        raise AssertionError("a successor got another pool")
    pulls.check(name, ended)


def _status(worker: Worker) -> None:
    worker.wait(0.1)  # which attaches again
    worker.status(1.0)


def _again(what: str, action: Callable[[], T]) -> T:
    """What `action` returns, which fails until a daemon has noticed what happened."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            return action()
        except KvdError:
            time.sleep(0.01)
    raise AssertionError(f"a worker did not {what}")


def main(name: str, socket: str, blocks: int, block_bytes: int, *, request: str, ticket: str) -> None:
    """Offers blocks and says the ticket, or begins a pull of `ticket` and says so; then waits for its end."""
    pool = attach(name, Path(socket), blocks, block_bytes)
    source, target = _halves(blocks)
    content = pattern(blocks, block_bytes)
    pool.write(np.zeros_like(content) if ticket else content)
    if ticket:
        pool.pull(request, ticket, target)
    sys.stdout.write((ticket or pool.offer(request, source)) + "\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), request=sys.argv[5], ticket=sys.argv[6])
