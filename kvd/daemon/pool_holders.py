"""Which process a pool was lent to, for the next daemon: it sees no session of a process that had lost its own."""

import contextlib
import os
from pathlib import Path
from typing import Protocol

from kvd.net.unix import readable


class Processes(Protocol):
    """Descriptors that stand for processes, as pidfds do."""

    def open(self, pid: int) -> int:
        """A descriptor of a process; -1 if none can be had."""

    def number(self, descriptor: int) -> int:
        """The number of a process that lives, -1 if it lives and has none here; 0 once it has ended."""


class Pidfds:
    """The kernel's."""

    def open(self, pid: int) -> int:
        """See `Processes`. A `pid` of 0 is of another PID namespace."""
        if pid > 0:
            with contextlib.suppress(OSError):
                return os.pidfd_open(pid)
        return -1

    def number(self, descriptor: int) -> int:
        """See `Processes`."""
        if readable(descriptor):
            return 0
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(":")
                if key == "Pid" and int(value) > 0:
                    return int(value)
        return -1
