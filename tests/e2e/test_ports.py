"""Which ports a daemon opens: those of its configuration, and no others."""

import json

import pytest

from kvd.host import interface_of
from tests.support.elsewhere import network_settings
from tests.support.ports import endpoint, listening, own_address
from tests.support.transports import transport_of

pytestmark = pytest.mark.real

BLOCKS = 64
IDS = list(range(BLOCKS))


def expected(daemon):
    """What the daemon says that it listens on: its HTTP server, and its peers' address where that is a port."""
    said = daemon.serving()
    return {endpoint(said[key]) for key in ("http", "address") if not said[key].startswith("ipc://")}


def test_daemons_of_one_host_open_no_port_but_their_own_and_move_blocks_all_the_same(fleet):
    daemons = [fleet.daemon(name) for name in ("p", "d")]
    prefill, decode = (fleet.worker(daemon, daemon.name, blocks=BLOCKS) for daemon in daemons)
    prefill.call("fill", ids=IDS, value=9)
    ticket = prefill.call("offer", name="r", ids=IDS)
    decode.call("pull", name="r", ticket=ticket, ids=IDS)
    assert decode.outcome("r")["kind"] == "Done"
    assert decode.call("values", ids=IDS) == [9] * BLOCKS
    for daemon in daemons:
        assert listening(daemon.child.pid) == expected(daemon)


def test_a_daemon_of_several_hosts_opens_its_transport_where_it_was_told_to_and_says_so_at_its_start(fleet):
    address = own_address()
    daemon = fleet.daemon("p", **network_settings(address))
    known = expected(daemon)
    assert listening(daemon.child.pid) == known
    ports = listening(transport_of(daemon))
    first, last = map(int, daemon.flags["transport-ports"].split("-"))
    assert ports
    assert all(host == address and first <= port <= last for host, port in ports)
    entries = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    (warning,) = [entry for entry in entries if entry["event"] == "the transport is unprotected"]
    assert warning["ports"] == daemon.flags["transport-ports"]
    assert interface_of(address) in warning["devices"].split(",")
    assert "reads and writes all pools, with or without a key" in warning["risk"]
