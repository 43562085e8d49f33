"""Which ports a daemon opens: those of its configuration, and no others."""

import pytest

from tests.support.ports import endpoint, listening

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
