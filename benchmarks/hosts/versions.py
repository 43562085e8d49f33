"""Pulls over TCP between two network namespaces, by this checkout and by another one, in turns.

Both pairs of daemons run all the time, each in namespaces of its own, so that whatever else the machine does hits both.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.hosts import pulls
from benchmarks.hosts.namespaces import Host, Hosts
from kvd.errors import ErrorCode, InternalError

TIMES: Final = {"16 KiB": 40, "1 MiB": 20, "64 MiB": 4, "64 MiB in blocks of 16 KiB": 4}
"""Pulls of each checkout in one round."""
_TURN: Final = 4
"""In how many parts those come, this checkout's and the other's by turns."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of a pull: the median of each round, of the other checkout and of this one."""

    case: str
    other: Sequence[float]
    this: Sequence[float]

    @property
    def ratio(self) -> float:
        """The time of this one over the other's in the same round, the median."""
        return statistics.median(this / other for this, other in zip(self.this, self.other, strict=True))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"case": self.case, "other": list(self.other), "this": list(self.this), "ratio": self.ratio}


class _Reader:
    """A reading process on a host."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def pull(self, case: str, times: int) -> list[float]:
        """Seconds of so many pulls."""
        assert self._process.stdin is not None  # noqa: S101 - piped
        self._process.stdin.write(json.dumps([case, times]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> list[float]:
        """The next one."""
        assert self._process.stdout is not None  # noqa: S101 - piped
        line = self._process.stdout.readline()
        if not line:
            raise InternalError(ErrorCode.INTERNAL, f"the reading side ended with status {self._process.wait()}")
        seconds: list[float] = json.loads(line)
        return seconds


@contextlib.contextmanager
def _reader(checkout: Path, producer: Host, consumer: Host) -> Iterator[_Reader]:
    command = [*consumer.within, sys.executable, "-P", str(Path(pulls.__file__).resolve())]
    environment = {**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": str(checkout.resolve())}
    with subprocess.Popen(  # noqa: S603 - the command is ours
        [*command, json.dumps(producer.within), producer.address, consumer.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=checkout,  # Python looks for the daemons' code there first
        text=True,
    ) as process:
        try:
            reader = _Reader(process)
            reader.answer()
            yield reader
        finally:
            assert process.stdin is not None  # noqa: S101 - piped
            process.stdin.close()
            process.wait()


def compare(other: Path, rounds: int, progress: Callable[[], None]) -> list[Compared]:
    """Measures every case in `rounds`; calls `progress` after each round."""
    here = Path(__file__).resolve().parents[2]
    found: dict[str, dict[str, list[float]]] = {case: {"other": [], "this": []} for case in TIMES}
    with (
        Hosts("a-producer", "a-consumer", "b-producer", "b-consumer") as (ap, ac, bp, bc),
        _reader(other, ap, ac) as a,
        _reader(here, bp, bc) as b,
    ):
        for _ in range(rounds):
            for case in TIMES:
                medians = _round(case, {"other": a, "this": b})
                for which, seconds in medians.items():
                    found[case][which].append(seconds)
            progress()
    return [Compared(case, each["other"], each["this"]) for case, each in found.items()]


def _round(case: str, readers: Mapping[str, _Reader]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {which: [] for which in readers}
    for turn in range(_TURN):
        for which in list(readers)[:: -1 if turn % 2 else 1]:  # who comes second finds warmer or emptier caches
            seconds[which] += readers[which].pull(case, TIMES[case] // _TURN)
    return {which: statistics.median(each) for which, each in seconds.items()}
