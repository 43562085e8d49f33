"""What could hold up a daemon's loop, or its copies, for long."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

SERVE_UNTIL_READY = """
import gc, os, signal, sys
from kvd.cli.main import main
from kvd.notify import Notifier

def ready(self):
    print("objects", gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)

Notifier.ready = ready
main()
"""


def test_the_garbage_collector_does_not_look_through_what_the_start_has_left(tmp_path):
    flags = ["serve", "--name", "d", "--socket", str(tmp_path / "d.sock"), "--listen", "tcp://127.0.0.1:0"]
    command = [sys.executable, "-c", SERVE_UNTIL_READY, *flags, "--http", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("objects")]
    frozen, left = map(int, line.split()[1:])
    assert frozen > 50_000
    assert left < 5_000


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_transport_threads_that_share_a_read_have_no_core_in_common(fleet):
    daemon = fleet.daemon("d", transport_threads="2")
    daemon.serving()
    threads = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{daemon.child.pid}/task")}
    first, second = threads - {frozenset(os.sched_getaffinity(0))}
    assert first.isdisjoint(second)
    assert first | second == os.sched_getaffinity(0)
