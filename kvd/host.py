"""What kvd reads of the host that it runs on."""

import math
import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def boot_id() -> str:
    """The same for all processes of one running kernel, whatever containers they are in."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel has."""
    return sorted(entry.name for entry in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []


def cores(cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int:
    """How many cores this process may use: those of its affinity, or fewer where its cgroup (v2) has a quota."""
    found = len(os.sched_getaffinity(0))
    (path,) = [line[3:] for line in cgroup.read_text().splitlines() if line.startswith("0::")] or ["/"]
    own = cgroups / path.lstrip("/")
    for folder in [own, *own.parents]:
        if folder.is_relative_to(cgroups) and (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                found = min(found, math.ceil(int(quota) / int(period)))
    return found
