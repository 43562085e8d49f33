"""A worker that is killed while the GPU still writes to its pool for it: when do the writes end?

A pool goes to a successor once the worker's pidfd is readable, so nothing may be written after that.
`python -m benchmarks.gpu.workers DESCRIPTOR BYTES` is the worker.
"""

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from kvd.cuda.device import Stream, device
from kvd.cuda.driver import call
from kvd.cuda.memory import Mapping
from kvd.limits import GIB, MIB

WATCH_SECONDS = 0.5
"""How long the memory is looked at after the worker has ended."""


def kills(*, quick: bool) -> dict[str, Any]:
    """Writes are looked for by copies of one byte, in the process that made the memory."""
    length, rounds = (16 * MIB, 1) if quick else (GIB, 8)
    memory = Mapping.allocate(device(0), length)
    memory.zero()
    last, ended = zip(*(_kill(memory) for _ in range(rounds)), strict=True)
    return {
        "workers killed": rounds,
        "bytes of a write": length,
        "last write seen, ms after SIGKILL, at most": 1e3 * max(last),
        "pidfd readable, ms after SIGKILL, at least": 1e3 * min(ended),
        "at most": 1e3 * max(ended),
    }


def _kill(memory: Mapping) -> tuple[float, float]:
    """Seconds from SIGKILL to the last write that was seen, and to when the worker's pidfd is readable."""
    descriptor = memory.export()
    command = [sys.executable, "-m", "benchmarks.gpu.workers", str(descriptor), str(memory.length)]
    with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE) as worker:  # noqa: S603 - ours
        os.close(descriptor)
        pidfd = os.pidfd_open(worker.pid)
        if worker.stdout is None or not worker.stdout.readline():
            raise AssertionError(f"the worker ended by itself, with status {worker.wait()}")
        seen = memory.read(memory.length - 1, 1)
        while memory.read(memory.length - 1, 1) == seen:  # it writes
            if select.select([pidfd], [], [], 0)[0]:
                raise AssertionError("the worker ended by itself before a write was seen")
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        last = ended = 0.0
        while not ended or time.monotonic() - began < ended + WATCH_SECONDS:
            gone = bool(select.select([pidfd], [], [], 0)[0])
            now = time.monotonic() - began
            found = memory.read(memory.length - 1, 1)
            if found != seen:
                last, seen = now, found
                if ended and last > ended:
                    raise AssertionError(f"a write {1e3 * (last - ended):.3f} ms after the worker's pidfd was readable")
            if gone and not ended:
                ended, seen = now, memory.read(memory.length - 1, 1)
        os.close(pidfd)
    return last, ended


def main(descriptor: int, length: int) -> None:
    """Fills the memory with one value after the other until it is killed; as many are under way as the driver takes."""
    gpu = device(0)
    memory = Mapping.map_descriptor(gpu, descriptor, length, writable=True)
    with gpu.current(), Stream(gpu) as stream:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for value in itertools.count():
            call("cuMemsetD8Async", memory.base, value % 251, length, stream.handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
