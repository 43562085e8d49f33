"""The daemon under load: how quick it stays during a pull of 1 GiB, and how many small pulls it sustains."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvd.bench.pair import Pair, Pool
from kvd.errors import ErrorCode, refusal
from kvd.limits import GIB, KIB

_BLOCK = 256 * KIB
_SMALL = 16 * KIB
_OFFERS_AT_ONCE = 1000
_STEADY_STREAMS, _MOST_STREAMS = 16, 150
_STEADY_BYTES = 128 * KIB
_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Interference:
    """Seconds. A small pull is one block: `alone`, and `beside` (during) a pull of 1 GiB."""

    big_pull: float
    status_p50: float
    status_p99: float
    statuses: int
    small_alone: float
    small_beside: float

    @property
    def slowdown(self) -> float:
        """How many times longer a small pull takes beside a big one."""
        return self.small_beside / self.small_alone


@dataclass(frozen=True, slots=True)
class Rate:
    """A sustained stream of small pulls; memory (bytes) and open descriptors of both daemons, before and after."""

    seconds: float
    pulls: int
    warm_up: int
    """Pulls made before: until memory was steady or a bound was reached."""
    poll_seconds: float
    """One `poll()` of the client that finds nothing."""
    memory: tuple[int, int]
    descriptors: tuple[int, int]

    @property
    def per_second(self) -> float:
        """Pulls a second."""
        return self.pulls / self.seconds


def interference(pair: Pair, rounds: int, progress: Callable[[], None]) -> Interference:
    """Runs `rounds` pulls of 1 GiB; during each, asks for the status repeatedly and pulls one block.

    Raises:
        InternalError: each of them had ended before the small pull beside it began.

    """
    count = GIB // _BLOCK
    pool = pair.pool("big", count + 16, _BLOCK)
    big, small = list(range(count)), [count]
    alone = [pool.pull(ticket, small) for ticket in pool.tickets(small, 50)]
    pool.pull(pool.tickets(big, 1)[0], big)  # warm-up: the first touch of memory is slow
    beside, statuses, whole = [], [], []
    for ticket, small_ticket in zip(pool.tickets(big, rounds), pool.tickets(small, rounds), strict=True):
        started = time.perf_counter()
        request = pool.start_pull(ticket, big)
        statuses += [_timed(pool.worker.status) for _ in range(5)]  # it is being read then
        pool.collect(0)
        if pool.is_open(request):
            beside.append(pool.pull(small_ticket, small))
        while pool.is_open(request):
            statuses.append(_timed(pool.worker.status))
            pool.collect(0)
        whole.append(time.perf_counter() - started)
        progress()
    if not beside:
        text = "each pull of 1 GiB ended before the small one beside it began: run this on a quieter host"
        raise refusal(ErrorCode.INTERNAL, text)
    return Interference(
        big_pull=statistics.median(whole),
        status_p50=statistics.median(statuses),
        status_p99=float(np.quantile(statuses, 0.99)),
        statuses=len(statuses),
        small_alone=statistics.median(alone),
        small_beside=statistics.median(beside),
    )


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def sustained(pair: Pair, seconds: float, window: int, progress: Callable[[], None]) -> Rate:
    """Pulls 16 KiB blocks one by one, `window` at a time, for `seconds`."""
    pool = pair.pool("small", 2 * window, _SMALL)
    poll_seconds = min(_timed(pool.worker.poll) for _ in range(1000))
    warm_up = _warm_up(pair, pool, window, progress)
    before = _resources(pair)
    pulls, spent = 0, 0.0
    while spent < seconds:
        taken, number = _stream(pool, window, _OFFERS_AT_ONCE)
        spent, pulls = spent + taken, pulls + number
        progress()
    after = _resources(pair)
    return Rate(spent, pulls, warm_up, poll_seconds, (before[0], after[0]), (before[1], after[1]))


def _warm_up(pair: Pair, pool: Pool, window: int, progress: Callable[[], None]) -> int:
    """Pulls until the daemons' memory is steady, or a limit is reached; returns how many pulls that took."""
    found: list[int] = []
    for _ in range(_MOST_STREAMS):
        _stream(pool, window, _OFFERS_AT_ONCE)
        progress()
        found.append(_resources(pair)[0])
        if len(found) > _STEADY_STREAMS and found[-1] - found[-_STEADY_STREAMS] < _STEADY_BYTES:
            break
    return len(found) * _OFFERS_AT_ONCE


def _stream(pool: Pool, window: int, number: int) -> tuple[float, int]:
    """`number` pulls, `window` at a time. Offers are made beforehand, so only pulls are timed."""
    tickets = pool.tickets([0], number)
    started = time.perf_counter()
    free, busy = list(range(window)), {}
    for ticket in tickets:
        block = free.pop()
        busy[pool.start_pull(ticket, [block])] = block
        while not free:
            free += [busy.pop(request) for request in pool.collect(_WAIT)]
    while busy:
        for request in pool.collect(_WAIT):
            del busy[request]
    return time.perf_counter() - started, number


def _resources(pair: Pair) -> tuple[int, int]:
    memory = descriptors = 0
    for daemon in pair.daemons.values():
        process = Path("/proc") / str(daemon.pid)
        descriptors += len(list((process / "fd").iterdir()))
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory += int(fields["RssAnon"].split()[0]) * KIB
    return memory, descriptors
