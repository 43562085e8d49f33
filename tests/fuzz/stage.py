"""What is attacked: a daemon with its honest neighbour, and what can be seen of it from outside."""

import json
import os
import re
import select
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from kvd.errors import KvdError
from kvd.net.inquiry import Inquiry
from kvd.processes import Child, Processes
from kvd.protocol.status import StatusReport, decode
from tests.fuzz.attack import Place
from tests.fuzz.attackers import Counts, Orders
from tests.fuzz.honest import Pulls
from tests.support.fleet import Fleet
from tests.support.keyring import Keyring
from tests.support.patience import PATIENCE
from tests.support.ports import listening

T = TypeVar("T")
MIB = 1 << 20


class Resources(msgspec.Struct, frozen=True):
    """What a process has. Bytes of pools, which the daemon lends, are shared memory and not among `resident`."""

    resident: int
    """Bytes."""
    descriptors: int
    threads: int


def resources(pid: int) -> Resources:
    """Of a process; raises OSError where it is gone."""
    process = Path("/proc") / str(pid)
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "VmRSS" not in fields:
        raise ProcessLookupError(pid)
    resident = int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])
    return Resources(1024 * resident, len(os.listdir(process / "fd")), int(fields["Threads"]))


class Lines:
    """JSON lines of a child, as they come."""

    def __init__(self, child: Child, kind: type[T]) -> None:
        self._child, self._decoder, self._unread = child, msgspec.json.Decoder(kind), b""

    def waiting(self, seconds: float) -> list[T] | None:
        """What has arrived, after `seconds` at most; None where the child has ended."""
        if not select.select([self._child.source], [], [], seconds)[0]:
            return []
        data = os.read(self._child.source, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines] if data else None


class Honest:
    """The process of `tests.fuzz.honest`."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._lines = Lines(child, Pulls)

    def since(self) -> Pulls:
        """The pulls since the last call."""
        self._child.write(b"\n")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            answers = self._lines.waiting(until - time.monotonic())
            if answers is None:
                raise self._child.ended()
            if answers:
                return answers[0]
        return Pulls([], [f"the honest neighbour said nothing for {PATIENCE} s"])


class Stage:
    """Daemons `target` and `near`, with keys and an admitted `evil` where `keyed`; `folder` is open to other users."""

    def __init__(self, folder: Path, *, keyed: bool) -> None:
        folder.chmod(0o755)
        self._folder = folder
        flags = {"socket_mode": "0666", "pool_linger": "5", "peer_idle": "5"}
        self._fleet = Fleet(folder)
        self._processes = Processes(folder)
        self._evil = ""
        if keyed:
            ring = Keyring(self._fleet, folder)
            starts = [ring.daemon(name) for name in ("near", "target", "evil")]
            self.near, self.target = (start(listen="tcp://127.0.0.1:0", **flags) for start in starts[:2])
            self._evil = str(folder / "evil.key")
        else:
            self.near, self.target = (self._fleet.daemon(name, **flags) for name in ("near", "target"))
        flags = ("--listen", "127.0.0.1:0", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")
        self.router = self._processes.start("router", "kvd.cli.main", "router", *flags)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *details: object) -> None:
        self._processes.__exit__(None, None, None)
        self._fleet.__exit__(None, None, None)

    def place(self) -> Place:
        """Where the target is attacked."""
        near, target = (self._status(daemon) for daemon in (self.near, self.target))
        own = (target.http, target.address.partition("#")[0].removeprefix("tcp://"))
        ports = sorted(f"{host}:{port}" for host, port in listening(self.target.child.pid))
        return Place(
            pid=self.target.child.pid,
            socket=str(self.target.socket),
            address=target.address,
            http=target.http,
            ports=tuple(port for port in ports if port not in own),
            near=near.address,
            router=self._routing(),
            key=self._evil,
        )

    def _routing(self) -> str:
        """Where the router listens."""
        log, until = self._folder / "router.log", time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if found := re.search(r"routing on http://(\S+)", log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the router did not start: {log.read_text()}")

    def _status(self, daemon: object) -> StatusReport:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with Inquiry(str(daemon.socket)) as inquiry:  # type: ignore[attr-defined]
                    return decode(inquiry.status(PATIENCE))
            except KvdError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def dead(self) -> list[str]:
        """What its last words were, for each daemon that is gone."""
        found = []
        for child in (self.target.child, self.near.child, self.router):
            if select.select([child.exit], [], [], 0)[0]:
                found.append(str(child.ended()))
        return found

    def answers(self) -> list[str]:
        """What the target does not do any more, though it lives."""
        wrong = []
        try:
            with Inquiry(str(self.target.socket)) as inquiry:
                report = decode(inquiry.status(PATIENCE))
            with urllib.request.urlopen(f"http://{report.http}/livez", timeout=PATIENCE) as answer:
                answer.read()
        except (KvdError, OSError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
        return wrong

    def honest(self) -> Honest:
        """Begins the honest neighbour's pulls."""
        sockets = (str(self.target.socket), str(self.near.socket))
        return Honest(self._processes.start("honest", "tests.fuzz.honest", *sockets, piped=True))

    @contextmanager
    def attackers(self, name: str, orders: Orders) -> Iterator[tuple[Child, Lines]]:
        """A process of attackers, ended with the block."""
        with Processes(self._folder) as processes:
            child = processes.start(
                f"attackers-{name}", "tests.fuzz.attackers", json.dumps(msgspec.to_builtins(orders)), piped=True
            )
            yield child, Lines(child, Counts)

    def log_bytes(self) -> int:
        """Bytes that the target has logged."""
        return self.target.log.stat().st_size
