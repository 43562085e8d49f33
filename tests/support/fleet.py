"""Real daemons and workers as processes: the harness of every test that needs one."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvd.processes import Child, Processes
from kvd.protocol import ticket as tickets
from tests.support.elsewhere import elsewhere
from tests.support.forkserver import ForkedProcesses
from tests.support.patience import NEVER_LOST, PATIENCE

ANSWER_SECONDS = PATIENCE + 30
"""A worker's answer may be that its own wait was in vain."""


class RemoteError(Exception):
    """A worker's call raised a KvdError: `code` says which."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Daemon:
    """A `kvd serve` that can be killed, paused, and restarted at the same socket."""

    def __init__(
        self, processes: Processes, folder: Path, name: str, flags: dict[str, str], within: Sequence[str] = ()
    ) -> None:
        self._processes, self._folder, self._within = processes, folder, within
        self.name, self.flags = name, flags
        self.socket = Path(flags.get("socket", folder / f"{name}.sock"))
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        flags = [part for key, value in self.flags.items() if key != "socket" for part in (f"--{key}", value)]
        run = f"{self.name}-{self.starts}"
        self.child: Child = self._processes.start_daemon(self.name, self.socket, *flags, log=run, within=self._within)
        self.log = self._folder / f"{run}.log"

    def kill(self) -> None:
        send(self.child, signal.SIGKILL)
        assert self.child.wait(PATIENCE)

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with paused(self.child.pid):
            yield

    def serving(self) -> dict[str, Any]:
        """The log entry that says where the daemon serves; waits for it."""
        for _ in until(f"{self.name} serves"):
            for line in self.log.read_text().splitlines():
                entry = json.loads(line) if line.startswith("{") else {}  # libraries write there, too
                if entry.get("event") == "serving":
                    return dict(entry)
        raise AssertionError("unreachable")


class Worker:
    """A worker process; every method of `worker_main.Remote` can be called."""

    def __init__(self, processes: Processes, daemon: Daemon, name: str, run: str, **attach: float) -> None:
        self.name = name
        self.child = processes.start(run, "tests.support.worker_main", piped=True)
        self._unread = b""
        try:
            self.attached = self.call("attach", socket=str(daemon.socket), name=name, **attach)
        except RemoteError:
            self.kill()  # as an engine ends; it may have been lent a pool that it could not map
            raise

    def order(self, order: str, **arguments: Any) -> None:
        """Starts a call; `answer` waits for it."""
        self.child.write(json.dumps([order, arguments]).encode() + b"\n")

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to the oldest order without one."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.child.source], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self.name} did not answer within {seconds} s"
            data = os.read(self.child.source, 1 << 16)
            if not data:
                raise self.child.ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"], answer["text"])
        return answer["ok"]

    def call(self, order: str, **arguments: Any) -> Any:
        self.order(order, **arguments)
        return self.answer()

    def outcome(self, request: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """The event that ends `request`, within `seconds`; other events are dropped."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.call("wait", timeout=max(0.05, deadline - time.monotonic())):
                if event.get("request") == request and event["kind"] in {"Done", "Failed", "Cancelled"}:
                    return dict(event)
                if event.get("offer") == request and event["kind"] == "Released":
                    return dict(event)
        raise AssertionError(f"{request!r} of {self.name} had no outcome within {seconds} s")

    def kill(self) -> None:
        send(self.child, signal.SIGKILL)
        assert self.child.wait(PATIENCE)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with paused(self.child.pid):
            yield


class Fleet:
    """Starts daemons and workers; ends what it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes = ForkedProcesses(folder)
        self._runs = 0

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *details: Any) -> None:
        self._processes.__exit__(*details)

    def daemon(self, name: str, *, within: Sequence[str] = (), **flags: str) -> Daemon:
        """It loses no peer to a busy machine, unless its `flags` say otherwise."""
        named = {key.replace("_", "-"): value for key, value in {**NEVER_LOST, **flags}.items()}
        return Daemon(self._processes, self._folder, name, named, within)

    def far_daemon(self, name: str, **flags: str) -> Daemon:
        """A daemon that others take to be on another host (`tests.support.elsewhere`)."""
        within, settings = elsewhere(self._folder, name)
        return self.daemon(name, within=within, **flags, **settings)

    def worker(
        self, daemon: Daemon, name: str, *, blocks: int = 64, block_bytes: int = 4096, timeout: float = PATIENCE
    ) -> Worker:
        self._runs += 1
        attach = {"blocks": blocks, "block_bytes": block_bytes, "timeout": timeout}
        return Worker(self._processes, daemon, name, f"{name}-worker-{self._runs}", **attach)

    def refusal(self, daemon: Daemon, name: str, **size: int) -> RemoteError:
        """Why a worker gets no pool. It asks again until its time is over: so it gets little, and more if need be."""
        for seconds in (1.0, 10.0, PATIENCE):
            try:
                worker = self.worker(daemon, name, timeout=seconds, **size)
            except RemoteError as error:
                if error.code != "daemon_lost":
                    return error
            else:
                raise AssertionError(f"{worker.name} got a pool: {worker.attached}")
        raise AssertionError(f"{daemon.name} did not say why {name} gets no pool within {PATIENCE} s")


def send(child: Child, number: int) -> None:
    os.kill(child.pid, number)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


def until(what: str, seconds: float = PATIENCE, *, pause: float = 0.005) -> Iterator[None]:
    """Yields until the caller breaks off, for conditions that nobody announces; fails with `what` after `seconds`.

    To look may cost more than a `pause` of 5 ms.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        select.select([], [], [], pause)
    raise AssertionError(f"{what}: not within {seconds} s")


def without_lease(text: str) -> str:
    """The ticket without lease fields, so that it is claimed and fenced by messages."""
    ticket = tickets.decode(text)
    ranks = tuple(msgspec.structs.replace(rank, generation=0, epoch=0, stamp=0) for rank in ticket.ranks)
    return msgspec.structs.replace(ticket, ranks=ranks).encode()
