import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.holders import Ports, holders, wait_until_free
from kvd.net.lock import Lock, PathLock
from tests.support.fleet import until
from tests.support.patience import MOMENT
from tests.support.ports import free_port

NO_LISTENER = "an ended connection or a socket that does not listen"
HOLD_A_LOCK = "import sys; from kvd.net.lock import PathLock; lock = PathLock(sys.argv[1]); print(flush=True); input()"
HOLD_A_PORT = (
    "import socket, sys; held = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"
)
HOLD_A_PORT_WITHOUT_A_MAIN_THREAD = """
import ctypes, socket, sys, threading
held = socket.create_server(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=input).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def holding(program: str, what: object) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has something."""
    command = [sys.executable, "-c", program, str(what)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


async def wait(*places: Ports | Lock, seconds: float = MOMENT, stopping: asyncio.Event | None = None) -> list[str]:
    """What was said of the wait."""
    said: list[str] = []
    await wait_until_free(places, stopping or asyncio.Event(), said.append, seconds)
    return said


async def test_what_is_free_is_not_waited_for_and_nothing_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    assert await wait(*Ports.of(f"127.0.0.1:{free_port()}"), Lock(path), *Ports.of("127.0.0.1:0")) == []
    PathLock(path).release()
    assert await wait(Lock(path)) == []


@pytest.mark.real
@pytest.mark.parametrize(
    ("program", "state"), [(HOLD_A_PORT, "S"), (HOLD_A_PORT_WITHOUT_A_MAIN_THREAD, "Z")], ids=["alive", "half dead"]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "", "[::]"])
async def test_a_port_is_waited_for_and_its_holder_named_until_that_is_dead(
    program: str, state: str, host: str
) -> None:
    port = free_port()
    with holding(program, port) as process:
        for _ in until(f"its first thread is {state}"):
            if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == state:  # noqa: ASYNC240
                break
        place = Ports.of(f"{host}:{port}")[0]
        assert place.taken()
        said: list[str] = []

        def tell(what: str) -> None:
            said.append(what)
            process.kill()

        await wait_until_free([place], asyncio.Event(), tell, MOMENT)
        assert not place.taken()
        assert len(said) == 1
        assert said[0].startswith(f"port {port} of {host.strip('[]') or 'all addresses'}, which pid {process.pid} (")


@pytest.mark.real
def test_all_that_is_taken_is_looked_for_in_one_pass_over_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, port, read = str(tmp_path / "kvd.sock"), free_port(), []
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda link: read.append(link) or readlink(link))
    with holding(HOLD_A_PORT, port) as one, holding(HOLD_A_LOCK, path) as other:
        first, none, last = holders([*Ports.of(f"127.0.0.1:{port}"), *Ports.of("127.0.0.1:1"), Lock(path)])
        assert first.startswith(f"pid {one.pid} (")
        assert none == NO_LISTENER
        assert last.startswith(f"pid {other.pid} (")
        assert len(read) == len(set(read))


async def test_without_proc_the_holder_is_unknown_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.holders._PROC", tmp_path / "none")
    path = str(tmp_path / "kvd.sock")
    lock = PathLock(path)
    assert await wait(Lock(path), seconds=0.01) == [f"the socket {path}, which an unknown process has"]
    lock.release()


def test_what_ended_connections_had_is_waited_for_only_if_nothing_else_is_left() -> None:
    port = next(port for port in iter(free_port, None) if not Ports("", port + 1, port + 1).taken())
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", port))  # without SO_REUSEADDR, as UCX does
        server.listen()
        client.connect(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # first, so that its side has to remember the connection
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port)).close()
    assert not Ports("127.0.0.1", port, port + 1, 2).taken()
    alone = Ports("127.0.0.1", port, port)
    assert alone.taken()
    assert holders([alone]) == [NO_LISTENER]


@pytest.mark.real
async def test_a_lock_is_waited_for_and_its_holder_named_until_that_is_dead(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    with holding(HOLD_A_LOCK, path) as process:
        assert Lock(path).taken()
        assert Lock(path).taken(), "looking changed something"
        said: list[str] = []

        def tell(what: str) -> None:
            said.append(what)
            process.kill()

        await wait_until_free([Lock(path)], asyncio.Event(), tell, MOMENT)
        assert len(said) == 1
        assert said[0].startswith(f"the socket {path}, which pid {process.pid} ({sys.executable} -c ")
        PathLock(path).release()


@pytest.mark.real
async def test_what_stays_taken_is_waited_for_within_the_bound_or_until_a_stop(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    with holding(HOLD_A_LOCK, path):
        assert len(await wait(Lock(path), seconds=0.2)) == 1
        assert Lock(path).taken()
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_soon(stopping.set)
        async with asyncio.timeout(MOMENT):
            await wait(Lock(path), seconds=10 * MOMENT, stopping=stopping)


def test_a_range_of_ports_is_taken_when_too_few_of_it_are_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as connected:
        port = one.getsockname()[1]
        connected.connect(one.getsockname())
        assert Ports("127.0.0.1", port, port).taken()
        assert holders([Ports("127.0.0.1", port, port)]) == ["an unknown process"], "it is this one"
        assert Ports("127.0.0.1", port - 8, port + 8, 18).taken()
        assert not Ports("127.0.0.1", port - 8, port + 8, 1).taken()
    assert not Ports("127.0.0.1", port, port).taken()


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.name.invalid", "x" * 100, "é..b", "fe80::1%none"])
def test_an_address_that_is_wrong_is_not_waited_for(host: str) -> None:
    assert not Ports(host, 80, 80).taken()
    assert not Ports("127.0.0.1", 1 << 17, 1 << 17).taken()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file takes root")
def test_a_lock_that_is_refused_anyway_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    lock = PathLock(path)
    assert Lock(path).taken()
    os.chown(f"{path}.lock", 12345, -1)
    assert not Lock(path).taken()
    lock.release()


def test_a_lock_that_another_start_only_looks_at_is_had_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d.sock.lock").touch()  # as a daemon leaves it that was killed
    with open(tmp_path / "d.sock.lock") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        monkeypatch.setattr("kvd.net.lock.time.sleep", lambda _seconds: fcntl.flock(looked_at, fcntl.LOCK_UN))
        PathLock(str(tmp_path / "d.sock")).release()
