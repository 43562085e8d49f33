import os
import select
import signal
import subprocess
import sys

import pytest

from kvd import processes as module
from kvd.processes import ProcessEndedError, Processes
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

TALKER = """
import os, signal, sys
signal.signal(signal.SIGTERM, {on_term})
os.write(1, b"up\\n")
signal.pause()
"""


@pytest.fixture
def talker(tmp_path, monkeypatch):
    """Makes a module that says `up` when it is ready for signals, and does with SIGTERM what it is told."""

    def make(on_term: str) -> str:
        (tmp_path / "talker.py").write_text(TALKER.format(on_term=on_term))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return "talker"

    return make


def is_gone(exit_descriptor: int) -> bool:
    return bool(select.select([exit_descriptor], [], [], PATIENCE)[0])


def test_leaving_the_block_ends_every_process(tmp_path, talker):
    with Processes(tmp_path) as processes:
        children = [processes.start(name, talker("signal.SIG_DFL"), piped=True) for name in ("one", "two")]
        watched = [os.dup(child.exit) for child in children]
        assert [os.read(child.source, 16) for child in children] == [b"up\n", b"up\n"]
    assert all(is_gone(descriptor) for descriptor in watched)
    for descriptor in watched:
        os.close(descriptor)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path, talker, monkeypatch):
    monkeypatch.setattr(module, "STOP_SECONDS", 0.05)
    with Processes(tmp_path) as processes:
        child = processes.start("deaf", talker("signal.SIG_IGN"), piped=True)
        watched = os.dup(child.exit)
        assert os.read(child.source, 16) == b"up\n"
    assert is_gone(watched)
    os.close(watched)


def test_an_early_end_is_told_with_the_end_of_the_log(tmp_path):
    with Processes(tmp_path) as processes:
        child = processes.start("prefill-daemon", "runpy", str(tmp_path / "missing.py"))
        assert is_gone(child.exit)
        error = child.ended()
    assert isinstance(error, ProcessEndedError)
    first, *log = str(error).splitlines()
    assert first.startswith("prefill-daemon ended with status")
    assert first.endswith("; the end of its log:")
    assert "missing.py" in log[-1]


def test_writing_to_a_process_that_ended_says_how_it_ended(tmp_path, talker):
    with Processes(tmp_path) as processes:
        child = processes.start("decode-engine", talker("lambda *_: sys.exit(3)"), piped=True)
        assert os.read(child.source, 16) == b"up\n"
        os.kill(child.pid, signal.SIGTERM)
        assert is_gone(child.exit)
        with pytest.raises(ProcessEndedError, match="decode-engine ended with status 3"):
            child.write(b"x")


def test_processes_do_not_outlive_a_demo_that_is_killed(tmp_path, talker):
    program = (
        "import sys; from pathlib import Path; from kvd.processes import Processes\n"
        "child = Processes(Path(sys.argv[1])).start('orphan', sys.argv[2], piped=True)\n"
        "import os; os.read(child.source, 16); print(child.pid, flush=True); import signal; signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), talker("signal.SIG_IGN")], stdout=subprocess.PIPE
    ) as demo:
        orphan = os.pidfd_open(int(demo.stdout.readline()))
        demo.kill()
    assert is_gone(orphan)
    os.close(orphan)


def test_who_waits_until_a_process_is_ready_hears_also_that_it_ended_or_took_too_long(tmp_path, talker, monkeypatch):
    with Processes(tmp_path) as processes:
        ended = processes.start("ended", "runpy", str(tmp_path / "missing.py"))
        with pytest.raises(ProcessEndedError, match=r"missing\.py"):
            ended.wait_until(lambda: False)
        slow = processes.start("slow", talker("signal.SIG_DFL"), piped=True)
        assert slow.wait_until(lambda: slow.source in select.select([slow.source], [], [], 0)[0])
        monkeypatch.setattr(module, "START_SECONDS", 0.1)
        assert not slow.wait_until(lambda: False)
