"""The process that reads from other hosts ends; everything else goes on, and it comes back."""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import struct
import urllib.error
import urllib.request

import pytest

from kvd.net.unix import readable
from tests.support.elsewhere import network_settings
from tests.support.fleet import until
from tests.support.patience import PATIENCE
from tests.support.ports import listening, own_address
from tests.support.transports import transport_now, transport_of

pytestmark = pytest.mark.real

BLOCKS = 64
IDS = list(range(BLOCKS))


def http(daemon, path):
    """Status and text."""
    try:
        with urllib.request.urlopen(f"http://{daemon.serving()['http']}/{path}", timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def restarts(daemon):
    lines = http(daemon, "metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kvd_transport_restarts_total "))


def move(prefill, decode, name, value):
    prefill.call("fill", ids=IDS, value=value)
    ticket = prefill.call("offer", name=name, ids=IDS)
    decode.call("pull", name=name, ticket=ticket, ids=IDS)
    return decode.outcome(name)


def arrives(prefill, decode, name, value):
    ended = move(prefill, decode, name, value)
    assert ended["kind"] == "Done", ended
    assert decode.call("values", ids=IDS) == [value] * BLOCKS


def test_what_is_copied_within_the_host_goes_on_while_the_transports_to_other_hosts_are_killed(fleet):
    daemons = [fleet.daemon(name, **network_settings(own_address())) for name in ("p", "d")]
    prefill, decode = (fleet.worker(daemon, daemon.name, blocks=BLOCKS) for daemon in daemons)
    arrives(prefill, decode, "first", 1)
    for turn in range(2, 7):
        for daemon in daemons:
            os.kill(transport_of(daemon), signal.SIGKILL)
        arrives(prefill, decode, f"r{turn}", turn)
    for daemon in daemons:
        for _ in until("its end has been noticed"):
            if restarts(daemon):
                break
        for _ in until("it is ready again"):
            if http(daemon, "readyz")[0] == 200:
                break
        assert daemon.starts == 1
        assert not daemon.child.wait(0)


def test_the_next_pull_over_the_network_arrives_whichever_transport_has_been_killed(fleet, devices):
    daemons = [fleet.far_daemon(name, heartbeat="2", device=device) for name, device in zip("pd", devices, strict=True)]
    prefill, decode = (fleet.worker(daemon, daemon.name, blocks=BLOCKS) for daemon in daemons)
    arrives(prefill, decode, "first", 1)
    assert {peer["path"] for peer in decode.call("status")["handshake"]} != {"copy/memory"}
    values = itertools.count(2)
    for turn, victim in enumerate(daemons):
        os.kill(transport_of(victim), signal.SIGKILL)
        for attempt in until("a pull arrives again"):
            value = next(values)
            ended = move(prefill, decode, f"r{value}", value)
            if ended["kind"] == "Done":
                assert decode.call("values", ids=IDS) == [value] * BLOCKS
                break
            assert ended["code"] in ("peer_lost", "transport"), (turn, attempt, ended)


@pytest.mark.slow
def test_while_its_transport_cannot_start_a_daemon_says_so_and_then_that_it_is_ready(fleet):
    daemon = fleet.daemon("p", **network_settings(own_address()))
    for _ in until("it is ready"):
        if http(daemon, "readyz")[0] == 200:
            break
    os.kill(transport_of(daemon), signal.SIGKILL)
    for _ in until("it says why it is not ready"):
        status, text = http(daemon, "readyz")
        if status == 503:
            break
    assert "the process that reads from other hosts ended: signal SIGKILL" in text
    for _ in until("it is ready again"):
        if http(daemon, "readyz")[0] == 200:
            break
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    (ended,) = [entry for entry in entries if entry["event"] == "the transport's process ended"]
    assert ended["how"] == "signal SIGKILL"


def test_the_transports_process_ends_with_its_daemon_and_a_successor_serves_at_once(fleet):
    daemon = fleet.daemon("p", **network_settings(own_address()))
    first = os.pidfd_open(transport_of(daemon))
    daemon.restart()
    daemon.serving()
    assert readable(first, PATIENCE)
    os.close(first)
    assert transport_of(daemon)


def noise(seed):
    """7 KB of what looks to UCX like its own messages."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    parts = [struct.pack("<Q", 0xCAFEBABE12345678)]
    for _ in range(200):
        size = rng.randrange(64)
        parts.append(struct.pack("<BI", rng.randrange(40), size) + rng.randbytes(size))
    return b"".join(parts)


def test_noise_at_the_port_that_asks_for_no_key_ends_a_transport_and_neither_daemon_nor_worker(fleet):
    daemon = fleet.daemon("p", **network_settings(own_address()))
    worker = fleet.worker(daemon, "w", blocks=BLOCKS)
    worker.call("fill", ids=IDS, value=3)
    first = transport_of(daemon)
    for seed in range(20):
        (place,) = listening(first)
        with socket.create_connection(place, timeout=PATIENCE) as stranger:
            stranger.sendall(noise(seed))
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                stranger.recv(1)  # until the other end has closed, or its process has ended
        if transport_now(daemon) != first:
            break
    else:
        pytest.fail("noise does no harm any more: what this test is about has changed")
    for _ in until("the transport is back"):
        if restarts(daemon) and http(daemon, "readyz")[0] == 200:
            break
    assert not daemon.child.wait(0)
    assert worker.call("values", ids=IDS) == [3] * BLOCKS
    assert worker.call("status")["daemon"] == "p"
