"""Child processes, each with a log, that are ended on every path and never outlive their parent."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

START_SECONDS: Final = 120.0
"""For a daemon to serve: it imports its libraries on a machine that may be busy."""
STOP_SECONDS: Final = 5.0
"""Seconds from SIGTERM to SIGKILL."""

LOG_LINES: Final = 20

_LOOK_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


class ProcessEndedError(Exception):
    """A process ended early; the text has the end of its log."""


class Child:
    """One process, and the log that has its standard error."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self.pid = process.pid
        self.exit = os.pidfd_open(self.pid)
        """Becomes readable when the process ends."""

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path, *, piped: bool) -> "Child":
        """Runs `command`; `piped` gives it pipes for input and output, else the log has its output too."""
        pipe = subprocess.PIPE if piped else None
        with log.open("wb") as sink:
            process = subprocess.Popen(  # noqa: S603  # the command is ours
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or sink,
                stderr=sink,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends this
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  # no thread runs yet, and nothing else can set it
            )
        return cls(name, process, log)

    @property
    def source(self) -> int:
        """Descriptor of the process's output."""
        assert self._process.stdout is not None  # noqa: S101
        return self._process.stdout.fileno()

    def write(self, data: bytes) -> None:
        """Writes to the process.

        Raises:
            ProcessEndedError: It is gone.

        """
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None

    def ended(self) -> ProcessEndedError:
        """The error for a process that has ended: how, and what it logged last."""
        how = how_ended(self._process.wait())
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return ProcessEndedError("\n".join([f"{self.name} ended with {how}; the end of its log:", *lines]))

    def wait(self, timeout: float) -> bool:
        """Whether the process ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Whether `ready` said so within `START_SECONDS`.

        Raises:
            ProcessEndedError: the process has ended first.

        """
        deadline = time.monotonic() + START_SECONDS
        while not (is_ready := ready()) and time.monotonic() < deadline:
            if self.wait(_LOOK_SECONDS):
                raise self.ended()
        return is_ready

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            if not self.wait(STOP_SECONDS):
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        os.close(self.exit)


class Processes(contextlib.ExitStack):
    """Processes that end, last started first, when the `with` block is left."""

    def __init__(self, logs: Path) -> None:
        super().__init__()
        self._logs = logs

    def start(self, name: str, module: str, *arguments: str, piped: bool = False, within: Sequence[str] = ()) -> Child:
        """Runs a module with this interpreter; `within` is a prefix to the command, such as `nice`."""
        command = [*within, sys.executable, "-m", module, *arguments]
        child = Child.start(name, command, self._logs / f"{name}.log", piped=piped)
        self.callback(child.stop)
        return child

    def start_daemon(
        self, name: str, socket: str | Path, *flags: str, log: str = "", within: Sequence[str] = ()
    ) -> Child:
        """Runs `kvd serve` at `socket`; what it logs is JSON, in a file called as `log` says, or as the daemon."""
        arguments = ("--name", name, "--socket", str(socket), "--log-format", "json", *flags)
        return self.start(log or name, "kvd.cli.main", "serve", *arguments, within=within)


def how_ended(status: int) -> str:
    """A process's return code, for people."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def die_with(parent: int) -> Callable[[], None]:
    """What a new process runs first, so that it is killed when `parent` dies."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare
