"""What kvd tells systemd and gets from it: readiness, the watchdog, and the store that keeps descriptors.

The protocol is datagrams of `KEY=value` lines to the socket in $NOTIFY_SOCKET (sd_notify(3)), with descriptors beside
them. Without such a socket nothing is sent or kept, and the daemon serves just as well. It is written here because
`sdnotify` sends no descriptors, blocks and forgets what was refused, and `systemd-python` needs systemd's headers.

Beside a pool lies a pidfd of the process that it was lent to: the next daemon sees no session of one that had lost its.
"""

import array
import contextlib
import hashlib
import os
import socket
import stat
from collections import deque
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from kvd import limits
from kvd.actors.runtime.actor import Loop
from kvd.errors import ErrorCode, refusal
from kvd.net.unix import readable
from kvd.units import printable


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


_FIRST_DESCRIPTOR: Final = 3
"""Where passed descriptors begin (sd_listen_fds(3))."""
_MAX_OWED: Final = 1024
"""Notifications kept for a socket that refuses them: far more than a daemon's start and pools send."""

_HOLDER: Final = "holder-"
"""Before the name of the process that a worker's pool was lent to last."""

_log = structlog.get_logger("kvd.daemon.systemd")


class Notifier:
    """The notification socket that `environ` names, if any."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._path = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._socket: socket.socket | None = None
        if self._path:  # one for good: the watchdog must be fed where no descriptor is left
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)  # a service manager that hangs must not hang the loop
        self._status = ""
        self._owed: deque[tuple[str, int]] = deque()
        """What the socket refused and must still get, in order, each with a descriptor or -1."""

    def starting(self, what: str, seconds: float) -> None:
        """The start is held up by `what`, a line for `systemctl status`, and may take `seconds` more."""
        self._owe(f"{_status(what)}\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def ready(self) -> None:
        """The start is complete."""
        self._owe("READY=1")

    def stopping(self, seconds: float) -> None:
        """The daemon is stopping, which may take `seconds`."""
        self._owe(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def status(self, text: str) -> None:
        """Sends the line for `systemctl status` if it changed."""
        if text != self._status and self._send(_status(text), -1):
            self._status = text

    def feed(self) -> None:
        """Feeds the watchdog, after sending again what the socket refused earlier."""
        self._pay()
        self._send("WATCHDOG=1", -1)

    def store(self, name: str, descriptor: int) -> None:
        """Gives systemd a duplicate of `descriptor` for the next daemon of this unit.

        Unpolled: systemd would drop that of a GPU's memory, a device that can be polled, when the GPU has news.
        """
        self._owe(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", descriptor)

    def unstore(self, name: str) -> None:
        """Makes systemd close what was stored under `name`."""
        self._owe(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Says nothing any more."""
        if self._socket is not None:
            self._socket.close()

    def _owe(self, text: str, descriptor: int = -1) -> None:
        """Sends what must arrive: systemd kills a start that it never hears of."""
        self._pay()
        if not self._owed and self._send(text, descriptor):
            return
        if len(self._owed) >= _MAX_OWED:
            _log.error("systemd has not taken notifications for long; this one is lost", text=text)
            return
        try:
            self._owed.append((text, -1 if descriptor < 0 else os.dup(descriptor)))
        except OSError as error:
            _log.error("systemd gets no duplicate of a pool's descriptor; it is lost", text=text, reason=str(error))

    def _pay(self) -> None:
        while self._owed and self._send(*self._owed[0]):
            _, descriptor = self._owed.popleft()
            if descriptor >= 0:
                os.close(descriptor)

    def _send(self, text: str, descriptor: int) -> bool:
        """Whether the socket took it; true without a socket."""
        if self._socket is None:
            return True
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:  # `socket.send_fds` takes an address and ignores it
            self._socket.sendmsg([text.encode()], [] if descriptor < 0 else [rights], 0, self._path)
        except OSError as error:
            _log.warning("systemd does not take notifications", text=text.partition("\n")[0], error=str(error))
            return False
        return True


def _status(text: str) -> str:
    """On one line: what followed a line's end in it, systemd would take for an assignment as well."""
    return f"STATUS={printable(text)}"


def received_descriptors(environ: MutableMapping[str, str]) -> dict[str, int]:
    """Descriptors that systemd passed to this process, by name; removes their variables from `environ`.

    Raises:
        BadRequest: `BAD_CONFIG`, their number is none.

    """
    addressee = environ.pop("LISTEN_PID", "")
    said = environ.pop("LISTEN_FDS", "0")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if addressee != str(os.getpid()):
        return {}
    try:
        count = int(said)
    except ValueError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"LISTEN_FDS is {said[:100]!r}, which is no number") from error
    received: dict[str, int] = {}
    for position, name in zip(range(count), names, strict=False):
        descriptor = _FIRST_DESCRIPTOR + position
        os.set_inheritable(descriptor, False)
        if name in received:  # only one pool of a name can be lent
            os.close(descriptor)
        else:
            received[name] = descriptor
    return received


class Keeper(Protocol):
    """Keeps descriptors by name while no daemon runs: systemd, told by a `Notifier`."""

    def store(self, name: str, descriptor: int) -> None:
        """Keeps a duplicate of `descriptor`, beside what else has that name."""

    def unstore(self, name: str) -> None:
        """Closes all that has that name."""


class Descriptors(Protocol):
    """What the store does with descriptors, as `os` does it."""

    def dup(self, fd: int, /) -> int:
        """Another descriptor of the same file."""

    def close(self, fd: int, /) -> None:
        """Closes one."""

    def fstat(self, fd: int, /) -> os.stat_result:
        """Which file it is of."""


class DescriptorStore:
    """Keeps the pools' descriptors with systemd while the daemon is gone (a `kvd.memory.interface.PoolStore`)."""

    def __init__(
        self,
        keeper: Keeper,
        received: dict[str, int],
        descriptors: Descriptors = os,
        processes: Processes | None = None,
    ) -> None:
        self._keeper = keeper
        self._descriptors = descriptors
        self._processes = Pidfds() if processes is None else processes
        self._received = {name: each for name, each in received.items() if not name.startswith(_HOLDER)}
        """Pools that the last daemon left and no pool of this one has, by name; systemd has them, too."""
        self._holders = {name: each for name, each in received.items() if name.startswith(_HOLDER)}
        """The processes that the last daemon had lent them to, likewise."""
        self._lent: dict[str, str] = {}
        """Under which name systemd has the process that a worker's pool was lent to."""
        self._names: dict[str, str] = {}
        """Under which systemd has the pool that a worker has, or is about to take."""

    def take(self, worker: str, uid: int, spec: bytes, pid: int) -> int:
        """See `PoolStore`."""
        wanted = _name(worker, uid, spec)
        self._forget_others(worker, uid, wanted)
        if wanted not in self._received:
            return -1
        holder = self._holders.get(_HOLDER + _prefix(worker, uid))
        number = 0 if holder is None else self._processes.number(holder)
        if number not in (0, pid):
            who = f"process {number}" if number > 0 else "a process of another PID namespace"
            text = f"the pool {worker!r} cannot be had: {who} had it before this daemon started, and has not ended"
            raise refusal(ErrorCode.POOL_BUSY, f"{text}; end it and try again, or attach under another name")
        self._names[worker] = wanted
        return self._descriptors.dup(self._received[wanted])

    def keep(self, worker: str, uid: int, spec: bytes, descriptor: int) -> None:
        """See `PoolStore`."""
        name = self._names[worker] = _name(worker, uid, spec)
        self._forget_others(worker, uid, name)
        if name in self._received:
            if self._is_same_file(self._received[name], descriptor):
                self._descriptors.close(self._received.pop(name))
            else:  # systemd would keep both under one name, and the next daemon could not tell them apart
                self._forget(name)
        self._keeper.store(name, descriptor)

    def lent(self, worker: str, uid: int, pid: int) -> None:
        """See `PoolStore`."""
        name = _HOLDER + _prefix(worker, uid)
        if (holder := self._holders.pop(name, None)) is not None:
            self._descriptors.close(holder)
        if holder is not None or worker in self._lent:
            self._keeper.unstore(name)
        process = self._processes.open(pid)
        if process >= 0:
            self._keeper.store(name, process)
            self._descriptors.close(process)
        self._lent[worker] = name

    def drop(self, worker: str) -> None:
        """See `PoolStore`."""
        if (holder := self._lent.pop(worker, None)) is not None:
            self._keeper.unstore(holder)
        name = self._names.pop(worker, None)
        if name in self._received:
            self._forget(name)
        elif name is not None:
            self._keeper.unstore(name)

    @property
    def unclaimed(self) -> int:
        """Pools of the last daemon that no worker has claimed."""
        return len(self._received)

    def drop_unclaimed_after(self, loop: Loop, seconds: float) -> None:
        """Frees the pools that nobody claimed in time; if this process stood still, its workers get a moment more."""
        loop.call_later(seconds, loop.call_later, limits.LAST_LOOK_SECONDS, self.drop_unclaimed)

    def drop_unclaimed(self) -> None:
        """Frees the pools that nobody has claimed."""
        for name in list(self._received):
            self._forget(name)
        for name, descriptor in self._holders.items():
            self._descriptors.close(descriptor)
            self._keeper.unstore(name)
        self._holders.clear()

    def give_up(self, uid: int) -> None:
        """See `PoolStore`."""
        for name in [name for name in self._received if name.startswith(f"pool-{uid}-")]:
            self._forget(name)

    def _forget_others(self, worker: str, uid: int, wanted: str) -> None:
        """Frees the worker's pools of other layouts: it came back without them, and their bytes are useless."""
        for name in [name for name in self._received if name.startswith(_prefix(worker, uid)) and name != wanted]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._descriptors.close(self._received.pop(name))
        self._keeper.unstore(name)

    def _is_same_file(self, one: int, other: int) -> bool:
        """Whether two descriptors are of one file for sure: all exports of GPU memory look like the driver's device."""
        status = self._descriptors.fstat(one)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, self._descriptors.fstat(other))


def _prefix(worker: str, uid: int) -> str:
    return f"pool-{uid}-{hashlib.sha256(worker.encode()).hexdigest()[:24]}-"


def _name(worker: str, uid: int, spec: bytes) -> str:
    """A name that systemd allows: no colon, at most 255 characters."""
    return _prefix(worker, uid) + hashlib.sha256(spec).hexdigest()[:24]
