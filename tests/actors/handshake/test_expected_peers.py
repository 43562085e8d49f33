"""Daemons that the peer file names are met ahead of the first pull, and for as long as it names them."""

from kvd.actors.runtime.actor import call
from tests.actors.lone import Lone
from tests.simulator.virtual.fleet import PEER_IDLE

IDLE = 3 * PEER_IDLE


def links(lone):
    lone.run(IDLE)
    return set(lone.daemon.peer_port.links.values())


def test_an_expected_peer_stays_met_though_nothing_is_asked_of_it_until_it_is_expected_no_more():
    lone = Lone()
    handshake = lone.daemon.actors.handshake
    call(handshake.connector.expect, frozenset({"sim://d1", "sim://d2"}))
    assert links(lone) == {"sim://d1", "sim://d2"}
    call(handshake.connector.expect, frozenset({"sim://d2", "sim://d3"}))
    assert links(lone) == {"sim://d2", "sim://d3"}
    call(handshake.connector.expect, frozenset())
    assert links(lone) == set()


def test_an_address_that_cannot_be_met_does_not_keep_us_from_the_others():
    lone = Lone()
    call(lone.daemon.actors.handshake.connector.expect, frozenset({"nonsense", "sim://d1"}))
    assert links(lone) == {"sim://d1"}
