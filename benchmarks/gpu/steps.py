"""The steps of the check: `python -m benchmarks.gpu.steps NAME [--quick]` prints the answers of one as JSON."""

import importlib
import json
import sys
from dataclasses import dataclass
from typing import Any, Final

from kvd.transport.nixl.ucx import nixl_name


class Skipped(Exception):
    """Raised by a step that a machine cannot answer; the text says why."""


def needs_nixl() -> None:
    """Raises `Skipped` where it is not installed."""
    try:
        nixl_name()
    except ImportError as error:
        raise Skipped(str(error)) from error


@dataclass(frozen=True)
class Step:
    """`function` of the module `benchmarks.gpu.MODULE` takes `quick`, and returns the answers."""

    question: str
    module: str
    function: str
    seconds: float


STEPS: Final = {
    "driver": Step("which GPU and driver; what they can share and register", "driver", "facts", 30),
    "tests": Step("do the tests of memory and copies pass on this driver", "driver", "tests", 150),
    "memory": Step("does memory outlive its maker; what do making, zeroing and moving cost", "memory", "costs", 60),
    "copies": Step("how fast are copies of 4 KiB to 1 MiB beside one copy of all", "copies", "speeds", 90),
    "busy": Step("what do copies cost beside an engine that keeps the GPU busy, and it them", "busy", "speeds", 60),
    "pinned": Step("how fast is a slice into host memory and out of it, pinned or not", "copies", "host", 30),
    "pulls": Step("do pulls between two daemons land; how fast, beside one copy of all", "pulls", "speeds", 120),
    "nixl": Step("how fast is NIXL alone, with memory of cudaMalloc", "raw", "speeds", 60),
    "kills": Step("does a pull whose daemon or worker is killed end, never in wrong bytes", "kills", "kills", 90),
    "hosts": Step("do pulls between two hosts land by way of pinned memory", "hosts", "pulls", 120),
    "workers": Step("does a killed worker's GPU write to its pool after its pidfd has fired", "workers", "kills", 60),
    "torch": Step("is a pool a tensor; does a CUDA graph that writes to it stay valid", "frameworks", "torch", 90),
    "demo": Step("does `kvd demo --device cuda:0` give the tokens of a single engine", "frameworks", "demo", 90),
    "vllm": Step("do two engines of vLLM, their caches in pools, give the tokens of one", "serving", "vllm", 240),
}


def main(name: str, *, quick: bool) -> None:
    """Runs one step."""
    step = STEPS[name]
    function = getattr(importlib.import_module(f"benchmarks.gpu.{step.module}"), step.function)
    said: dict[str, Any] = {}
    try:
        said["answers"] = function(quick=quick)
    except Skipped as skipped:
        said["skipped"] = str(skipped)
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    from benchmarks.gpu import steps  # as others import it: `Skipped` is one class

    steps.main(sys.argv[1], quick="--quick" in sys.argv[2:])
