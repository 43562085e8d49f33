"""Pulls between two daemons with pools on a GPU, beside one copy of all their bytes by the GPU itself.

The worker is this process, which has the pools of both sides.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.bench.spec import flat_spec, pattern, tokens_of
from kvd.client import Blocks, Cancelled, Done, Failed, Worker
from kvd.client.events import Event
from kvd.cuda.copies import copy
from kvd.cuda.device import Device, Stream, device
from kvd.cuda.memory import Mapping
from kvd.errors import ErrorCode, refusal
from kvd.limits import KIB, MIB
from kvd.processes import Child, Processes

Bytes = NDArray[np.uint8]

SIZES: Final = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
"""Bytes of the blocks that are measured."""
SECONDS: Final = 60.0
"""For an attach, and for a pull."""
_ALONE: Final = 16 * KIB
"""Bytes of a block that is pulled alone."""


class Side:
    """A daemon whose pools are in `memory`: "cpu", or "cuda:N"."""

    def __init__(self, processes: Processes, folder: Path, name: str, memory: str) -> None:
        self.processes = processes
        self.memory = memory
        self.name = name
        self.socket = folder / f"{name}.sock"
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Starts the daemon, or the next one."""
        self.starts += 1
        self.daemon: Child = self.run(f"{self.name}-{self.starts}")
        self.daemon.wait_until(self.socket.exists)

    def run(self, log: str) -> Child:
        """A process that serves; `log` names its log."""
        return self.processes.start_daemon(self.name, self.socket, "--device", self.memory, log=log)

    def attach(self, blocks: int, block_bytes: int) -> "Pool":
        """A worker with a new pool."""
        return attach(self.name, self.socket, blocks, block_bytes)


def attach(side: str, socket: Path, blocks: int, block_bytes: int) -> "Pool":
    """A worker at the daemon of the side with this name."""
    spec = flat_spec(blocks, block_bytes)
    worker = Worker.attach(str(socket), name=f"{side}-{block_bytes}", spec=spec, timeout=SECONDS)
    return Pool(worker, (blocks, block_bytes))


class Pool:
    """A worker and its pool, of `shape`: blocks, bytes of each."""

    def __init__(self, worker: Worker, shape: tuple[int, int]) -> None:
        self.worker = worker
        self.shape = shape

    def write(self, content: Bytes) -> None:
        """Makes it `content`, uint8 [blocks, block_bytes]."""
        if not self.worker.device:
            self._host()[:] = content
            return
        memory = self.worker.device_pool
        _copy(device(memory.ordinal), memory.pointer, content.ctypes.data, content.nbytes)

    def read(self) -> Bytes:
        """What it is, uint8 [blocks, block_bytes]."""
        if not self.worker.device:
            return self._host().copy()
        memory, found = self.worker.device_pool, np.empty(self.shape, np.uint8)
        _copy(device(memory.ordinal), found.ctypes.data, memory.pointer, found.nbytes)
        return found

    def _host(self) -> Bytes:
        return np.frombuffer(self.worker.pool, np.uint8).reshape(self.shape)

    def offer(self, name: str, ids: Sequence[int]) -> str:
        """The ticket of an offer of these blocks."""
        self.worker.poll()
        return self.worker.offer(name, tokens=tokens_of(len(ids)), blocks=_blocks(ids), ttl=SECONDS, timeout=SECONDS)

    def pull(self, name: str, ticket: str, ids: Sequence[int]) -> None:
        """Begins a pull into these blocks."""
        self.worker.pull(name, ticket, blocks=_blocks(ids), timeout=SECONDS)

    def end_of(self, name: str) -> Event:
        """How a pull ended.

        Raises:
            InternalError: it did not.

        """
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for event in self.worker.wait(max(0.01, deadline - time.monotonic())):
                if isinstance(event, Done | Failed | Cancelled) and event.request == name:
                    return event
        raise refusal(ErrorCode.INTERNAL, f"pull {name!r} did not end within {SECONDS:.0f} s")

    def leave(self) -> None:
        """Gives the pool back."""
        self.worker.detach(SECONDS)
        self.worker.close()


@contextmanager
def two_sides(source: str, target: str, *, kind: type[Side] = Side) -> Iterator[tuple[Side, Side]]:
    """A producer with pools in `source` and a consumer with pools in `target`: `cpu` or `cuda:N`."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder, Processes(Path(folder)) as processes:
        yield kind(processes, Path(folder), "p", source), kind(processes, Path(folder), "d", target)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of pulls of `bytes` bytes in blocks of `block` bytes, and of one copy of all: seconds."""

    block: int
    bytes: int
    one_copy: float
    adjacent: float
    scattered: float

    def rate(self, seconds: float) -> float:
        """GB/s if it takes `seconds`."""
        return self.bytes / seconds / 1e9


def measure(ordinal: int, *, quick: bool, progress: Callable[[], None]) -> Iterator[Measured]:
    """Pulls between pools on one GPU in blocks of each of `SIZES`; calls `progress` after each size.

    Every byte of the consumer's pool is compared after each pull.

    Raises:
        Unavailable: `NO_DEVICE`, there is no such GPU.
        InternalError: a pull failed, or brought wrong bytes.

    """
    total, rounds = (4 * MIB, 1) if quick else (256 * MIB, 5)
    one_copy = _seconds_of_one_copy(device(ordinal), total, rounds)
    with two_sides(f"cuda:{ordinal}", f"cuda:{ordinal}") as (producer, consumer):
        for size in SIZES:
            count = 2 * total // size
            source, target = producer.attach(count, size), consumer.attach(count, size)
            pulls = ComparedPulls(source, target, pattern(count, size))
            half, every_other = range(count // 2), range(0, count, 2)
            yield Measured(
                size,
                total,
                one_copy,
                pulls.median("adjacent", half, half, rounds),
                pulls.median("scattered", every_other, range(1, count, 2), rounds),
            )
            source.leave()
            target.leave()
            progress()


def seconds_of_one_block(memory: str, *, quick: bool) -> float:
    """The median of pulls of one block of 16 KiB between pools in `memory`: from a request to its end.

    Raises:
        InternalError: a pull failed.

    """
    with two_sides(memory, memory) as (producer, consumer):
        source, target = producer.attach(16, _ALONE), consumer.attach(16, _ALONE)
        return statistics.median(
            [_pull(source, target, f"r{turn}", [7], [9]) for turn in range(7 if quick else 300)][1:]
        )


class ComparedPulls:
    """Pulls of blocks of `content`, which `source` has, into `target`."""

    def __init__(self, source: Pool, target: Pool, content: Bytes) -> None:
        self._source, self._target, self._content = source, target, content
        source.write(content)

    def median(self, way: str, source: Sequence[int], target: Sequence[int], rounds: int) -> float:
        """Seconds from a request to its end; the first pull, which meets the peer, does not count."""
        return statistics.median([self._compared(f"{way}-{turn}", source, target) for turn in range(rounds + 1)][1:])

    def _compared(self, name: str, source: Sequence[int], target: Sequence[int]) -> float:
        expected = np.zeros_like(self._content)
        self._target.write(expected)
        seconds = _pull(self._source, self._target, name, source, target)
        expected[list(target)] = self._content[list(source)]
        if not np.array_equal(self._target.read(), expected):
            what = f"pull {name!r} in blocks of {self._content.shape[1]} bytes"
            raise refusal(ErrorCode.INTERNAL, f"{what} is done with wrong bytes, or wrote outside of its blocks")
        return seconds


def _pull(source: Pool, target: Pool, name: str, source_ids: Sequence[int], target_ids: Sequence[int]) -> float:
    ticket = source.offer(name, source_ids)
    began = time.perf_counter()
    target.pull(name, ticket, target_ids)
    ended = target.end_of(name)
    seconds = time.perf_counter() - began
    if not isinstance(ended, Done):
        raise refusal(ErrorCode.INTERNAL, f"pull {name!r} in blocks of {source.shape[1]} bytes ended as {ended}")
    return seconds


def _seconds_of_one_copy(gpu: Device, size: int, rounds: int) -> float:
    source, target = (Mapping.allocate(gpu, size) for _ in range(2))
    for memory in (source, target):
        memory.zero()
    taken = []
    with gpu.current(), Stream(gpu) as stream:
        words = [np.array([number], np.uint64) for number in (target.base, source.base, size)]
        for _ in range(rounds + 1):
            began = time.perf_counter()
            copy(stream, *words)
            stream.synchronize()
            taken.append(time.perf_counter() - began)
    for memory in (source, target):
        memory.close()
    return statistics.median(taken[1:])


def _copy(gpu: Device, target: int, source: int, size: int) -> None:
    with gpu.current(), Stream(gpu) as stream:
        copy(stream, *(np.array([number], np.uint64) for number in (target, source, size)))
        stream.synchronize()


def _blocks(ids: Sequence[int]) -> list[Blocks]:
    return [Blocks(group=0, first=0, ids=list(ids))]
