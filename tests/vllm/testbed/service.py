"""A process that serves: started with a log, waited for until it is up, killed, started again, never left behind."""

import asyncio
import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvd.processes import Child, ProcessEndedError

START_SECONDS: Final = 400.0
"""A vLLM is up after 10 s on a quiet machine with two cores, three of them after twice that."""

FIRST_ERRORS: Final = 10
"""Lines with an error that are told of a process that ended when it was to start."""

_POLL_SECONDS = 0.25

_SCHED_CLOCK = 2
"""Of `clock_getcpuclockid(3)`: in place of a clock's number, the complement of a process's id and this kind."""


class Service(ABC):
    """One process; `folder` gets a log for every start."""

    needed_first = False
    """Whether others fail to start while this is not up."""
    start_child: Callable[..., Child] = Child.start
    """Starts its process; in tests most are forked (`tests.support.forkserver`)."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.within: tuple[str, ...] = ()
        """A command that runs it, from the next start on."""
        self._child: Child | None = None
        self._starts = 0

    @property
    def log(self) -> Path:
        """What the process of the latest start writes to standard output and standard error."""
        return self.folder / f"{self.name}-{self._starts}.log"

    def temporary(self) -> str:
        """A folder for what the process leaves in its temporary folder when it is killed; sockets want a short path."""
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return str(folder)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """What is run."""

    @abstractmethod
    async def is_up(self) -> bool:
        """Whether it answers."""

    def start(self) -> None:
        """Starts it; to be called on the main thread, with whose end the process ends too."""
        self._starts += 1
        self._child = type(self).start_child(self.name, [*self.within, *self.command()], self.log, piped=False)

    async def ready(self) -> None:
        """Waits until it is up.

        Raises:
            ProcessEndedError: It ended instead; the text has the end of its log.
            TimeoutError: It did neither.

        """
        deadline = time.monotonic() + START_SECONDS
        while not await self.is_up():
            if self._child is None or self._child.wait(0):
                raise self._ended()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is not up after {START_SECONDS} s; its log: {self.log}")
            await asyncio.sleep(_POLL_SECONDS)

    def _ended(self) -> ProcessEndedError:
        """An engine's first error says why; the end of its log is of the processes that wait for it."""
        if self._child is None:
            return ProcessEndedError(f"{self.name} was not started")
        errors = [line for line in self.log.read_text(errors="replace").splitlines() if "Error" in line]
        return ProcessEndedError("\n".join([str(self._child.ended()), "its first errors:", *errors[:FIRST_ERRORS]]))

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._child is not None and not self._child.wait(0)

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        assert self._child is not None
        signal.pidfd_send_signal(self._child.exit, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and to all that it started."""
        assert self._child is not None
        os.killpg(self._child.pid, number)

    def keep_to(self, cores: set[int]) -> None:
        """Has all threads of the process, and of all that it started, run on these cores only, as `taskset -a` does."""
        for pid in self._members():
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
                    os.sched_setaffinity(int(task), cores)

    def processor_seconds(self) -> float:
        """What the process, and all that it started and that run, have computed so far."""
        return sum(time.clock_gettime(~pid << 3 | _SCHED_CLOCK) for pid in self._members())

    def _members(self) -> Iterator[int]:
        assert self._child is not None
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if int(stat.read_text().rpartition(")")[2].split()[2]) == self._child.pid:
                    yield int(stat.parent.name)

    def kill(self) -> None:
        """As kill -9 does; returns when the process is gone."""
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone."""
        if self._child is not None:
            self._child.stop()
            self._child = None


def with_environment(variables: dict[str, str], command: Sequence[str]) -> list[str]:
    """The command that runs `command` with `variables` set, in the same process."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


async def start_all(services: Sequence[Service]) -> None:
    """Starts services and waits until all are up; those that others need to start come first and are waited for.

    Raises:
        ProcessEndedError: One ended instead.
        TimeoutError: One is not up.

    """
    for service in services:
        service.start()
        if service.needed_first:
            await service.ready()
    for service in services:
        await service.ready()


def stop_all(services: Sequence[Service]) -> None:
    """Ends services, the last one first."""
    for service in reversed(services):
        service.stop()
