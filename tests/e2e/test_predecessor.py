"""A daemon that was killed keeps its ports and locks until the kernel has ended it; the next one waits for that."""

import json
import os
import signal
import socket
import time

import pytest

from kvd import limits
from tests.support.fleet import until
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

pytestmark = pytest.mark.real


@pytest.fixture(params=["unix", "tcp"])
def flags(request):
    """Of a daemon that has a place of each kind."""
    listen = {"listen": f"tcp://127.0.0.1:{free_port()}", "insecure": "true"} if request.param == "tcp" else {}
    return {"http": f"127.0.0.1:{free_port()}", **listen}


def entries(daemon, event):
    """Lines of the running daemon's log."""
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def waiting(daemon):
    """The line that says what a daemon waits for."""
    for _ in until("it says what it waits for"):
        if found := entries(daemon, "waiting for what another process has"):
            (line,) = found
            return line["what"]
    raise AssertionError("unreachable")


def places(daemon):
    """The names of what it has."""
    ports = [daemon.flags["http"], daemon.flags.get("listen", "").removeprefix("tcp://")]
    own = (f"{daemon.socket}{ending}" for ending in ("", ".zmq", ".pools"))
    paths = [*own, *([] if ports[1] else [f"{daemon.socket}.peers"])]
    return [
        *(f"port {each.rpartition(':')[2]} of 127.0.0.1" for each in ports if each),
        *(f"the socket {path}" for path in sorted(paths)),
    ]


def test_a_daemon_serves_as_soon_as_a_killed_predecessor_that_got_no_processor_is_dead(fleet, flags):
    daemon = fleet.daemon("p", **flags)
    daemon.serving()
    first = daemon.child
    os.kill(first.pid, signal.SIGSTOP)
    daemon.start()
    said = waiting(daemon).split("; ")
    held = f", which pid {first.pid} ("
    assert [each.partition(held)[0] for each in said] == places(daemon)
    assert all(held in each for each in said)
    assert not entries(daemon, "serving")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait(PATIENCE)
    assert daemon.serving()["http"] == flags["http"]
    worker = fleet.worker(daemon, "w")
    assert worker.call("offer", name="r", ids=[1])


@pytest.mark.sample(2)  # it waits for a quarter of a minute
def test_a_daemon_that_another_one_keeps_from_its_places_ends_with_an_error_that_says_so(fleet, flags):
    daemon = fleet.daemon("p", **flags)
    daemon.serving()
    first = daemon.child
    began = time.monotonic()
    daemon.start()
    assert f"which pid {first.pid} (" in waiting(daemon)
    assert daemon.child.wait(PATIENCE)
    assert time.monotonic() - began >= limits.PREDECESSOR_SECONDS
    assert f"http: cannot listen on '{flags['http']}': [Errno 98] Address already in use" in daemon.log.read_text()
    assert not first.wait(0), "it did not go on"
    assert fleet.worker(daemon, "w").call("offer", name="r", ids=[1])


@pytest.mark.sample(2)
def test_a_daemon_that_waits_ends_at_once_when_it_is_told_to(fleet, flags):
    daemon = fleet.daemon("p", **flags)
    daemon.serving()
    daemon.start()
    waiting(daemon)
    os.kill(daemon.child.pid, signal.SIGHUP)
    os.kill(daemon.child.pid, signal.SIGTERM)
    assert daemon.child.wait(PATIENCE)
    assert "ended with status 0;" in str(daemon.child.ended())
    assert [line["signal"] for line in entries(daemon, "signal")] == ["SIGTERM"]


@pytest.mark.sample(2)
def test_systemd_is_told_what_a_start_waits_for_and_given_time(fleet, flags, tmp_path, monkeypatch):
    fleet.daemon("p", **flags).serving()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        next_one = fleet.daemon("p", **flags)
        said = dict(line.split("=", 1) for line in manager.recv(1 << 16).decode().splitlines())
    assert said["STATUS"] == f"waiting for {waiting(next_one)}"
    assert int(said["EXTEND_TIMEOUT_USEC"]) > limits.PREDECESSOR_SECONDS * 1e6
