"""What could hold up a daemon's loop, or its copies, for long."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real

SERVE_UNTIL_READY = """
import gc, os, signal, sys
from kvd.cli.main import main
from kvd.daemon.systemd import Notifier

def ready(self):
    print("objects", gc.get_freeze_count(), len(gc.get_objects()), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)

Notifier.ready = ready
main()
"""


def test_the_garbage_collector_does_not_look_through_what_the_start_has_left(tmp_path):
    flags = ["serve", "--name", "d", "--socket", str(tmp_path / "d.sock")]
    command = [sys.executable, "-c", SERVE_UNTIL_READY, *flags, "--http", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("objects")]
    frozen, left = map(int, line.split()[1:])
    assert frozen > 50_000
    assert left < 5_000


def test_a_daemons_threads_are_ordinary_ones(fleet):
    """Whoever computes beside them has what the kernel gives: none is nicer, greedier or kept to a core."""
    producer, consumer = fleet.daemon("p"), fleet.daemon("d", copy_threads="2")
    size = {"blocks": 64, "block_bytes": 1 << 20}
    prefill, decode = fleet.worker(producer, "prefill", **size), fleet.worker(consumer, "decode", **size)
    every = list(range(64))
    for turn in range(2):  # with the first read of a peer each thread learns that it copies
        ticket = prefill.call("offer", name=f"r{turn}", ids=every)
        decode.call("pull", name=f"r{turn}", ticket=ticket, ids=every)
        assert decode.outcome(f"r{turn}")["kind"] == "Done"
    tasks = [int(task) for daemon in (producer, consumer) for task in os.listdir(f"/proc/{daemon.child.pid}/task")]
    assert {os.getpriority(os.PRIO_PROCESS, task) for task in tasks} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert {os.sched_getscheduler(task) for task in tasks} == {os.SCHED_OTHER}
    assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset(os.sched_getaffinity(0))}
