"""A daemon that stops while a read of it cannot end: what its workers may believe, and when."""

import contextlib
import itertools
import signal
import socket

import pytest

from tests.support.fleet import send, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

BLOCKS, BLOCK_BYTES = 256, 1 << 20
IDS = list(range(BLOCKS))
FIRST = IDS[:4]


def listens(path):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


@pytest.mark.slow
def test_a_daemon_serves_its_workers_path_until_its_transport_has_ended(fleet, devices):
    # Over TCP, where a paused producer stalls a read.
    source, target = devices
    producer, consumer = fleet.far_daemon("p", device=source), fleet.far_daemon("d", drain_grace="0.1", device=target)
    prefill = fleet.worker(producer, "prefill", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    decode = fleet.worker(consumer, "decode", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    prefill.call("fill", ids=IDS, value=7)
    with contextlib.ExitStack() as held:
        request = read_that_hangs(producer, prefill, decode, held)
        send(consumer.child, signal.SIGTERM)
        for _ in until("the daemon no longer serves its workers' path"):
            if not listens(consumer.socket):
                break
        left = decode.call("values", ids=IDS)
    # The producer goes on. A transport that had not ended would write what it sends for the seconds it has to stop.
    assert consumer.child.wait(PATIENCE)
    assert decode.call("values", ids=IDS) == left
    failed = decode.outcome(request)
    assert (failed["kind"], failed["code"]) == ("Failed", "shutting_down")


def read_that_hangs(producer, prefill, decode, held):
    """Starts a read, and pauses its producer with at least half of it unsent, more than the network holds."""
    turns = itertools.count()
    for _ in until("a read hangs"):
        request = f"r{next(turns)}"
        decode.call("clear")
        ticket = prefill.call("offer", name=request, ids=IDS)
        decode.call("pull", name=request, ticket=ticket, ids=IDS)
        pause = held.enter_context(contextlib.ExitStack())
        for _ in until("the first bytes have landed"):
            pause.close()  # the producer runs for as long as a look takes, so the machine's speed hardly matters
            landed = 7 in decode.call("values", ids=FIRST)
            pause.enter_context(producer.paused())
            if landed:
                break
        if decode.call("values", ids=IDS).count(7) < BLOCKS // 2:
            return request
        pause.close()
        decode.outcome(request)
    raise AssertionError("unreachable")


def test_a_daemon_whose_copy_never_ends_ends_without_it_and_says_so(fleet, standin, monkeypatch):
    standin.set(cpu_visible=1)
    for name, value in standin.environment.items():
        monkeypatch.setenv(name, value)
    producer = fleet.daemon("p", device="cuda:0")
    consumer = fleet.daemon("d", device="cuda:0", drain_grace="0.1")
    prefill, decode = fleet.worker(producer, "prefill"), fleet.worker(consumer, "decode")
    ticket = prefill.call("offer", name="r", ids=[1])
    standin.set(hold=1)
    decode.call("pull", name="r", ticket=ticket, ids=[2], timeout=1.0)
    assert decode.outcome("r")["quarantined"]
    send(consumer.child, signal.SIGTERM)
    assert consumer.child.wait(PATIENCE)
    assert "the transport did not stop within 15 s; the process ends without that" in consumer.log.read_text()
    for _ in until("the blocks are free, as the process has ended"):
        if any(event["kind"] == "Freed" for event in decode.call("wait", timeout=1.0)):
            break


@pytest.mark.parametrize("gone", [".pools", ".pools.lock", ".peers", ".peers.lock", "*"])
def test_a_daemon_whose_files_somebody_has_removed_stops_in_order(fleet, gone):
    daemon = fleet.daemon("d")
    daemon.serving()
    worker = fleet.worker(daemon, "w")
    for path in daemon.socket.parent.glob(f"{daemon.socket.name}{gone}"):
        path.unlink()
    send(daemon.child, signal.SIGTERM)
    assert daemon.child.wait(PATIENCE)
    assert '"event": "stopped"' in daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()
    worker.kill()
