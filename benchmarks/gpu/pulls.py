"""Pulls between two daemons on one GPU: their speed, and what becomes of them when a daemon is killed."""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.copies import SIZES, median
from kvd.bench.spec import flat_spec, pattern, tokens_of
from kvd.client import Blocks, Done, Worker
from kvd.client.events import Event
from kvd.cuda.copies import copy
from kvd.cuda.device import device
from kvd.cuda.streams import Stream
from kvd.errors import KvdError
from kvd.limits import KIB, MIB
from kvd.processes import Child, Processes
from kvd.transport.samehost.gpu import Gpu

_WAIT = 60.0
Bytes = NDArray[np.uint8]


class _Side:
    """A daemon, and a worker of it in this process. The pool has `blocks` blocks of `block_bytes` bytes."""

    def __init__(self, processes: Processes, folder: Path, name: str, memory: str) -> None:
        self._processes = processes
        self._memory = memory
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Starts the daemon, or the next one."""
        self.starts += 1
        run = f"{self.name}-{self.starts}"
        self.daemon: Child = self._processes.start_daemon(self.name, self.socket, "--device", self._memory, log=run)
        while not self.socket.exists():
            if self.daemon.wait(0.05):
                raise self.daemon.ended()

    def attach(self, blocks: int, block_bytes: int) -> Worker:
        """A worker with a new pool."""
        spec = flat_spec(blocks, block_bytes)
        return Worker.attach(str(self.socket), name=f"{self.name}-{block_bytes}", spec=spec, timeout=_WAIT)


@contextmanager
def _sides(memory: str = "cuda:0") -> Iterator[tuple[_Side, _Side]]:
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as folder, Processes(Path(folder)) as processes:
        yield _Side(processes, Path(folder), "p", memory), _Side(processes, Path(folder), "d", memory)


def _write(worker: Worker, content: Bytes) -> None:
    _copy(worker.device_pool.pointer, content.ctypes.data, content.nbytes)


def _read(worker: Worker, size: int) -> Bytes:
    found = np.empty(size, np.uint8)
    _copy(found.ctypes.data, worker.device_pool.pointer, size)
    return found


def _copy(target: int, source: int, size: int) -> None:
    with device(0).current(), Stream(device(0)) as stream:
        copy(stream, *(np.array([number], np.uint64) for number in (target, source, size)))
        stream.synchronize()


def _end_of(worker: Worker, request: str, seconds: float = _WAIT) -> Event:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in worker.wait(max(0.01, deadline - time.monotonic())):
            if getattr(event, "request", "") == request and type(event).__name__ in {"Done", "Failed", "Cancelled"}:
                return event
    raise AssertionError(f"pull {request!r} did not end within {seconds} s")


def _blocks(ids: list[int]) -> list[Blocks]:
    return [Blocks(group=0, first=0, ids=ids)]


def _offer(worker: Worker, name: str, ids: list[int]) -> str:
    worker.poll()
    return worker.offer(name, tokens=tokens_of(len(ids)), blocks=_blocks(ids), ttl=_WAIT, timeout=_WAIT)


def speeds(*, quick: bool) -> dict[str, Any]:
    """Pulls of `total` bytes in blocks of each size; every byte is compared, those outside, too."""
    total, rounds = (4 * MIB, 1) if quick else (256 * MIB, 5)
    rows, gpu = [], Gpu(device(0).uuid)
    with _sides() as (producer, consumer):
        for size in SIZES:
            count = 2 * total // size
            prefill, decode = producer.attach(count, size), consumer.attach(count, size)
            content = pattern(count, size)
            _write(prefill, content.reshape(-1))
            ends = decode.device_pool.pointer, prefill.device_pool.pointer, total
            whole = median(rounds, gpu.copy, *(np.array([word], np.uint64) for word in ends))
            row: dict[str, Any] = {"block": size}
            for way, source, target in (
                ("adjacent", list(range(count // 2)), list(range(count // 2))),
                ("scattered", list(range(0, count, 2)), list(range(1, count, 2))),
            ):
                seconds = _Pulls(prefill, decode, content).median(way, source, target, rounds)
                row[f"{way}, GB/s"] = total / seconds / 1e9
                row[f"{way}, of one copy"] = whole / seconds
            rows.append(row)
            for worker in (prefill, decode):
                worker.detach(_WAIT)
                worker.close()
    one = {f"one block of 16 KiB, {name}, us": _one_block(memory, 6 * rounds) for name, memory in _MEMORIES.items()}
    return {**one, "one copy of all, GB/s": total / whole / 1e9, "blocks": rows}


_MEMORIES = {"pools on the GPU": "cuda:0", "in host memory": "cpu"}


def _one_block(memory: str, rounds: int) -> float:
    """Microseconds from a request to its end, in the median."""
    with _sides(memory) as (producer, consumer):
        prefill, decode = producer.attach(16, 16 * KIB), consumer.attach(16, 16 * KIB)
        taken = []
        for turn in range(rounds + 1):
            ticket = _offer(prefill, f"r{turn}", [7])
            began = time.perf_counter()
            decode.pull(f"r{turn}", ticket, blocks=_blocks([9]), timeout=_WAIT)
            ended = _end_of(decode, f"r{turn}")
            taken.append(time.perf_counter() - began)
            if type(ended) is not Done:
                raise AssertionError(f"r{turn}: {ended}")
    return 1e6 * statistics.median(taken[1:])


class _Pulls:
    """Pulls of blocks of `content`, which the pool of `prefill` has, into the zeroed pool of `decode`."""

    def __init__(self, prefill: Worker, decode: Worker, content: Bytes) -> None:
        self._prefill, self._decode, self._content = prefill, decode, content

    def median(self, way: str, source: list[int], target: list[int], rounds: int) -> float:
        """Seconds from a request to its end; the first pull, which meets the peer, does not count."""
        return statistics.median([self._pull(f"{way}-{turn}", source, target) for turn in range(rounds + 1)][1:])

    def _pull(self, name: str, source: list[int], target: list[int]) -> float:
        content = self._content
        _write(self._decode, np.zeros(content.nbytes, np.uint8))
        ticket = _offer(self._prefill, name, source)
        began = time.perf_counter()
        self._decode.pull(name, ticket, blocks=_blocks(target), timeout=_WAIT)
        ended = _end_of(self._decode, name)
        seconds = time.perf_counter() - began
        expected = np.zeros_like(content)
        expected[target] = content[source]
        got = _read(self._decode, content.nbytes).reshape(content.shape)
        if type(ended) is not Done:
            raise AssertionError(f"{name} in blocks of {content.shape[1]}: {ended}")
        if not np.array_equal(got, expected):
            raise AssertionError(f"{name} in blocks of {content.shape[1]}: wrong bytes, or bytes outside of its blocks")
        return seconds


def kills(*, quick: bool) -> dict[str, Any]:
    """One of the two daemons is killed during each pull, at another moment each time."""
    count, size, rounds = (256, 16 * KIB, 2) if quick else (4096, 64 * KIB, 12)
    source, target = list(range(0, count, 2)), list(range(1, count, 2))
    found = {"done": 0, "failed": 0, "pools kept": 0}
    with _sides() as sides:
        prefill, decode = (side.attach(count, size) for side in sides)
        content = pattern(count, size)
        for turn in range(rounds):
            _write(prefill, content.reshape(-1))
            _write(decode, np.zeros(content.nbytes, np.uint8))
            victim, name = sides[turn % 2], f"r{turn}"
            ticket = _offer(prefill, name, source)
            decode.pull(name, ticket, blocks=_blocks(target), timeout=_WAIT)
            time.sleep(0.001 * turn)
            os.kill(victim.daemon.pid, signal.SIGKILL)
            victim.daemon.wait(_WAIT)
            victim.start()
            ended = _end_of(decode, name)
            got = _read(decode, content.nbytes).reshape(content.shape)
            if got[source].any():
                raise AssertionError(f"{name}: bytes outside of its blocks")
            if isinstance(ended, Done) and not np.array_equal(got[target], content[source]):
                raise AssertionError(f"{name}: done with wrong bytes")
            found["done" if isinstance(ended, Done) else "failed"] += 1
            if not np.array_equal(_read(prefill, content.nbytes).reshape(content.shape), content):
                raise AssertionError(f"{name}: the producer's pool has other bytes than before")
            for worker in (prefill, decode):
                _wait_attached(worker)
            found["pools kept"] += 1
    return {"pulls": rounds, **found}


def _wait_attached(worker: Worker) -> None:
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        try:
            worker.wait(0.1)
            worker.status(1.0)
        except KvdError:
            continue
        return
    raise AssertionError("a worker did not attach again")
