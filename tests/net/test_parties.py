"""Whose connection it is, as far as the kernel tells: processes of pods share a user and do not see each other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.net.unix import Party, party_at
from tests.support.patience import PATIENCE

SERVE = """
import socket, sys
from kvd.net.unix import credentials, party_at
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    kept = []
    while True:
        kept.append(listener.accept()[0])
        print(credentials(kept[-1]).pid, *party_at(kept[-1]), flush=True)
"""
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(); sys.stdin.read()"


def test_connections_of_one_process_are_of_one_party() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert party_at(ours) == party_at(theirs)
        assert party_at(ours).uid == os.geteuid()
        assert party_at(ours).process > 0


def test_a_process_that_cannot_be_told_from_others_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr("kvd.net.unix._pidfds_differ", lambda: False)
        assert party_at(ours) == Party(os.geteuid(), os.getpid())
        monkeypatch.setattr("kvd.net.unix.peer_pidfd", lambda _connected, _pid: -1)
        monkeypatch.setattr("kvd.net.unix.credentials", lambda _connected: (0, 7, 7))
        assert party_at(ours) == Party(7, 0)


@pytest.mark.real
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace takes root")
def test_processes_of_pid_namespaces_that_are_not_seen_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    within = ["unshare", "--pid", "--fork", "--kill-child"]
    python = [sys.executable, "-c"]
    server = subprocess.Popen([*within, *python, SERVE, str(path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    one, two = (
        subprocess.Popen([*python, CONNECT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    try:
        said = [server.stdout.readline().split() for _ in (one, two)]
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for ours in (first, second):
                ours.connect(str(path))
                said.append(server.stdout.readline().split())
    finally:
        for child in (one, two):
            child.communicate(timeout=PATIENCE)
        server.kill()
        server.wait()
        server.stdout.close()
        path.unlink()
    assert {pid for pid, _, _ in said} == {"0"}
    if not any(int(process) for _, _, process in said):
        pytest.skip("this kernel tells nothing of such processes (before Linux 6.9)")
    assert len({process for _, _, process in said}) == 3
    assert said[2] == said[3]
