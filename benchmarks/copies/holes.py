"""What becomes of a process that copies from one pool to another, and the owner of one has taken its pages away.

As a module, it is the process that copies: `python -m benchmarks.copies.holes WAY PLIGHT FOLDER`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.copies.ways import WAYS
from kvd import cgroups
from kvd.errors import ErrorCode, refusal
from kvd.limits import MIB
from kvd.memory.mapping import HUGE_PAGE, Mapping, give_back
from kvd.memory.memfd import Backing, MemfdProvider

_POOL: Final = 4 * HUGE_PAGE
_LIMIT: Final = 4 * MIB
"""Bytes that the process may use in the cgroup that has a limit: less than the pool."""
_HUGE_PAGES: Final = Path("/proc/sys/vm/nr_hugepages")

PLIGHTS: Final = {
    "memory": "the source has no pages, and there is memory",
    "cgroup": "the source has no pages, and the cgroup has none left",
    "source": "the source has no pages, and no huge page is left",
    "target": "the target has no pages, and no huge page is left",
}


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended that copied in one `way`, and the bytes that were charged to it."""

    way: str
    plight: str
    end: str
    charged: str


def ends() -> Iterator[End]:
    """Has processes copy in each way, in each plight.

    Raises:
        BadRequest: `BAD_CONFIG`, no control group or huge page can be made here; it takes root.

    """
    for plight in PLIGHTS:
        for way in WAYS:
            yield _end(way, plight)


def _end(way: str, plight: str) -> End:
    with contextlib.ExitStack() as stack:
        try:
            if plight in ("source", "target"):
                stack.enter_context(_huge_pages(_POOL // HUGE_PAGE))
            group = stack.enter_context(_group(_LIMIT if plight == "cgroup" else None))
        except OSError as error:
            raise refusal(ErrorCode.BAD_CONFIG, f"this takes root, and control groups for memory: {error}") from error
        command = [sys.executable, "-m", "benchmarks.copies.holes", way, plight, str(group)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the command is ours
    if ended.returncode:
        return End(way, plight, f"killed by {signal.Signals(-ended.returncode).name}", "")
    found, _, charged = ended.stdout.splitlines()[-1].rpartition(": ")
    return End(way, plight, found, charged)


@contextlib.contextmanager
def _huge_pages(count: int) -> Iterator[None]:
    before = _HUGE_PAGES.read_text()
    _HUGE_PAGES.write_text(str(count))
    try:
        yield
    finally:
        _HUGE_PAGES.write_text(before)


@contextlib.contextmanager
def _group(limit: int | None) -> Iterator[Path]:
    """A control group of its own for the process, below this one's."""
    version_1 = cgroups.folders("memory")
    parent = (version_1 or cgroups.folders())[-1]
    group = Path(tempfile.mkdtemp(prefix="kvd-holes-", dir=parent))
    try:
        if limit is not None:
            (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def _charged(group: Path) -> int:
    version_1 = group / "memory.usage_in_bytes"
    return int((version_1 if version_1.exists() else group / "memory.current").read_text())


def _copy(way: str, plight: str, group: Path) -> None:
    """Takes the pages away from one of two pools, and copies within `group`."""
    plain, huge = MemfdProvider(Backing.PLAIN), MemfdProvider(Backing.HUGETLB)
    source, target = ((huge if plight == side else plain).allocate(side, _POOL) for side in ("source", "target"))
    mapping = Mapping(source.descriptor, _POOL, writable=False)
    pieces = [np.array([each], dtype=np.uint64) for each in (target.base, 0, _POOL)]
    WAYS[way](source.descriptor, mapping, *pieces)
    give_back((target if plight == "target" else source).descriptor, _POOL)
    if plight in ("source", "target"):
        huge.allocate("what others took", _POOL)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    before = _charged(group)
    try:
        WAYS[way](source.descriptor, mapping, *pieces)
    except OSError as error:
        found = f"an error, {error.strerror}"
    else:
        found = "it ends well"
    print(f"{found}: {(_charged(group) - before) / MIB:.0f} MiB", flush=True)


if __name__ == "__main__":
    _copy(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
