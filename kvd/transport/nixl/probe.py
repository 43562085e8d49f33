"""Tries foreign metadata in another process first, because some of it kills the process that loads it.

NIXL passes a peer's metadata to UCX, which trusts every length in it. The probe process loads it into an agent like the
daemon's own (same library, same environment), connects, and forgets it again. If that kills the process, or takes too
long, the peer is refused and the next one gets a new process. `ExaminedPeers` has metadata tried before NIXL loads it,
`Probe` is the daemon's side of the process, on its loop, and `main` the process, which ends when its input does.
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
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from msgspec import Struct

from kvd.limits import MAX_ERROR_TEXT, MIB
from kvd.processes import how_ended
from kvd.transport.nixl.ucx import environment_of, make_agent

START_SECONDS: Final = 30.0
"""How long the process may take to start: a second, more on a busy machine."""

TRY_SECONDS: Final = 5
"""How long it may take to try one peer's metadata; usually 1 to 10 ms."""

END_SECONDS: Final = 1.0
"""How long it may take to end after a crash or the end of its input."""

IDLE_SECONDS: Final = 600.0
"""When an unused process is ended: it holds 26 MB of its own; a new one adds a second to a handshake."""

MOST_TRIES: Final = 64
"""After so many the process is replaced: until it ends, it and the peer keep a connection for each."""

SPARE_BYTES: Final = 256 * MIB
"""How much memory one try may allocate: NIXL believes the count of regions in the metadata."""

_SIZE: Final = struct.Struct("<I")

_ANSWER_BYTES: Final = 4 * MAX_ERROR_TEXT
"""The longest answer. Whoever has written to the process through its port may have it send any."""


_SUSPECTS: Final = 1024
"""Daemons that are remembered for metadata that was unusable."""


class _Try(NamedTuple):
    known: bytes
    metadata: bytes
    done: Callable[[str], None]


class _Turns:
    """Tries that wait, by daemon: each daemon has one in turn, and those whose last one failed when no other waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Try]] = {}
        self._suspects: dict[str, None] = {}

    def put(self, daemon: str, item: _Try) -> None:
        self._waiting.setdefault(daemon, deque()).append(item)

    def next(self) -> tuple[str, _Try] | None:
        """Takes out the next one."""
        if not self._waiting:
            return None
        daemon = next((each for each in self._waiting if each not in self._suspects), next(iter(self._waiting)))
        queue = self._waiting.pop(daemon)
        item = queue.popleft()
        if queue:
            self._waiting[daemon] = queue
        return daemon, item

    def judged(self, daemon: str, *, usable: bool) -> None:
        """How a try ended."""
        self._suspects.pop(daemon, None)
        if not usable:
            self._suspects[daemon] = None
            if len(self._suspects) > _SUSPECTS:
                del self._suspects[next(iter(self._suspects))]


class Probe:
    """Tries metadata, one peer's at a time; `library` is the module that the daemon's NIXL agent comes from."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._turns = _Turns()
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._tries = 0
        """Of this process."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts a process ahead of the first peer."""
        self._run(self._warm_up())

    def __call__(self, agent: str, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        """Calls `done` with why `metadata` of `agent` is unusable, or ""; `known` is its previous one, or empty."""
        self._turns.put(agent.partition("#")[0], _Try(known, metadata, done))
        self._run(self._try_next())

    async def close(self) -> None:
        """Ends the process; tries in progress get no answer."""
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
            with contextlib.suppress(TimeoutError, EOFError, OSError, ValueError):  # the first try will report it
                await self._started()

    async def _try_next(self) -> None:
        async with self._turn:
            turn = self._turns.next()
            assert turn is not None  # noqa: S101 - this runs once for each
            daemon, (known, metadata, done) = turn
            reason = await self._try(known, metadata)
            self._turns.judged(daemon, usable=not reason)
        done(reason)

    async def _try(self, known: bytes, metadata: bytes) -> str:
        try:
            process = await self._started()
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            await self._end()
            return f"its metadata could not be tried: no process started ({type(error).__name__}: {error})"
        assert process.stdin is not None  # noqa: S101 - piped
        try:
            process.stdin.write(b"".join(_SIZE.pack(len(part)) + part for part in (known, metadata)))
            async with asyncio.timeout(2 * TRY_SECONDS):
                reason = await _answer(process)
        except ValueError as error:
            reason = f"its metadata had the process that tried it first answer nonsense: {error}"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        except (TimeoutError, EOFError, OSError):
            reason = f"its metadata ended the process that tried it first: {await self._end()}"
            if reason.endswith(signal.SIGALRM.name):
                reason += f", as it was not reached within {TRY_SECONDS} s"
        self._tries += 1
        if reason:
            await self._end()  # NIXL keeps a part of what it refused
        elif self._tries >= MOST_TRIES:
            await self._end()
            self._run(self._warm_up())
        return reason

    async def _started(self) -> Process:
        """The process, started if need be."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._run_out)
        if self._process is None:
            command = [sys.executable, "-m", "kvd.transport.nixl.probe", self._library, str(TRY_SECONDS)]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=environment_of(os.environ)
            )
            self._tries = 0
            async with asyncio.timeout(START_SECONDS):
                await _answer(self._process)
        return self._process

    def _run_out(self) -> None:
        if not self._turn.locked():
            self._run(self._end())

    async def _end(self) -> str:
        """Ends the process and says how it ended.

        It gets time to end by itself first: asyncio would lose the status of a process killed while it ends.
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
        return how_ended(status)


async def _answer(process: Process) -> str:
    """Waits for an answer.

    Raises:
        EOFError: The process ends.
        ValueError: It is too long, or no text.

    """
    assert process.stdout is not None  # noqa: S101 - piped
    (size,) = _SIZE.unpack(await process.stdout.readexactly(_SIZE.size))
    if size > _ANSWER_BYTES:
        raise ValueError(f"{size} bytes, the bound is {_ANSWER_BYTES}")
    return (await process.stdout.readexactly(size)).decode()


Examine = Callable[[str, bytes, bytes, Callable[[str], None]], None]
"""Takes an agent, its previous metadata (may be empty) and its new; reports later why the new is unusable, or ""."""


def accept(_agent: str, _known: bytes, _metadata: bytes, done: Callable[[str], None]) -> None:
    """Finds no fault with any metadata."""
    done("")


class _Peer(Struct, eq=False):
    """Metadata of a peer, as it was added last."""

    metadata: bytes
    examined: bool = False


class ExaminedPeers:
    """Calls `load(agent, metadata)` for metadata without a fault, `refuse(agent, fault)` for any other."""

    def __init__(
        self, examine: Examine, *, load: Callable[[str, bytes], None], refuse: Callable[[str, str], None]
    ) -> None:
        self._examine = examine
        self._load = load
        self._refuse = refuse
        self._peers: dict[str, _Peer] = {}

    def add(self, agent: str, metadata: bytes) -> None:
        """Examines metadata, unless it is what was loaded last; what is said of older metadata is not heard."""
        known, peer = self._peers.get(agent), _Peer(metadata)
        self._peers[agent] = peer
        if known is not None and known.examined and known.metadata == metadata:
            self._examined(agent, peer, "")
        else:
            self._examine(agent, known.metadata if known else b"", metadata, partial(self._examined, agent, peer))

    def forget(self, agent: str) -> None:
        """Forgets a peer that is removed or lost."""
        self._peers.pop(agent, None)

    def forget_all(self) -> None:
        """Loads nothing any more."""
        self._peers.clear()

    def _examined(self, agent: str, peer: _Peer, fault: str) -> None:
        if self._peers.get(agent) is not peer:
            return
        if fault:
            self.forget(agent)
            self._refuse(agent, fault)
        else:
            peer.examined = True
            self._load(agent, peer.metadata)


# --- the process ------------------------------------------------------------------------------------------------------


def main(library: str, seconds: int) -> None:
    """Answers each pair of previous and new metadata with why the new is unusable, or ""; a try has `seconds`."""
    with os.fdopen(os.dup(1), "wb") as out, os.fdopen(0, "rb") as pairs:
        os.dup2(2, 1)  # libraries may print
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        agent = make_agent(importlib.import_module(library), f"kvd-probe-{os.getpid()}")
        bound = _data_bytes() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
        _send(out, "")
        while (known := _next(pairs)) is not None and (metadata := _next(pairs)) is not None:
            signal.alarm(seconds)  # kills this process if it hangs in NIXL
            reason = ""
            if known:
                with contextlib.suppress(Exception):  # the daemon, too, loads afresh what cannot be merged
                    _load(agent, known)
                    _load(agent, metadata)
                with contextlib.suppress(Exception):
                    agent.remove_remote_agent(_load(agent, known))
            try:
                agent.remove_remote_agent(_load(agent, metadata))
            except Exception as error:  # noqa: BLE001 - reported, whatever it is
                reason = f"{type(error).__name__}: {error}"
            signal.alarm(0)
            _send(out, reason)


def _load(agent: Any, metadata: bytes) -> str:
    """Loads metadata as the daemon does; returns the name of the agent that it is about."""
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    agent.make_connection(name)
    return str(name)


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


def _next(pairs: BinaryIO) -> bytes | None:
    """The next half of a pair; None at the end of the input."""
    size = pairs.read(_SIZE.size)
    return pairs.read(_SIZE.unpack(size)[0]) if len(size) == _SIZE.size else None


def _send(out: BinaryIO, text: str) -> None:
    content = text[:MAX_ERROR_TEXT].encode(errors="replace")
    out.write(_SIZE.pack(len(content)) + content)
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # without NIXL's teardown (`kvd.transport.nixl.process`)
