"""A daemon that stops while a read of it cannot end: what its workers may believe, and when."""

import select
import signal
import socket
import time

import pytest

from kvd.transport.nixl.transport import STOP_SECONDS
from tests.support.fleet import send, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

BLOCKS, BLOCK_BYTES = 256, 1 << 20
"""A read over TCP takes a quarter of a second: long enough to be caught in the middle of it."""
IDS = list(range(BLOCKS))


def listens(path):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def ended(child):
    return bool(select.select([child.exit], [], [], 0)[0])


@pytest.mark.slow
def test_a_daemon_serves_its_workers_path_until_its_transport_has_ended(fleet):
    # Over TCP, where a paused producer stalls a read.
    producer, consumer = fleet.far_daemon("p"), fleet.far_daemon("d", drain_grace="0.1", heartbeat="10")
    prefill = fleet.worker(producer, "prefill", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    decode = fleet.worker(consumer, "decode", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    prefill.call("fill", ids=IDS, value=7)
    for turn in range(20):
        decode.call("clear")
        ticket = prefill.call("offer", name=f"r{turn}", ids=IDS)
        decode.call("pull", name=f"r{turn}", ticket=ticket, ids=IDS, timeout=60.0)
        for _ in until("the first bytes have landed"):
            if 7 in decode.call("values", ids=IDS):
                break
        with producer.paused():
            time.sleep(0.1)  # what the network holds lands
            if decode.call("values", ids=IDS).count(7) == BLOCKS:
                continue
            send(consumer.child, signal.SIGTERM)
            while listens(consumer.socket):
                time.sleep(0.01)
            closed = time.monotonic()
            for _ in until("the daemon has ended", STOP_SECONDS + 30):
                if ended(consumer.child):
                    break
            assert time.monotonic() - closed < STOP_SECONDS / 2
            failed = decode.outcome(f"r{turn}")
            assert (failed["kind"], failed["code"]) == ("Failed", "shutting_down")
            return
    pytest.fail("the producer was never paused in the middle of a read")


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
