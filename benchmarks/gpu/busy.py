"""Copies beside an engine that keeps the GPU busy: another process multiplies matrices without a pause.

`python -m benchmarks.gpu.busy SIZE` is that process. It prints the time after each batch of products.
"""

import importlib.util
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from benchmarks.gpu.steps import Skipped
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.limits import KIB, MIB
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.transport.samehost.gpu import Gpu

_BATCHES = {8192: 2, 1024: 50}
"""Products between two looks at the clock, by the size of the matrices: a large one takes 1.6 ms on an H200."""
_PAUSE = 0.002
"""Seconds between two copies."""


def speeds(*, quick: bool) -> dict[str, Any]:
    """How long copies take, and what is left of the products that are made without them."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    import torch  # noqa: PLC0415 - an extra

    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    seconds = 0.2 if quick else 0.6
    return {"copies": [row for size in _BATCHES for row in _beside(size, seconds)]}


def _beside(size: int, seconds: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu.busy", str(size)]
    copies = _copies()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:  # noqa: S603 - ours
        try:
            assert engine.stdout is not None  # noqa: S101 - it is a pipe
            if not engine.stdout.readline():
                raise AssertionError(f"the process that multiplies ended, with status {engine.wait()}")
            batches: list[float] = []
            threading.Thread(target=_listen, args=(engine.stdout, batches), daemon=True).start()
            time.sleep(0.3)  # it is in full swing then
            rows = []
            for name, action in copies.items():
                taken, rate = _measure(action, batches, seconds)
                row: dict[str, Any] = {"matrices": size, "copies": name, "ms": 1e3 * statistics.median(taken)}
                row["ms, 95 %"] = 1e3 * sorted(taken)[int(0.95 * len(taken))]
                rows.append({**row, "products/s": _BATCHES[size] * rate})
            return rows
        finally:
            engine.kill()


def _listen(output: IO[str], batches: list[float]) -> None:
    batches.extend(map(float, output))


def _measure(action: Callable[[], None], batches: list[float], seconds: float) -> tuple[list[float], float]:
    """How long each copy took, and batches a second meanwhile."""
    taken, began = [], time.monotonic()
    while time.monotonic() < began + seconds:
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
        time.sleep(_PAUSE)
    ended = time.monotonic()
    time.sleep(0.1)  # what was printed meanwhile has been read
    return taken, sum(began < at <= ended for at in batches) / (ended - began)


def _copies() -> dict[str, Callable[[], None]]:
    gpu = Gpu(device(0).uuid)
    source, target = (Mapping.allocate(device(0), 128 * MIB) for _ in range(2))
    host = MemfdProvider(Backing.PLAIN).allocate("host", 4 * MIB)
    gpu.pin(host.base, host.length)

    def blocks(base: int, total: int, size: int, step: int) -> Any:
        return np.uint64(base) + np.arange(total // size, dtype=np.uint64) * np.uint64(step * size)

    def copying(copy: Callable[..., None], to: int, total: int, size: int) -> Callable[[], None]:
        lengths = np.full(total // size, size, np.uint64)
        there, here = blocks(source.base, total, size, 2), blocks(to, total, size, 1)
        return lambda: copy(here, there, lengths)

    found = {
        "none": lambda: time.sleep(0.001),
        "one of 16 KiB, kernel": copying(gpu.copy_within, target.base, 16 * KIB, 16 * KIB),
        "one of 16 KiB, call": copying(gpu.copy, target.base, 16 * KIB, 16 * KIB),
        "32 MiB in 16 KiB, kernel": copying(gpu.copy_within, target.base, 32 * MIB, 16 * KIB),
        "32 MiB in 16 KiB, call": copying(gpu.copy, target.base, 32 * MIB, 16 * KIB),
        "32 MiB in 256 KiB, kernel": copying(gpu.copy_within, target.base, 32 * MIB, 256 * KIB),
        "32 MiB in 256 KiB, call": copying(gpu.copy, target.base, 32 * MIB, 256 * KIB),
        "4 MiB in 16 KiB to the host, call": copying(gpu.copy, host.base, 4 * MIB, 16 * KIB),
    }
    for action in found.values():
        action()
    return found


def main(size: int) -> None:
    """Multiplies until it is killed."""
    import torch  # noqa: PLC0415

    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in itertools.count():
        for _ in range(_BATCHES[size]):
            torch.mm(left, right)
        torch.cuda.synchronize()
        sys.stdout.write(f"{time.monotonic()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
