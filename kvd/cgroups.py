"""The control groups of this process: what its container, its unit or its session may use of the host."""

import os
from pathlib import Path
from typing import Final, NamedTuple

OWN: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""What version 1 says where there is none is a little below 2 ** 63."""

_SHARES_PER_WEIGHT: Final = 10.24
"""Version 1's `cpu.shares` are 1024 where version 2's `cpu.weight` is 100."""


class MemoryLimit(NamedTuple):
    """A cgroup's limit, and how much of it is free, file caches included; both in bytes."""

    folder: Path
    limit: int
    free: int


def folders(controller: str = "", own: Path = OWN, root: Path = ROOT) -> list[Path]:
    """The folder of this process's cgroup and those above it, as far as they can be seen.

    Of version 2, or of version 1's `controller`, which has a tree of its own.
    """
    # Names are any bytes but a newline, also what Python takes for the end of a line. The file is empty where no
    # hierarchy is mounted.
    for line in filter(None, os.fsdecode(own.read_bytes()).split("\n")):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / controller
            inner = top / path.lstrip("/")
            return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return []


def memory_limits(own: Path = OWN, root: Path = ROOT) -> list[MemoryLimit]:
    """The limits on this process's memory, of its cgroup and of those above it."""
    found = []
    for folder in folders("", own, root):
        found += _limit(folder, "memory.max", "memory.current", "")
    for folder in folders("memory", own, root):
        found += _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return found


def _limit(folder: Path, limit: str, usage: str, prefix: str) -> list[MemoryLimit]:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return []
        used = int((folder / usage).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # the root has no limit, and says nothing of it
        return []
    cached = sum(int(counts.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return [MemoryLimit(folder, int(text), max(0, int(text) - used + cached))]


class ProcessorGroup(NamedTuple):
    """A cgroup that the kernel weighs against others; 100 is the weight of one that was given none."""

    folder: Path
    weight: float


class Quota(NamedTuple):
    """How many cores a cgroup may use; how often, and for how many seconds, it was stopped for using more."""

    folder: Path
    cores: float
    throttled: int
    seconds: float


def processor_group(own: Path = OWN, root: Path = ROOT) -> ProcessorGroup | None:
    """The cgroup as which a process is weighed; None if that is the root's, which is none.

    Raises:
        OSError: the process is gone.

    """
    for folder in folders("cpu", own, root):
        if folder != root / "cpu" and (folder / "cpu.shares").exists():
            return ProcessorGroup(folder, int((folder / "cpu.shares").read_text()) / _SHARES_PER_WEIGHT)
    for folder in folders("", own, root):
        if (folder / "cpu.weight").exists():
            return ProcessorGroup(folder, int((folder / "cpu.weight").read_text()))
    return None


def quotas(own: Path = OWN, root: Path = ROOT) -> list[Quota]:
    """The limits on a process's use of processors, of its cgroup and of those above it.

    Raises:
        OSError: the process is gone.

    """
    found = []
    for folder in folders("", own, root):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            found += _quota(folder, quota, period, "throttled_usec", 1e-6)
    for folder in folders("cpu", own, root):
        if (folder / "cpu.cfs_quota_us").exists():
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            found += _quota(folder, quota, period, "throttled_time", 1e-9)
    return found


def _quota(folder: Path, quota: str, period: str, throttled: str, unit: float) -> list[Quota]:
    if quota in ("max", "-1"):
        return []
    stat = folder / "cpu.stat"
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    cores = int(quota) / int(period)
    return [Quota(folder, cores, int(counts.get("nr_throttled", 0)), int(counts.get(throttled, 0)) * unit)]
