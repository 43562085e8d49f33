"""Forked processes behave as those of a new interpreter do."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.processes import ProcessEndedError
from tests.support.fleet import until
from tests.support.forkserver import ForkedProcesses, forked, run
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real


def test_status_output_and_environment_are_the_modules_own() -> None:
    assert run(["kvd.cli.main", "--version"], os.environ, PATIENCE)[0] == 0
    status, said = run(["kvd.cli.main", "nothing"], os.environ, PATIENCE)
    assert status == 2
    assert "usage: kvd" in said
    status, said = run(["kvd.cli.main", "serve"], {**os.environ, "KVD_HEARTBEAT": "often"}, PATIENCE)
    assert status == 2
    assert "heartbeat" in said
    assert "'often'" in said


def test_one_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(["kvd.cli.main", "router", "--listen", "127.0.0.1:0", *SERVERS], os.environ, 0.1)


SERVERS = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")


def test_a_child_that_is_killed_says_so_and_has_a_log_a_session_and_pipes(tmp_path: Path) -> None:
    with ForkedProcesses(tmp_path) as processes:
        worker = processes.start("w", "tests.support.worker_main", piped=True)
        assert os.getsid(worker.pid) == worker.pid
        worker.write(b'["status", {}]\n')
        os.kill(worker.pid, signal.SIGSTOP)
        assert not worker.wait(0)
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.wait(PATIENCE)
        assert "SIGKILL" in str(worker.ended())
        with pytest.raises(ProcessEndedError, match="SIGKILL"):
            worker.write(b"[]\n")


@pytest.mark.parametrize("command", [["nice", sys.executable, "-c", "1"], ["env", "PYTHONOPTIMIZE=1", sys.executable]])
def test_other_commands_are_run_as_they_are(command: list[str], tmp_path: Path) -> None:
    child = forked("c", command, tmp_path / "c.log", piped=False)
    assert child.wait(PATIENCE)
    assert type(child).__name__ == "Child"
    child.stop()


PARENT = """
import sys
from pathlib import Path
from tests.support.forkserver import ForkedProcesses
child = ForkedProcesses(Path(sys.argv[1])).start("w", "tests.support.worker_main", piped=True)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_all_end_with_the_process_that_started_them_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        parent.kill()
    for process in (pid, server):
        for _ in until(f"{process} has ended"):
            if not Path(f"/proc/{process}").exists():
                break
