"""A drain under load: what was accepted ends `done`, nothing new is accepted, and the daemon leaves in time."""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.support.fleet import Daemon, Fleet, RemoteError, Worker, send, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real
PULLS = 200
GRACE = PATIENCE


def readiness(daemon: Daemon) -> int:
    try:
        with urllib.request.urlopen(f"http://{daemon.serving()['http']}/readyz", timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def sample(daemon: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"http://{daemon.serving()['http']}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def tickets(prefill: Worker) -> list[str]:
    prefill.call("fill", ids=list(range(PULLS)), value=7)
    return [prefill.call("offer", name=f"o{number}", ids=[number]) for number in range(PULLS)]


def outcomes(worker: Worker) -> dict[str, str]:
    ended: dict[str, str] = {}
    deadline = time.monotonic() + GRACE
    while len(ended) < PULLS and time.monotonic() < deadline:
        for event in worker.call("wait", timeout=1.0):
            if event["kind"] in ("Done", "Failed", "Cancelled"):
                ended[event["request"]] = event["kind"]
    return ended


def test_a_drained_consumer_finishes_200_pulls_in_flight_and_takes_no_new_one(fleet: Fleet) -> None:
    source, target = fleet.daemon("p"), fleet.daemon("d", drain_grace=str(GRACE))
    prefill = fleet.worker(source, "prefill", blocks=PULLS)
    decode = fleet.worker(target, "decode", blocks=PULLS + 1)
    offers = tickets(prefill)
    with source.paused():  # nothing can finish before the drain has begun
        for number, ticket in enumerate(offers):
            decode.call("pull", name=f"r{number}", ticket=ticket, ids=[number], timeout=GRACE)
        for _ in until("every pull is accepted"):
            if sample(target, "kvd_pulls_active") == PULLS:
                break
        assert readiness(target) == 200
        began = time.monotonic()
        command = [sys.executable, "-m", "kvd.cli.main", "drain", "--socket", str(target.socket)]
        command += ["--wait", str(GRACE), "--timeout", str(GRACE)]
        drain = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in until("the drain begins"):
            if readiness(target) == 503:
                break
        decode.call("pull", name="late", ticket=offers[0], ids=[PULLS])
        refused = [event for event in decode.call("wait", timeout=PATIENCE) if event.get("request") == "late"]
        assert [event["kind"] for event in refused] == ["Failed"]
        assert "shutting_down" in str(refused[0])
    assert outcomes(decode) == {f"r{number}": "Done" for number in range(PULLS)}
    assert decode.call("values", ids=list(range(PULLS))) == [7] * PULLS
    told, _ = drain.communicate(timeout=GRACE)
    assert drain.returncode == 0, told
    assert "drained in" in told
    assert target.child.wait(0)
    assert time.monotonic() - began < GRACE


@pytest.mark.slow
def test_a_drained_producer_is_read_to_the_end_by_all_who_claimed_and_offers_nothing_new(
    fleet: Fleet, devices: tuple[str, str]
) -> None:
    # Over TCP, which is slow enough for most reads to be open when the drain begins.
    source = fleet.far_daemon("p", drain_grace=str(GRACE), device=devices[0])
    target = fleet.far_daemon("d", device=devices[1])
    prefill = fleet.worker(source, "prefill", blocks=PULLS, block_bytes=1 << 20)
    decode = fleet.worker(target, "decode", blocks=PULLS, block_bytes=1 << 20)
    offers = tickets(prefill)
    for number, ticket in enumerate(offers):
        decode.call("pull", name=f"r{number}", ticket=ticket, ids=[number], timeout=GRACE)
    for _ in until("every offer is claimed"):
        if sample(source, 'kvd_claims_total{answer="granted"}') == PULLS:
            break
    began = time.monotonic()
    send(source.child, signal.SIGTERM)
    for _ in until("the daemon is unready or gone"):
        if source.child.wait(0) or readiness(source) == 503:
            break
    if not source.child.wait(0):
        with pytest.raises(RemoteError, match=r"shutting_down|daemon_lost"):
            prefill.call("offer", name="late", ids=[0])
    assert outcomes(decode) == {f"r{number}": "Done" for number in range(PULLS)}
    assert decode.call("values", ids=list(range(PULLS))) == [7] * PULLS
    assert source.child.wait(max(0.0, GRACE - (time.monotonic() - began)))
