"""How long the machine itself takes the processor away from programs that never wait: the floor of every latency here.

A hypervisor with other guests stops a virtual processor for milliseconds, the more so when all of them are busy. Run as
`python -m kvd.bench.stalls SECONDS` it is one such program, and prints its gaps.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LONG: Final = 0.003
"""What a status may take while a long pull runs."""

_SECONDS = 3.0
_SHORTEST = 0.0005
"""Gaps below it are the program's own, or the kernel's tick."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """Of as many programs as there are cores. Where more than a hundredth of the time lies in gaps longer than `LONG`,
    a 99th percentile cannot stay below it, whatever is measured.
    """

    longest: float
    """Seconds."""
    share: float
    """Of the time that lies in gaps longer than `LONG`."""


def measure() -> Stalls:
    """Keeps every core busy for three seconds, with nothing beside it."""
    command = [sys.executable, "-m", "kvd.bench.stalls", str(_SECONDS)]
    cores = os.cpu_count() or 1
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(cores)]  # noqa: S603 - ours
    gaps: list[float] = [gap for program in programs for gap in json.loads(program.communicate()[0])]
    return Stalls(longest=max(gaps, default=0.0), share=sum(gap for gap in gaps if gap > LONG) / _SECONDS / cores)


def gaps_of(seconds: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Computes for so long; the times, in seconds, for which the clock went on and the program did not."""
    found = []
    last = clock()
    end = last + seconds
    while last < end:
        now = clock()
        if now - last > _SHORTEST:
            found.append(now - last)
        last = now
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(gaps_of(float(sys.argv[1]))))
