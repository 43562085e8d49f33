"""`kvd drain` ends the process that listens, and no other that has its number by now."""

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys

import pytest

from kvd.cli import drain
from kvd.cli.main import main
from kvd.errors import ErrorCode, Unavailable, refusal
from kvd.net import inquiry, unix
from kvd.net.stream import FrameStream
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

LISTENER = """
import os, socket, sys
place = socket.socket(fileno=int(sys.argv[1]))
place.listen()
"""
"""SO_PEERCRED names it for good, whoever has the socket later."""


@pytest.fixture
def orphaned(tmp_path):
    """A socket of this process whose listener has ended: its path, and the listener's number."""
    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(path)
        with subprocess.Popen([sys.executable, "-c", LISTENER, str(place.fileno())], pass_fds=[place.fileno()]) as ran:
            assert ran.wait(PATIENCE) == 0
        yield path, ran.pid
    os.unlink(path)


@pytest.fixture
def innocent():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def deaf():
    """A process that does not end when it is told to."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_listener_that_has_ended_is_said_and_nobody_is_signalled(orphaned, capsys):
    path, pid = orphaned
    assert main(["drain", "--socket", path, "--wait", "1"]) == 2
    assert f"the process that listened at {path} (pid {pid}) has ended" in capsys.readouterr().err


def test_its_number_is_not_taken_for_it_on_kernels_that_only_tell_that(orphaned, innocent, capsys, monkeypatch):
    path, _ = orphaned
    monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)  # ENOPROTOOPT, as before Linux 6.5
    monkeypatch.setattr(unix, "_CLOCK_SECONDS", -1.0)  # the clock was not set meanwhile
    monkeypatch.setattr(inquiry, "credentials", lambda _socket: unix.Credentials(innocent.pid, 0, 0))
    assert main(["drain", "--socket", path, "--wait", "1"]) == 2
    assert "has ended" in capsys.readouterr().err
    assert innocent.poll() is None


@pytest.mark.parametrize("kernel", ["6.5", "6.4"])
def test_a_listener_that_lives_is_ended(tmp_path, monkeypatch, kernel):
    if kernel == "6.4":
        monkeypatch.setattr(unix, "_SO_PEERPIDFD", 9999)
    path = str(tmp_path / "kvd.sock")
    code = "import os, signal; place.listen(); print(os.getpid(), flush=True); signal.pause()"
    command = [
        sys.executable,
        "-c",
        f"import socket, sys; place = socket.socket(socket.AF_UNIX); place.bind(sys.argv[1]); {code}",
        path,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert select.select([listener.stdout], [], [], PATIENCE)[0]
        listener.stdout.readline()
        assert main(["drain", "--socket", path, "--timeout", "0.1", "--wait", str(PATIENCE)]) == 0
        assert listener.wait(PATIENCE) == -signal.SIGTERM
    os.unlink(path)


def test_a_daemon_that_does_not_answer_is_waited_for_no_longer_than_said(tmp_path, monkeypatch, capsys):
    path, asked = str(tmp_path / "kvd.sock"), []

    def silent(_inquiry, timeout):
        asked.append(timeout)
        raise refusal(ErrorCode.DEADLINE, "no answer in time")

    monkeypatch.setattr(inquiry.Inquiry, "status", silent)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX) as listener, deaf() as process:
        listener.bind(path)
        listener.listen()
        monkeypatch.setattr(inquiry.Inquiry, "process", lambda _inquiry: os.pidfd_open(process.pid))
        assert main(["drain", "--socket", path, "--timeout", "1000", "--wait", "0.5"]) == 1
    assert max(asked, default=0.0) <= 0.5
    assert "still running after" in capsys.readouterr().out
    os.unlink(path)


def test_an_inquiry_may_have_a_descriptor_above_1023(tmp_path):
    path = str(tmp_path / "kvd.sock")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with inquiry.Inquiry(path) as asked:
            asked._connected = socket.socket(fileno=fcntl.fcntl(asked._connected, fcntl.F_DUPFD_CLOEXEC, 1024))
            asked._stream.close()
            asked._stream = FrameStream(asked._connected)
            with pytest.raises(Unavailable, match="did not answer in time"):
                asked.status(0.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.unlink(path)
