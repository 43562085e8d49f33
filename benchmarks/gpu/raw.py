"""NIXL alone, between two processes on one GPU, with memory of cuMemAlloc (cudaMalloc's), which UCX shares by itself.

`python -m benchmarks.gpu.raw BYTES` is the process that is read from.
"""

import json
import os
import subprocess
import sys
from typing import Any, Final

import numpy as np

from benchmarks.gpu.copies import median
from benchmarks.gpu.steps import needs_nixl
from kvd.bench.gpu import SIZES
from kvd.bench.raw import RawAgent
from kvd.bench.spec import pattern
from kvd.cuda.copies import copy
from kvd.cuda.device import Stream, device
from kvd.cuda.driver import call
from kvd.limits import KIB, MIB
from kvd.plan import Descriptors

_SETTINGS: Final = {
    "UCX_MODULES": "all",  # the daemon's settings leave out CUDA's
    "UCX_MEMTYPE_CACHE": "n",  # whose hooks need CUDA's runtime
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",  # it writes only, without NVLink
}


def speeds(*, quick: bool) -> dict[str, Any]:
    """GB/s of reads in blocks of each size, adjacent and scattered, every byte compared; and of one block alone, us."""
    needs_nixl()
    total, rounds = (4 * MIB, 1) if quick else (256 * MIB, 5)
    owner = subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-m", "benchmarks.gpu.raw", str(2 * total)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner, device(0).current():
        try:
            return _read(owner, total, rounds)
        finally:
            owner.kill()


def _read(owner: subprocess.Popen[bytes], total: int, rounds: int) -> dict[str, Any]:
    assert owner.stdout is not None  # noqa: S101 - it is a pipe
    said = next((line for line in iter(owner.stdout.readline, b"") if line.startswith(b"{")), None)
    if said is None:
        raise AssertionError("the process that is read from ended")
    there = json.loads(said)
    base, agent = _agent("reader", 2 * total)
    peer = agent.connect(bytes.fromhex(there["metadata"]))
    content = pattern(1, 2 * total).reshape(-1)
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"block": size}
        for way, step in (("adjacent", 1), ("scattered", 2)):
            offsets = np.arange(total // size, dtype=np.uint64) * np.uint64(size * step)
            wanted = Descriptors(offsets, offsets, np.full(len(offsets), size, np.uint64))
            got, expected = np.zeros(2 * total, np.uint8), np.zeros(2 * total, np.uint8)
            _copy(base, got.ctypes.data, 2 * total)
            row[f"{way} GB/s"] = total / median(rounds, agent.read, peer, there["base"], wanted) / 1e9
            _copy(got.ctypes.data, base, 2 * total)
            for offset in offsets.tolist():
                expected[offset : offset + size] = content[offset : offset + size]
            if not np.array_equal(got, expected):
                raise AssertionError(f"{way} blocks of {size} bytes arrived with other bytes")
        rows.append(row)
    zero = np.zeros(1, np.uint64)
    one = Descriptors(zero, zero, np.full(1, 16 * KIB, np.uint64))
    alone = median(6 * rounds, agent.read, peer, there["base"], one)
    return {"blocks": rows, "one block of 16 KiB, us": 1e6 * alone}


def _agent(name: str, size: int) -> tuple[int, RawAgent]:
    """An agent over new memory of the GPU, whose context is current, and where that is."""
    os.environ.update(_SETTINGS)
    base = int(call("cuMemAlloc", size))
    return base, RawAgent(f"{name}-{os.getpid()}", base, size, memory="VRAM")


def _copy(target: int, source: int, size: int) -> None:
    with Stream(device(0)) as stream:
        copy(stream, *(np.array([number], np.uint64) for number in (target, source, size)))
        stream.synchronize()


def main(size: int) -> None:
    """Serves until the input ends."""
    with device(0).current():
        base, agent = _agent("owner", size)
        content = pattern(1, size)
        _copy(base, content.ctypes.data, size)
        agent.serve()
        sys.stdout.write(json.dumps({"base": base, "metadata": agent.metadata.hex()}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    os._exit(0)  # without NIXL's teardown


if __name__ == "__main__":
    main(int(sys.argv[1]))
