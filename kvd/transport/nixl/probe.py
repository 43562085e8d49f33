"""Foreign metadata is tried by another process first: some of it ends the process that loads it, by a signal.

NIXL hands what a peer sends to UCX, which trusts every length in it. The probe loads it into an agent like the
daemon's own (same library, same environment), connects, and forgets it again; where that ends the probe, or takes too
long, the peer is refused and the next one gets a new probe. `Probe` is the daemon's side, on its loop; `main` is the
process, which ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvd.limits import MIB
from kvd.transport.nixl.ucx import make_agent

START_SECONDS: Final = 30.0
"""How long a probe may take to start: a second, and more on a busy machine."""

TRY_SECONDS: Final = 5
"""How long it may take with one peer's metadata: 1 to 10 ms."""

END_SECONDS: Final = 1.0
"""How long it may take to end once it has crashed, or its input has ended."""

IDLE_SECONDS: Final = 600.0
"""After which a probe that nobody needed ends: it holds 26 MB of its own, a new one costs a handshake a second."""

SPARE_BYTES: Final = 256 * MIB
"""What metadata may make a probe allocate; a count of regions in it is believed by NIXL."""

_SIZE: Final = struct.Struct("<I")


class Probe:
    """Tries metadata, one peer's at a time; `library` is the module that the daemon has its NIXL agent from."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Has a process ready for the first peer."""
        self._run(self._warm_up())

    def __call__(self, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        """Tells `done` why `metadata` is of no use, or nothing where it is; `known` is what was loaded before it."""
        self._run(self._tell(known, metadata, done))

    async def close(self) -> None:
        """Ends the process; what has not been tried is not answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm_up(self) -> None:
        async with self._turn:
            with contextlib.suppress(TimeoutError, EOFError, OSError):  # the first peer's try finds out
                await self._started()

    async def _tell(self, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        async with self._turn:
            reason = await self._try(known, metadata)
        done(reason)

    async def _try(self, known: bytes, metadata: bytes) -> str:
        try:
            process = await self._started()
        except (TimeoutError, EOFError, OSError) as error:
            await self._end()
            return f"its metadata could not be tried: no process for it ({type(error).__name__}: {error})"
        assert process.stdin is not None  # noqa: S101 - piped
        try:
            process.stdin.write(b"".join(_SIZE.pack(len(part)) + part for part in (known, metadata)))
            async with asyncio.timeout(2 * TRY_SECONDS):
                reason = await _answer(process)
        except (TimeoutError, EOFError, OSError):
            reason = f"its metadata ended the process that tried it first: {await self._end()}"
        if reason:
            await self._end()  # NIXL keeps a part of what it refused
        return reason

    async def _started(self) -> Process:
        """The process, ready."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._run_out)
        if self._process is None:
            command = [sys.executable, "-m", "kvd.transport.nixl.probe", self._library]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            async with asyncio.timeout(START_SECONDS):
                await _answer(self._process)
        return self._process

    def _run_out(self) -> None:
        if not self._turn.locked():
            self._run(self._end())

    async def _end(self) -> str:
        """How the process ended: by itself, or killed now.

        It gets the time to end by itself, since asyncio loses the status of a process that it kills as it ends.
        """
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if process is None:
            return "it was not running"
        assert process.stdin is not None  # noqa: S101 - piped
        process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            status = await process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


async def _answer(process: Process) -> str:
    assert process.stdout is not None  # noqa: S101 - piped
    (size,) = _SIZE.unpack(await process.stdout.readexactly(_SIZE.size))
    return (await process.stdout.readexactly(size)).decode()


# --- the process ------------------------------------------------------------------------------------------------------


def main(library: str) -> None:
    """Answers each pair of metadata with why the second is of no use, empty where it is."""
    with os.fdopen(os.dup(1), "wb") as out, os.fdopen(0, "rb") as orders:
        os.dup2(2, 1)  # libraries may print
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        agent = make_agent(importlib.import_module(library), f"kvd-probe-{os.getpid()}")
        bound = _data_bytes() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
        _send(out, "")
        while (known := _next(orders)) is not None and (metadata := _next(orders)) is not None:
            signal.alarm(TRY_SECONDS)  # its default action ends a process that hangs in NIXL
            reason = ""
            if known:
                with contextlib.suppress(Exception):  # the daemon loads afresh what cannot be merged
                    _load(agent, known)
                    _load(agent, metadata)
                with contextlib.suppress(Exception):
                    agent.remove_remote_agent(_load(agent, known))
            try:
                agent.remove_remote_agent(_load(agent, metadata))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                reason = f"{type(error).__name__}: {error}"
            signal.alarm(0)
            _send(out, reason)


def _load(agent: Any, metadata: bytes) -> str:
    """Takes metadata in as the daemon does; the name of the agent that it is about."""
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    agent.make_connection(name)
    return str(name)


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


def _next(orders: BinaryIO) -> bytes | None:
    """The next part of an order; None at the end of the input."""
    size = orders.read(_SIZE.size)
    return orders.read(_SIZE.unpack(size)[0]) if len(size) == _SIZE.size else None


def _send(out: BinaryIO, text: str) -> None:
    content = text.encode()
    out.write(_SIZE.pack(len(content)) + content)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # without NIXL's teardown (`kvd.transport.nixl.transport`)
