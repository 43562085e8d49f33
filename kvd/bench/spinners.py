"""Processes that spin, as engines do while they wait for each other, and so compete for the cores."""

import os
import sys
from pathlib import Path
from typing import Final

from kvd.processes import Processes

_YIELDING: Final = "yielding"


class Spinners(Processes):
    """`count` processes that compute without a pause while the `with` block runs.

    If they are `yielding`, they yield their core between any two steps, as vLLM's do while they wait: to others in
    their session or control group. Each has a session of its own.
    """

    def __init__(self, count: int, logs: Path, *, yielding: bool = False) -> None:
        super().__init__(logs)
        self._count = count
        self._arguments = (_YIELDING,) if yielding else ()

    def __enter__(self) -> "Spinners":
        for number in range(self._count):
            self.start(f"spinner-{number}", "kvd.bench.spinners", *self._arguments)
        return self


if __name__ == "__main__":
    if _YIELDING in sys.argv:
        while True:
            os.sched_yield()
    while True:
        pass
