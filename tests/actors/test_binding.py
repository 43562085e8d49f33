"""Whose word counts: a daemon's name, its agent, its address and its key belong together."""

from unittest.mock import Mock

import msgspec
import pytest

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode, Unavailable
from kvd.net.priority_slots import PrioritySlots
from kvd.protocol.peer import Claim, Grant, Held, Hello, PoolInfo, Welcome
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Done, Failed, Pull
from kvd.transport.interface import PeerAdded, PeerFailed
from tests.actors.stage import CACHE, SECRET, Stage, ids, make_ticket, welcome_of

VICTIM, EVIL = "aa" * 32, "bb" * 32
NAMES = {VICTIM: "victim", EVIL: "evil"}
END = 1 << 63


class Keyed(Stage):
    """Its peers prove keys."""

    def __init__(self, **settings):
        super().__init__(speaks_for=lambda key, daemon: NAMES.get(key) == daemon, **settings)
        self.added = []
        transport = self.dependencies.transport
        add_peer = transport.add_peer
        transport.add_peer = lambda agent, *more: (self.added.append(agent), add_peer(agent, *more))
        self.attach()


def welcome_from(daemon, agent, metadata=b"m", pools=None):
    return msgspec.structs.replace(
        welcome_of(), daemon=daemon, agent=agent, metadata=metadata, **({} if pools is None else {"pools": pools})
    )


def pull_from(stage, name, key, daemon, blocks=(2, 3)):
    stage.pull(name, blocks, ticket=make_ticket(address=f"tcp://{daemon}:1#{key}", daemon=daemon), timeout=60.0)


@pytest.mark.parametrize(
    ("daemon", "agent", "text"),
    [
        ("evil", "victim#5", "the agent 'victim#5' is not one of 'evil'"),
        ("victim", "victim#5", "its key is not that of 'victim'"),
        ("evil", "evil", "the agent 'evil' is not one of 'evil'"),
    ],
)
def test_a_daemon_that_says_another_ones_name_or_agent_is_not_read_from(daemon, agent, text):
    stage = Keyed()
    pull_from(stage, "good", VICTIM, "victim")
    stage.peer_says(welcome_from("victim", "victim#5"), link=1)
    pull_from(stage, "bad", EVIL, "evil", blocks=(4, 5))
    stage.peer_says(welcome_from(daemon, agent, metadata=b"evil"), link=2)
    [failed] = stage.notified
    assert (failed.request, failed.code) == ("bad", ErrorCode.PEER_LOST)
    assert text in failed.text
    assert stage.added == ["victim#5"]
    assert [claim.claim for claim in stage.asks(Claim)] == [1]
    stage.peer_says(Grant(1, 7, 1, 5), link=1)
    stage.landed(1)
    stage.peer_says(Held(1), link=1)
    assert stage.notified[1:] == [Done("good")]


def test_a_pull_fails_where_another_daemon_answers_than_its_ticket_names():
    stage = Stage()
    stage.attach()
    stage.pull(ticket=make_ticket(daemon="another"))
    stage.peer_says(welcome_of())
    [failed] = stage.notified
    assert (type(failed), failed.code) == (Failed, ErrorCode.BAD_TICKET)
    assert failed.text == "the ticket is about 'another' at tcp://peer:1, where 'peer' answers"
    assert stage.asks(Claim) == []


def test_the_agent_of_a_ready_peer_is_refused_to_another_key():
    """Two keys may have had one name, one after the other."""
    stage = Stage(heartbeat=1.0)
    stage.attach()
    stage.pull("good", ticket=make_ticket(address=f"tcp://a:1#{VICTIM}"), timeout=60.0)
    stage.peer_says(welcome_of(), link=1)
    stage.pull("bad", (4, 5), ticket=make_ticket(address=f"tcp://b:1#{EVIL}"), timeout=60.0)
    stage.peer_says(msgspec.structs.replace(welcome_of(), metadata=b"evil"), link=2)
    [failed] = stage.notified
    assert (failed.request, failed.code) == ("bad", ErrorCode.PEER_LOST)
    assert f"the agent 'peer#1' is that of tcp://a:1#{VICTIM}" in failed.text


class Spelled(Stage):
    """One daemon under two addresses: `here` and `there`; links 1 and 2."""

    def __init__(self):
        super().__init__(heartbeat=1.0, peer_idle=2.0)
        self.attach()
        self.agents = []
        transport = self.dependencies.transport
        add_peer, remove_peer = transport.add_peer, transport.remove_peer
        transport.add_peer = lambda agent, *more: (self.agents.append(more[0]), add_peer(agent, *more))
        transport.remove_peer = lambda agent: (self.agents.clear(), remove_peer(agent))
        for number, name in enumerate(("here", "there"), 1):
            self.by(name)
            self.peer_says(welcome_of(), link=number)
            self.serve(number)
        assert self.notified == [Done("1"), Done("2")]
        self.to_workers.clear()

    def by(self, name):
        """A pull by one of the addresses."""
        self.pulls = getattr(self, "pulls", 0) + 1
        self.pull(str(self.pulls), (2, 3), ticket=make_ticket(address=f"tcp://{name}:1"), timeout=60.0)

    def serve(self, link):
        """The last claim is granted, its bytes land, its fence holds."""
        claim = self.asks(Claim)[-1].claim
        self.peer_says(Grant(claim, 7, 1, 5), link)
        self.landed(claim)
        self.peer_says(Held(claim), link)


def test_two_addresses_of_one_daemon_both_lead_to_it():
    stage = Spelled()
    for name, link in (("here", 1), ("there", 2), ("here", 1)):
        stage.by(name)
        stage.serve(link)
    assert [done.request for done in stage.notified] == ["3", "4", "5"]


def test_an_agent_is_forgotten_with_the_last_of_its_addresses():
    stage = Spelled()
    for _ in range(6):  # only `here` is used: `there` is idle
        stage.run(0.5)
        stage.peer_says(welcome_of(), link=1)
        stage.peer_says(welcome_of(), link=2)
        stage.by("here")
        stage.serve(1)
    assert ("disconnect", 2) in stage.commands
    assert ("remove_peer", "peer#1") not in stage.commands
    assert all(isinstance(done, Done) for done in stage.notified)
    for _ in range(6):
        stage.run(0.5)
        stage.peer_says(welcome_of(), link=1)
    assert stage.commands.count(("remove_peer", "peer#1")) == 1


def test_what_a_second_link_says_of_an_agent_counts_when_the_first_says_it_too():
    stage = Spelled()
    more = welcome_of(("there", "more"))
    hellos = len(stage.asks(Hello))
    stage.pull("new", (2, 3), ticket=make_ticket("more", address="tcp://there:1"), timeout=60.0)
    stage.peer_says(more, link=2)
    assert [link for link, ask in stage.to_peers if isinstance(ask, Hello)][hellos:] == [2, 1]
    assert stage.agents == [b"m", b"m"]
    stage.peer_says(more, link=1)
    stage.run(1.0)
    stage.peer_says(more, link=2)
    stage.serve(2)
    assert stage.notified == [Done("new")]


def test_an_agent_that_the_transport_loses_is_lost_by_both_addresses():
    stage = Spelled()
    stage.transport_says(PeerFailed("peer#1", "gone"))
    assert stage.context.metrics.peers.labels("greeting")._value.get() == 2


@pytest.mark.parametrize(
    ("base", "size", "text"),
    [
        (END - 4096, 1 << 30, "pool 'there' would end at 0x800000003ffff000, where no memory can be"),
        ((1 << 64) - 1, 1 << 20, "pool 'there' would end at 0x100000000000fffff, where no memory can be"),
        (0, END - 1, ""),
    ],
)
def test_a_pool_where_no_memory_can_be_makes_a_peer_lost(base, size, text):
    stage = Stage()
    stage.attach()
    stage.pull()
    info = PoolInfo("there", 1, base.to_bytes(8, "little"), size, CACHE.raw)
    stage.peer_says(Welcome("peer", 5, "peer#1", b"m", (info,)))
    assert [(failed.code, text in failed.text) for failed in stage.notified] == ([("peer_lost", True)] if text else [])
    refused = stage.context.metrics.refused.labels("peer", ErrorCode.BAD_POOL)._value.get()
    assert refused == bool(text)


def test_a_pool_that_is_named_twice_makes_a_peer_lost():
    stage = Stage()
    stage.attach()
    stage.pull()
    stage.peer_says(welcome_of(("there", "there")))
    assert "it names a pool twice" in stage.notified[0].text


def test_a_peer_that_the_transport_never_reaches_is_lost_and_greeted_again():
    stage = Stage(heartbeat=60.0)
    stage.attach()
    reach, stage.dependencies.transport.add_peer = stage.dependencies.transport.add_peer, lambda *_: None
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    stage.run(29.0)
    assert stage.notified == []
    stage.run(2.0)
    [failed] = stage.notified
    assert "the transport has not reached it within 30 s" in failed.text
    assert ("remove_peer", "peer#1") in stage.commands
    stage.dependencies.transport.add_peer = reach
    stage.pull("again", timeout=600.0)
    stage.run(60.0)
    stage.peer_says(welcome_of())
    assert len(stage.asks(Claim)) == 1


def test_a_daemon_that_never_answers_is_forgotten_after_three_heartbeats():
    stage = Stage(heartbeat=1.0, peer_idle=600.0)
    stage.attach()
    stage.pull(timeout=60.0)
    stage.run(4.1)
    assert stage.notified[0].code == ErrorCode.PEER_LOST
    assert ("disconnect", 1) in stage.commands
    assert not stage.actors.handshake._peers.by_address


def test_a_worker_has_a_share_of_the_peers(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 2)
    stage = Stage(heartbeat=1.0)
    stage.attach()
    for number in range(3):
        stage.pull(f"p{number}", (number,), ticket=make_ticket(address=f"tcp://made-up-{number}:1"), timeout=60.0)
    [failed] = stage.notified
    assert (failed.request, failed.code) == ("p2", ErrorCode.PEER_LOST)
    assert "which is a worker's share" in failed.text
    stage.run(5.0)
    stage.to_workers.clear()
    stage.pull("later", ticket=make_ticket(address="tcp://another:1"), timeout=60.0)
    assert stage.notified == []


def test_addresses_that_one_workers_ticket_made_up_do_not_keep_anothers_pull_waiting(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 2)
    stage = Stage(heartbeat=1.0)
    stage.attach("one", 1)
    stage.attach("other", 2)
    spans = (Span(0, 0, ids(0, 1)),)
    ranks = tuple(TicketRank("x", f"tcp://made-up-{number}:1", 0, "x", "o", 0, SECRET) for number in range(100))
    stage.pull("bogus", ticket=Ticket(4, ranks, (spans,)).encode(), timeout=60.0)
    stage.request(Pull(1, "honest", make_ticket(), (Span(0, 0, ids(2, 3)),), 60.0), session=b"\2" * 16)
    stage.run(0.25)
    assert "tcp://peer:1" in [stage.dependencies.peer_port.links[link] for link, _ in stage.to_peers]


def test_what_cannot_be_connected_to_fails_the_pull_with_the_reason(monkeypatch):
    stage = Stage()
    stage.attach()
    full = Mock(side_effect=Unavailable(ErrorCode.OVERLOADED, "no socket for another peer"))
    monkeypatch.setattr(stage.dependencies.peer_port, "connect", full)
    stage.pull()
    [failed] = stage.notified
    assert (failed.code, "no socket for another peer" in failed.text) == (ErrorCode.PEER_LOST, True)


MORE = msgspec.structs.replace(welcome_of(("there", "more")), metadata=b"newer")


class SlowlySpelled(Spelled):
    """From here on the transport says that it has taken in a daemon's metadata when the test does."""

    def __init__(self):
        super().__init__()
        self.given = []
        self.dependencies.transport.add_peer = lambda _agent, metadata, _address: self.given.append(metadata)

    def refresh(self, name):
        """A pull by this address needs to know more of the daemon."""
        call(self.actors.handshake.need, f"tcp://{name}:1", worker="w", stale=True)
        self.run()

    def pull_more(self, name):
        self.pull(f"more {name}", (2,), ticket=make_ticket("more", address=f"tcp://{name}:1"), timeout=60.0)

    def added(self, metadata):
        self.transport_says(PeerAdded("peer#1", metadata))


def test_a_view_is_used_when_what_it_was_told_with_can_be_reached_and_not_for_another_links_sake():
    stage = SlowlySpelled()
    stage.refresh("there")
    stage.peer_says(welcome_of(), link=2)
    stage.pull_more("here")
    stage.peer_says(MORE, link=1)
    assert stage.given == [b"m", b"newer"]
    claims = len(stage.asks(Claim))
    stage.added(b"m")
    assert len(stage.asks(Claim)) == claims
    stage.added(b"newer")
    assert len(stage.asks(Claim)) == claims + 1


def test_a_link_whose_metadata_was_replaced_by_another_links_goes_on_with_that():
    stage = SlowlySpelled()
    stage.refresh("there")
    stage.peer_says(welcome_of(), link=2)
    stage.refresh("here")
    stage.peer_says(MORE, link=1)
    stage.added(b"newer")
    claims = len(stage.asks(Claim))
    stage.pull_more("there")
    assert len(stage.asks(Claim)) == claims + 1
    assert stage.given == [b"m", b"newer"]


def test_a_link_that_waits_for_its_turn_to_load_is_not_announced_by_what_another_has_loaded(monkeypatch):
    stage = SlowlySpelled()
    monkeypatch.setattr(stage.actors.handshake, "_slots", PrioritySlots(1))
    stage.pull_more("here")
    stage.run(0.15)
    stage.refresh("there")
    stage.peer_says(welcome_of(), link=2)
    stage.peer_says(MORE, link=1)
    assert stage.given == [b"m"]
    claims = len(stage.asks(Claim))
    stage.added(b"m")
    assert len(stage.asks(Claim)) == claims
    assert stage.given == [b"m", b"newer"]
    stage.added(b"newer")
    assert len(stage.asks(Claim)) == claims + 1


def test_what_the_transport_was_given_before_it_was_heard_to_lose_an_agent_is_taken_out_of_it():
    stage = SlowlySpelled()
    stage.refresh("here")
    stage.peer_says(MORE, link=1)
    stage.transport_says(PeerFailed("peer#1", "it hung up"))
    assert stage.commands.count(("remove_peer", "peer#1")) == 1
    stage.added(b"newer")  # said before it heard of that
    assert stage.context.metrics.peers.labels("greeting")._value.get() == 2


def test_what_a_link_gives_the_transport_as_another_is_lost_and_lets_it_load_is_taken_out_of_it(monkeypatch):
    stage = SlowlySpelled()
    monkeypatch.setattr(stage.actors.handshake, "_slots", PrioritySlots(1))
    stage.refresh("there")
    stage.run(0.15)
    stage.refresh("here")
    stage.peer_says(MORE, link=1)
    stage.peer_says(MORE, link=2)
    assert stage.given == [b"newer"]
    stage.transport_says(PeerFailed("peer#1", "it hung up"))
    assert stage.given == [b"newer", b"newer"]
    assert stage.commands[-1] == ("remove_peer", "peer#1")
    assert not stage.actors.handshake._given
