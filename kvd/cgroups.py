"""The control groups of this process: what its container, its unit or its session may use of the host."""

from pathlib import Path
from typing import Final, NamedTuple

_OWN: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 60
"""What version 1 says where there is none is a little below 2 ** 63."""


class MemoryLimit(NamedTuple):
    """A cgroup's limit, and how much of it is free, file caches included; both in bytes."""

    folder: Path
    limit: int
    free: int


def folders(controller: str = "", own: Path = _OWN, root: Path = _ROOT) -> list[Path]:
    """The folder of this process's cgroup and those above it, as far as they can be seen.

    Of version 2, or of version 1's `controller`, which has a tree of its own.
    """
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / controller
            inner = top / path.lstrip("/")
            return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return []


def memory_limits(own: Path = _OWN, root: Path = _ROOT) -> list[MemoryLimit]:
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
