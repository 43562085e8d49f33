"""What frameworks make of a pool; skipped where they are not installed."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu.steps import Skipped
from kvd.client.pool.cuda import DeviceBytes
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.limits import MIB


def torch(*, quick: bool) -> dict[str, Any]:  # noqa: ARG001
    """A CUDA graph writes to memory that is imported by its descriptor; the maker reads it."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    import torch as framework  # noqa: PLC0415 - an extra

    if not framework.cuda.is_available():
        raise Skipped("torch sees no GPU")
    framework.zeros(1, device="cuda:0")  # its context comes first
    length = 4 * MIB
    maker = Mapping.allocate(device(0), length)
    maker.zero()
    imported = Mapping.map_descriptor(device(0), maker.export(), length, writable=True)
    tensor = framework.as_tensor(DeviceBytes(imported, length), device="cuda:0")
    graph = framework.cuda.CUDAGraph()
    with framework.cuda.graph(graph):
        tensor += 1
    for _ in range(3):
        graph.replay()
    framework.cuda.synchronize()
    seen = set(maker.read(0, 64)) | set(maker.read(length - 64, 64))
    if seen != {3}:
        raise AssertionError(f"the maker sees {seen} where a graph added 1 three times")
    return {"torch": framework.__version__, "a graph over imported memory": "valid, its bytes are the maker's"}


def demo(*, quick: bool) -> dict[str, Any]:
    """Two engines that compute on the CPU, with their pools on the GPU."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    amount = ("--requests", "4", "--tokens", "3") if quick else ("--requests", "16", "--tokens", "8")
    command = [sys.executable, "-m", "kvd.cli.main", "demo", "--device", "cuda:0", "--json", *amount]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if ran.returncode:
        raise AssertionError(f"status {ran.returncode}: {ran.stderr[-1200:]}")
    total = json.loads(ran.stdout)["total"]
    return {"requests": int(amount[1]), **total}
