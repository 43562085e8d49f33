"""What could hold up a daemon's loop, or its copies, for long."""

import os
import subprocess
import sys

import pytest

from kvd.awake import DEVICE, shallowest
from kvd.doctor.cores import check_cores
from kvd.doctor.finding import Level
from tests.e2e.fleet import until

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
    producer, consumer = fleet.daemon("p"), fleet.daemon("d", transport_threads="2")
    size = {"blocks": 64, "block_bytes": 1 << 20}
    prefill, decode = fleet.worker(producer, "prefill", **size), fleet.worker(consumer, "decode", **size)
    every, anywhere = list(range(64)), frozenset(os.sched_getaffinity(0))
    for turn in range(10):  # with the first reads of a peer each learns that it copies, if it gets a slice of them
        ticket = prefill.call("offer", name=f"r{turn}", ids=every)
        decode.call("pull", name=f"r{turn}", ticket=ticket, ids=every)
        assert decode.outcome(f"r{turn}", 20)["kind"] == "Done"
        if len(consumer.cores_of_threads()) == 3:
            break
    first, second = consumer.cores_of_threads() - {anywhere}
    assert first.isdisjoint(second)
    assert first | second == anywhere
    assert producer.cores_of_threads() == {anywhere}


def wakes_within() -> int:
    """Microseconds in which cores wake up, by all that ask for it."""
    return int.from_bytes(DEVICE.read_bytes()[:4], sys.byteorder)


def becomes(microseconds: int) -> None:
    for _ in until(10, f"cores wake up within {microseconds} us"):
        if wakes_within() == microseconds:
            break


@pytest.mark.skipif(check_cores().level is not Level.OK, reason=check_cores().text)
def test_cores_are_awake_while_requests_come_and_sleep_when_none_does_or_the_daemon_is_killed(fleet):
    before = wakes_within()
    if before <= shallowest():
        pytest.skip(f"somebody else keeps the cores of this host awake, within {before} us")
    daemon = fleet.daemon("d")
    worker = fleet.worker(daemon, "prefill")
    assert wakes_within() == before
    for turn in range(2):
        worker.call("offer", name=f"o{turn}", ids=[turn])
        becomes(shallowest())
        becomes(before)
    worker.call("offer", name="last", ids=[9])
    becomes(shallowest())
    daemon.kill()
    assert wakes_within() == before


@pytest.mark.skipif(check_cores().level is not Level.OK, reason=check_cores().text)
def test_who_would_rather_save_power_says_so(fleet):
    before = wakes_within()
    worker = fleet.worker(fleet.daemon("d", keep_awake="false"), "prefill")
    worker.call("offer", name="o", ids=[1])
    worker.call("cancel", name="o")
    assert worker.outcome("o", 10)["reason"] == "withdrawn"  # both have passed the daemon
    assert wakes_within() == before
