"""Processes forked from one that has imported what they need: a second of a core for a daemon, 15 for a vLLM.

What runs is `python -m MODULE ARGUMENTS` in all but the command line, which is the server's: environment, working
folder, session and end are those of a new interpreter. The server, `python -m tests.support.forkserver`, and all that
it forked end with the process that started it.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvd.processes import Child, Processes, die_with

IMPORTED = {
    "tests.vllm.testbed.serve": (
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.llama",
    ),
    "tests.sglang.testbed.serve": ("tests.sglang.testbed.imported",),
}
"""What a module imports, by module; what runs is not among it, and runs as it does in a new interpreter."""
IMPORTED_BY_OTHERS = ("kvd.bench.spec", "kvd.cli.serve", "kvd.client", "pytest", "tests.support.pools")

_READ_EARLY = ("LD_", "PYTHON", "OMP_", "TORCH_", "HF_", "TRANSFORMERS_", "VLLM_LOGGING_", "SGLANG_USE_")
"""How variables begin that are read before or by these imports: each of their values has a server of its own."""

_MESSAGE_BYTES = 1 << 17


class ForkedProcesses(Processes):
    """Its processes are forked where `forked` can do that."""

    def start(self, name: str, module: str, *arguments: str, piped: bool = False, within: Sequence[str] = ()) -> Child:
        command = [*within, sys.executable, "-m", module, *arguments]
        child = forked(name, command, self._logs / f"{name}.log", piped=piped)
        self.callback(child.stop)
        return child


def forked(name: str, command: Sequence[str], log: Path, *, piped: bool) -> Child:
    """A child whose process is forked, if `command` is a module, behind no more than an `env`.

    It is one for this interpreter, or one of `IMPORTED` for another one.
    """
    environment, rest = dict(os.environ), list(command)
    if rest[0] == "env":
        del rest[0]
        while "=" in rest[0]:
            variable, _, environment[variable] = rest.pop(0).partition("=")
    is_known = rest[1:2] == ["-m"] and (rest[0] == sys.executable or rest[2] in IMPORTED)
    if not is_known or _of_interpreter(environment) != _of_interpreter(os.environ):
        return Child.start(name, command, log, piped=piped)
    with log.open("wb") as sink:
        return Child(name, Forked(rest[2:], environment, sink, piped=piped, interpreter=rest[0]), log)


def _of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """The status of `command`, a module and its arguments, and what it wrote to both its outputs.

    Raises:
        subprocess.TimeoutExpired: It was killed after `timeout` seconds; a note has what it wrote.

    """
    with tempfile.TemporaryFile() as output:

        def said() -> str:
            output.seek(0)
            return output.read().decode(errors="replace")

        process = Forked(command, environment, output)
        try:
            return process.wait(timeout), said()
        except subprocess.TimeoutExpired as error:
            error.add_note(said())
            raise
        finally:
            process.kill()
            process.wait()


class Forked:
    """One process, with the methods of a `subprocess.Popen` that `Child` uses."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        *,
        piped: bool = False,
        interpreter: str = sys.executable,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self._server = _server_for(interpreter, command[0], environment)
        with contextlib.ExitStack() as theirs:
            if piped:
                source, self.stdin = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
                self.stdout, sink = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
                theirs.enter_context(source)
                theirs.enter_context(sink)
            else:
                source, sink = theirs.enter_context(open(os.devnull, "rb")), output
            order = {"command": command, "environment": dict(environment), "folder": os.getcwd()}
            self.pid = self._server.ask(order, [source.fileno(), sink.fileno(), output.fileno()])
        self._exit = os.pidfd_open(self.pid)
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or the negative number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.

        """
        if self._status is None:
            ended = select.poll()
            ended.register(self._exit, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self._status = self._server.ask({"ended": self.pid})
            os.close(self._exit)
        return self._status

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._exit, number)


class _Server:
    def __init__(self, interpreter: str, imported: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self.usable = True
        """Whether each question so far was answered: a test's time limit may end one between the two."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, "-m", "tests.support.forkserver", str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # With threads of OpenBLAS it could not fork safely.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        atexit.register(self._end)

    def ask(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            usable, self.usable = self.usable, False
            if not usable:
                raise ChildProcessError("a question to this server of forked processes was broken off")
            socket.send_fds(self._connection, [json.dumps(order).encode()], descriptors)
            answer = self._connection.recv(_MESSAGE_BYTES)
            if not answer:
                raise ChildProcessError(f"the server of forked processes ended with status {self._process.wait()}")
            self.usable = True
        return int(answer)

    def _end(self) -> None:
        self._connection.close()
        self._process.wait()


_servers: dict[Any, _Server] = {}


def _server_for(interpreter: str, module: str, environment: Mapping[str, str]) -> _Server:
    imported = IMPORTED.get(module, IMPORTED_BY_OTHERS)
    key = interpreter, imported, frozenset(item for item in environment.items() if item[0].startswith(_READ_EARLY))
    if key not in _servers or not _servers[key].usable:
        _servers[key] = _Server(interpreter, imported, environment)
    return _servers[key]


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Serves until the other end is closed: then None. In each process that it forks: what is to run there."""
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        if "ended" in order:
            status = os.waitstatus_to_exitcode(os.waitpid(order["ended"], 0)[1])
            connection.send(str(status).encode())
        elif os.fork() == 0:
            die_with(server)()
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            connection.send(str(os.getpid()).encode())
            return order
        else:
            for descriptor in descriptors:
                os.close(descriptor)


def main() -> None:
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        order = _serve(connection)
    if order is None:
        return
    threading.main_thread()._set_native_id()  # as multiprocessing does it: threading keeps the server's
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # what TMPDIR said to the server
    module, *sys.argv[1:] = order["command"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
