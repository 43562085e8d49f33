"""How much host memory pools may take: what the host has, within the limits of the cgroups that this process is in.

Whoever takes more than its cgroup may is killed, and with it the pools of all its workers.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvd import limits
from kvd.cgroups import memory_limits
from kvd.errors import NoMemory
from kvd.units import printable

_PAGE_TABLES: Final = 512
"""The part of a mapping that the kernel takes for its page tables: 8 bytes for each page of 4 KiB."""


class Available(NamedTuple):
    """Bytes that can be had, and who says so, for people."""

    bytes: int
    where: str


def available() -> Available:
    """What this process can still take, in ordinary pages."""
    found = [Available(_host_bytes(), "on this host")]
    for limit in memory_limits():
        left = max(0, limit.free - limits.DAEMON_BYTES)
        found.append(Available(left, f"below the limit of {limit.limit} of the cgroup {printable(str(limit.folder))}"))
    return min(found)


class Room:
    """Room for pools that are being made, which `mappings` processes of the daemon map; any thread may use it.

    What two ask for together is more than what each sees alone, as memory is gone only once it is faulted in.
    """

    def __init__(self, look: Callable[[], Available] = available, *, mappings: int = 1) -> None:
        self._look = look
        self._mappings = mappings
        self._lock = threading.Lock()
        self._takers: set[_Taker] = set()

    @contextlib.contextmanager
    def taken(self, name: str, length: int) -> Iterator[Callable[[int], None]]:
        """Promises `length` bytes to the pool `name` while the block lasts, in which they are faulted in.

        Call what it gives with the descriptor of the file whose pages are to be counted.

        Raises:
            NoMemory: there is too little; the text has both figures.

        """
        taker = _Taker(length + self._mappings * length // _PAGE_TABLES)
        with self._lock:
            found = self._look()
            left = self._unpromised(found)
            if taker.bytes > left:
                text = f"pool {name!r} needs {length} bytes of memory, {left} are available {found.where}"
                if left < found.bytes:
                    text += f", beside {found.bytes - left} for other pools that are being made"
                text += f" (page tables take another {taker.bytes - length}): give the engine a smaller cache, or the "
                raise NoMemory(f"{text}daemon more memory", taker.bytes - left)
            self._takers.add(taker)
        try:
            yield taker.count
        finally:
            with self._lock:
                self._takers.remove(taker)
                taker.close()

    def _unpromised(self, found: Available) -> int:
        return found.bytes - sum(taker.missing() for taker in self._takers)


class _Taker:
    """A pool that is being made, and takes `bytes`."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self._descriptor = -1

    def count(self, descriptor: int) -> None:
        """From now on, what this file has got already is not missing."""
        self._descriptor = os.dup(descriptor)

    def missing(self) -> int:
        """Bytes that it has not got yet."""
        present = 0 if self._descriptor < 0 else os.fstat(self._descriptor).st_blocks * 512
        return max(0, self.bytes - present)

    def close(self) -> None:
        """Forgets the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _host_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
