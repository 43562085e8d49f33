"""The process in which a daemon reads from other hosts."""

import contextlib
from pathlib import Path

from tests.support.fleet import Daemon, until


def transport_now(daemon: Daemon) -> int | None:
    """Its process id; None if none runs now."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon.child.pid and b"kvd.transport.nixl.process" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    return None


def transport_of(daemon: Daemon) -> int:
    """Its process id, once it runs."""
    for _ in until(f"{daemon.name} has a transport's process"):
        if (pid := transport_now(daemon)) is not None:
            return pid
    raise AssertionError("unreachable")
