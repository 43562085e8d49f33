"""Waits for ports and locks that a process which is dying still holds.

A process that was killed keeps them until the kernel has ended it, which takes seconds if it gets no processor, or has
hundreds of gigabytes to give back. Its successor is started before that.
"""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvd import limits
from kvd.units import printable

_PROC: Final = Path("/proc")
_NO_LISTENER: Final = "an ended connection or a socket that does not listen"
_LISTENING: Final = "0A"
_LOOK_SECONDS: Final = 0.05
_COMMAND_CHARACTERS: Final = 120


class Place(Protocol):
    """What one process has at a time."""

    @property
    def name(self) -> str:
        """For people."""

    def taken(self) -> bool:
        """Whether a process has it now; leaves it as it is."""

    def links(self) -> set[str]:
        """What the descriptors are, as /proc/PID/fd shows them, by which a process has it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """`count` TCP ports of `host`, an address or a name, between `first` and `last`, both included."""

    host: str
    first: int
    last: int
    count: int = 1

    @classmethod
    def of(cls, endpoint: str) -> "list[Ports]":
        """That of a `host:port`; none for port 0, which means any that is free."""
        host, _, port = endpoint.rpartition(":")
        return [cls(host.strip("[]"), int(port), int(port))] if int(port) else []

    @property
    def name(self) -> str:
        """For people."""
        if self.first == self.last:
            return f"port {self.first} of {self.host or 'all addresses'}"
        return f"{self.count} of the ports {self.first}-{self.last} of {self.host or 'all addresses'}"

    def taken(self) -> bool:
        """Whether none can be had, or processes leave fewer than `count`.

        From a server like UCX's the kernel keeps the ports of ended connections for a minute, too. One is enough to
        start with.
        """
        used = []
        for port in range(self.first, self.last + 1):
            if self._is_used(port):
                used.append(port)
            elif port - self.first + 1 - len(used) == self.count:
                return False
        total = self.last - self.first + 1
        held = {port for port, _ in _listening()}.intersection(used)
        return len(used) == total or total - len(held) < self.count

    def _is_used(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers bind: with this, only one that listens keeps others away, and this probe does not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, port))
            except OSError as error:
                return error.errno == errno.EADDRINUSE
            except (OverflowError, TypeError, UnicodeError):  # as of other errors, the server itself says what is wrong
                return False
        return False

    def links(self) -> set[str]:
        """The sockets that listen there, at whatever address."""
        return {f"socket:[{inode}]" for port, inode in _listening() if self.first <= port <= self.last}


async def wait_until_free(
    places: Sequence[Place],
    stopping: asyncio.Event,
    tell: Callable[[str], None],
    seconds: float = limits.PREDECESSOR_SECONDS,
) -> None:
    """Waits until nobody has these places, `seconds` at most, or `stopping` is set.

    If it has to wait, `tell` is called at once with what for, and who has it. What stays taken is for the caller to
    meet where it is opened.
    """
    deadline = time.monotonic() + seconds
    taken = [place for place in places if place.taken()]
    if taken:
        tell("; ".join(f"{place.name}, which {who} has" for place, who in zip(taken, holders(taken), strict=True)))
    while taken and not stopping.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await stopping.wait()
        taken = [place for place in taken if place.taken()]


def holders(places: Sequence[Place]) -> list[str]:
    """The processes that have each place, with their commands.

    `an unknown process` if /proc does not tell, and `_NO_LISTENER` if nobody listens at a port that is taken.

    It does not tell another user's, except root, nor those of other PID namespaces. It is read once for all places: a
    host may have millions of descriptors.
    """
    links = [place.links() for place in places]
    found: list[list[str]] = [[] for _ in places]
    with contextlib.suppress(OSError):  # there is no /proc
        for process in _processes():
            descriptors = _descriptors(process)
            for each, processes in zip(links, found, strict=True):
                if each & descriptors:
                    processes.append(f"pid {process.name} ({_command(process)})")
    unknown = ["an unknown process" if each else _NO_LISTENER for each in links]
    return [" and ".join(processes) or other for processes, other in zip(found, unknown, strict=True)]


def _listening() -> Iterator[tuple[int, str]]:
    """Ports at which somebody listens, at whatever address, and the numbers of the sockets."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENING:
                    yield int(local.rpartition(":")[2], 16), rest[5]


def _processes() -> Iterator[Path]:
    own = str(os.getpid())
    return (entry for entry in _PROC.iterdir() if entry.name.isdecimal() and entry.name != own)


def _descriptors(process: Path) -> set[str]:
    """What a process has open: its first thread may have ended, and shows nothing then."""
    with contextlib.suppress(OSError):  # it is gone, or not ours to look at
        for thread in (process / "task").iterdir():
            if found := set(_links(f"{thread}/fd")):
                return found
    return set()


def _links(folder: str) -> Iterator[str]:
    for descriptor in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"{folder}/{descriptor}")


def _command(process: Path) -> str:
    """Its command line, or only its name, which is what is left of one that is ending."""
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").strip() or (process / "comm").read_bytes()
    except OSError:
        return "gone meanwhile"
    text = printable(words.decode(errors="replace").strip())
    return text if len(text) <= _COMMAND_CHARACTERS else f"{text[:_COMMAND_CHARACTERS]}..."
