"""Links are opened some at a time, however many addresses a ticket or a peer file names."""

from collections import Counter

import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.actors.handshake.peer_table import State
from kvd.actors.runtime.actor import call
from kvd.actors.scheduler.unrouted import UnroutedPulls
from kvd.errors import ErrorCode, refusal
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Grant, Hello, Ping, Pong
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Detach, Notifications, Pull
from tests.actors.stage import SECRET, Stage, ids, welcome_of

ADDRESSES = [f"tcp://made-up-{number}:1" for number in range(100)]
AT_ONCE = 16


@pytest.fixture
def stage():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    return stage


@pytest.fixture
def opened(stage):
    """How many links are opened in each turn of the loop."""
    turns, port = Counter(), stage.dependencies.peer_port
    connect = port.connect
    port.connect = lambda *arguments: (turns.update([stage.loop.callbacks]), connect(*arguments))[1]
    return turns


def ticket_of(addresses, blocks=1, pool="there", incarnation=0):
    ranks = tuple(TicketRank("peer", address, incarnation, pool, "o", 0, SECRET) for address in addresses)
    return Ticket(4, ranks, ((Span(0, 0, ids(*range(blocks))),),)).encode()


def test_a_ticket_of_many_unknown_addresses_has_them_connected_to_some_at_a_time(stage, opened):
    for number in range(3):
        stage.pull(f"p{number}", (), ticket=ticket_of(ADDRESSES), timeout=60.0)
    assert sorted(stage.dependencies.peer_port.links.values()) == sorted(ADDRESSES)
    assert max(opened.values()) == AT_ONCE


def test_so_does_a_long_peer_file(stage, opened):
    call(stage.actors.handshake.connector.expect, frozenset(ADDRESSES))
    stage.run()
    assert sorted(stage.dependencies.peer_port.links.values()) == sorted(ADDRESSES)
    assert max(opened.values()) == AT_ONCE


def test_an_address_that_cannot_be_connected_to_fails_its_pull_and_keeps_nobody_from_the_others(stage):
    stage.pull("bad", (), ticket=ticket_of([*ADDRESSES, "nonsense"]), timeout=60.0)
    [failed] = stage.notified
    assert (failed.request, failed.code) == ("bad", ErrorCode.PEER_LOST)
    assert "no address: nonsense" in failed.text
    assert len(stage.dependencies.peer_port.links) == len(ADDRESSES)


def test_what_a_worker_has_opened_without_end_is_bounded_and_another_waits_for_a_turn_alone(stage, monkeypatch):
    """It cancels its pulls at once, which leaves the addresses of their tickets to be connected to."""
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 200)
    connector, port = stage.actors.handshake.connector, stage.dependencies.peer_port
    for number in range(1000):
        call(connector.need, f"tcp://made-up-{number}:1", "w")
    call(connector.need, "tcp://peer:1", "other")
    most, connect = 0, port.connect

    def watched(*arguments):
        nonlocal most
        most = max([most, *map(len, connector._wanted.values())])
        return connect(*arguments)

    port.connect = watched
    stage.run()
    assert most <= 200
    assert len(port.links) == 200 + 1
    assert list(port.links.values()).index("tcp://peer:1") < 2 * AT_ONCE


def test_what_many_addresses_are_refused_is_told_together(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 1)
    told, refused = [], UnroutedPulls.peers_refused

    def watched(unrouted, worker, reasons):
        told.append(len(reasons))
        refused(unrouted, worker, reasons)

    monkeypatch.setattr(UnroutedPulls, "peers_refused", watched)
    for number in range(3):
        stage.pull(f"p{number}", (), ticket=ticket_of(ADDRESSES), timeout=60.0)
    assert [failed.request for failed in stage.notified] == ["p0", "p1", "p2"]
    assert told == [len(ADDRESSES) - 1] * 3


def test_a_worker_that_has_used_up_its_share_fails_its_own_pulls_alone(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 2)
    stage = Stage(heartbeat=1.0)
    stage.attach("greedy", 1)
    stage.attach("other", 2)
    wanted = ["tcp://made-up-0:1", "tcp://made-up-1:1", "tcp://peer:1"]
    for session, name, addresses in ((1, "mine", wanted), (2, "theirs", wanted[2:])):
        pull = Pull(1, name, ticket_of(addresses), (), 60.0)
        stage.actors.gateway.received(WorkerFrame(bytes([session]) * 16, codec.encode(pull), 1000))
    stage.run()
    told = [item for _, reply in stage.to_workers if isinstance(reply, Notifications) for item in reply.items]
    assert [(item.request, item.code) for item in told] == [("mine", ErrorCode.PEER_LOST)]
    assert "tcp://peer:1" in stage.dependencies.peer_port.links.values()


@pytest.mark.parametrize(
    ("bound", "users", "told"),
    [("MAX_PEERS_PER_STRANGER", (1000, 1000), "user 1000"), ("MAX_PEERS_OF_STRANGERS", (1000, 1001), "users but root")],
)
def test_strangers_leave_peers_to_others_however_many_workers_they_have(monkeypatch, bound, users, told):
    monkeypatch.setattr(limits, bound, 3)
    stage = Stage(heartbeat=1.0, rules=[Rule(pools=("*",), uid=uid) for uid in (0, 1000, 1001)])
    for number, uid in enumerate((*users, 0), 1):
        stage.attach(f"w{number}", number, uid=uid)
        pull = Pull(1, f"p{number}", ticket_of([f"tcp://w{number}-{each}:1" for each in range(2)]), (), 60.0)
        stage.actors.gateway.received(WorkerFrame(bytes([number]) * 16, codec.encode(pull), uid))
        stage.run()
    events = [item for _, reply in stage.to_workers if isinstance(reply, Notifications) for item in reply.items]
    assert [(item.request, item.code) for item in events] == [("p2", ErrorCode.PEER_LOST)]
    assert f"pulls of {told}" in events[0].text
    assert len(stage.dependencies.peer_port.links) == 3 + 2
    # What is forgotten makes room.
    call(stage.actors.handshake.forget, "tcp://w1-0:1", 0)
    call(stage.actors.handshake.connector.need, "tcp://w2-1:1", "w2")
    stage.run()
    assert "tcp://w2-1:1" in stage.dependencies.peer_port.links.values()


def test_a_peer_that_comes_to_be_expected_is_nobodys_share_any_more(monkeypatch):
    """It is not forgotten while it is expected."""
    monkeypatch.setattr(limits, "MAX_PEERS_PER_STRANGER", 1)
    stage = Stage(heartbeat=1.0)
    stage.attach()
    for name, address in (("first", ADDRESSES[0]), ("second", ADDRESSES[1])):
        stage.pull(name, (), ticket=ticket_of([address]), timeout=60.0)
        call(stage.actors.handshake.connector.expect, frozenset([ADDRESSES[0]]))
        stage.run()
    assert stage.notified == []
    assert list(stage.dependencies.peer_port.links.values()) == ADDRESSES[:2]


def test_the_share_of_a_workers_name_is_not_that_of_the_user_who_has_it_next(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 1)
    stage = Stage(heartbeat=1.0, rules=[Rule(pools=("*",), uid=uid) for uid in (1000, 1001)])
    for number, uid in enumerate((1000, 1001), 1):
        stage.attach("w", number, uid=uid)
        pull = Pull(1, "p", ticket_of([ADDRESSES[number]]), (), 60.0)
        stage.actors.gateway.received(WorkerFrame(bytes([number]) * 16, codec.encode(pull), uid))
        stage.run()
        stage.session(Detach(), connection=number)
    assert list(stage.dependencies.peer_port.links.values()) == ADDRESSES[1:3]


def test_a_defect_in_one_connecting_costs_no_other(stage, monkeypatch):
    port, failures = stage.dependencies.peer_port, [RuntimeError("no")]
    connect = port.connect

    def once_failing(*arguments):
        if failures:
            raise failures.pop()
        return connect(*arguments)

    port.connect = once_failing
    with pytest.raises(AssertionError):  # the stage tells of the defect
        stage.pull("p", (), ticket=ticket_of(ADDRESSES), timeout=60.0)
    stage.failures.clear()
    stage.run()
    assert len(port.links) == len(ADDRESSES) - 1


def test_what_was_refused_is_not_told_once_there_is_room_or_others_have_met_it(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 1)
    connector, links = stage.actors.handshake.connector, stage.dependencies.peer_port.links
    stage.pull("first", (), ticket=ticket_of(["tcp://one:1"]), timeout=60.0)
    for number in range(4):
        call(connector.need, f"tcp://v{number}:1", f"v{number}")  # the turns of others
    call(connector.need, "tcp://room:1", "w")
    call(connector.need, "tcp://v3:1", "w")
    call(stage.actors.handshake.forget, "tcp://one:1", 0)
    for name in ("room", "v3"):
        pull = Pull(1, name, ticket_of([f"tcp://{name}:1"]), (), 60.0)
        stage.actors.gateway.received(WorkerFrame(b"\1" * 16, codec.encode(pull), 1000))
    stage.run()
    assert [failed.request for failed in stage.notified] == []
    assert {"tcp://room:1", "tcp://v3:1"} <= set(links.values())


def test_what_a_worker_needs_is_met_though_its_last_turn_ended_by_a_defect(stage, monkeypatch):
    handshake = stage.actors.handshake
    put, broken = handshake.call, iter([True])

    def call_of(method, *arguments, **named):
        if method == handshake.connector._connect_to and next(broken, False):
            raise RuntimeError
        put(method, *arguments, **named)

    monkeypatch.setattr(handshake, "call", call_of)
    for address in ADDRESSES[:3]:
        call(handshake.connector.need, address, "w")
    stage.loop.run_until(stage.loop.now)
    assert len(stage.failures) == 1
    stage.failures.clear()
    call(handshake.connector.need, ADDRESSES[1], "w")
    stage.run()
    assert set(stage.dependencies.peer_port.links.values()) == set(ADDRESSES[1:3])


def test_an_expected_peer_that_cannot_be_met_yet_is_tried_again_and_told_of_seldom(stage, capsys):
    """Another user's dead socket may lie where it will listen."""
    port, connector = stage.dependencies.peer_port, stage.actors.handshake.connector
    refused, connect = ["another user's"], port.connect

    def connecting(address, worker):
        if refused and address == ADDRESSES[0]:
            raise refusal(ErrorCode.NOT_PERMITTED, refused[0])
        return connect(address, worker)

    port.connect = connecting
    call(connector.expect, frozenset(ADDRESSES[:2]))
    stage.run(12.0)
    assert set(port.links.values()) == {ADDRESSES[1]}
    refused[0] = "another's"
    stage.run(300.0)
    refused.clear()
    stage.run(6.0)
    assert ADDRESSES[0] in port.links.values()
    told = [line for line in capsys.readouterr().out.splitlines() if "expected peer cannot be met" in line]
    assert ["another user's" in line for line in told] == [True, False]


def test_one_that_is_not_expected_any_more_is_not_tried_again(stage):
    port, connector, tried = stage.dependencies.peer_port, stage.actors.handshake.connector, []

    def refusing(address, _worker):
        tried.append(address)
        raise refusal(ErrorCode.NOT_PERMITTED, "another user's")

    port.connect = refusing
    call(connector.expect, frozenset(ADDRESSES[:1]))
    stage.run(6.0)
    call(connector.expect, frozenset())
    stage.run(20.0)
    assert tried == 2 * ADDRESSES[:1]


class _Crowd:
    """Two workers, a thousand addresses at which nobody answers, and one at which somebody does."""

    dead, live = [f"tcp://dead-{number}:1" for number in range(1000)], "tcp://peer:1"

    def __init__(self):
        self.stage = Stage(heartbeat=1.0)
        self.stage.attach("greedy", 1)
        self.stage.attach("other", 2)

    def pull(self, session, name, addresses, blocks=(), **rank):
        spans = (Span(0, 0, ids(*blocks)),) if blocks else ()
        pull = Pull(1, name, ticket_of(addresses, max(1, len(blocks)), **rank), spans, 60.0)
        self.stage.actors.gateway.received(WorkerFrame(bytes([session]) * 16, codec.encode(pull), 1000))
        self.stage.run()

    @property
    def is_met(self):
        links = self.stage.dependencies.peer_port.links
        return any(isinstance(said, Hello) and links[to] == self.live for to, said in self.stage.to_peers)

    @property
    def failed(self):
        told = [reply for _, reply in self.stage.to_workers if isinstance(reply, Notifications)]
        return {item.request for reply in told for item in reply.items}


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_peer_that_others_need_as_well_is_greeted_in_their_turn(is_expected):
    crowd = _Crowd()
    if is_expected:
        call(crowd.stage.actors.handshake.connector.expect, frozenset([*crowd.dead, crowd.live]))
        crowd.stage.run()
    crowd.pull(1, "mine", crowd.dead if is_expected else [*crowd.dead, crowd.live])
    crowd.pull(2, "theirs", [crowd.live])
    crowd.stage.run(1.2)
    assert crowd.is_met


def test_a_peer_that_waits_for_its_first_hello_is_not_taken_for_a_silent_one():
    crowd = _Crowd()
    crowd.pull(1, "dead", crowd.dead)
    crowd.pull(1, "live", [crowd.live])
    for _ in range(100):
        crowd.stage.run(0.1)
        if crowd.is_met:
            break
        assert "live" not in crowd.failed
    assert crowd.is_met
    assert "dead" in crowd.failed


def test_a_peer_that_waits_to_say_its_pools_again_is_not_lost_and_others_read_on():
    """Behind the dead ones of the worker that wants a pool of it that is not there yet."""
    crowd = _Crowd()
    stage = crowd.stage
    crowd.pull(2, "theirs", [crowd.live], (2, 3))
    stage.peer_says(welcome_of(), 1)
    (claim,) = [said for _, said in stage.to_peers if isinstance(said, Claim)]
    stage.peer_says(Grant(claim.claim, 7, 1, 5), 1)
    crowd.pull(1, "dead", crowd.dead)
    crowd.pull(1, "stale", [crowd.live], pool="later", incarnation=99)
    assert stage.actors.handshake._peers.by_link[1].state is State.REFRESHING
    for _ in range(60):
        before = len(stage.to_peers)
        stage.run(0.1)
        for link, said in stage.to_peers[before:]:
            if link == 1 and isinstance(said, Ping):
                stage.peer_says(Pong(said.number, 5), 1)
            if link == 1 and isinstance(said, Hello):
                stage.peer_says(welcome_of(), 1)
    assert "dead" in crowd.failed
    assert "theirs" not in crowd.failed
    assert stage.actors.handshake._peers.by_link[1].loss == ""


def test_a_peer_is_not_greeted_for_workers_that_have_left():
    """It says that it lives, and never who it is."""
    stage = Stage(heartbeat=1.0)
    for number in range(1, 6):
        stage.attach(f"w{number}", number)
        pull = Pull(1, "p", ticket_of([_Crowd.live]), (), 60.0)
        stage.actors.gateway.received(WorkerFrame(bytes([number]) * 16, codec.encode(pull), 1000))
        stage.peer_says(Pong(0, 5), 1)
        stage.session(Detach(), number)
    assert not stage.actors.handshake._peers.by_link[1].wanted_by


def test_what_a_worker_wanted_whose_pool_is_gone_is_not_connected_to():
    crowd = _Crowd()
    pull = Pull(1, "dead", ticket_of(crowd.dead), (), 60.0)
    crowd.stage.actors.gateway.received(WorkerFrame(b"\1" * 16, codec.encode(pull), 1000))
    crowd.stage.session(Detach(), 1)
    crowd.stage.run(10.0)
    assert len(crowd.stage.dependencies.peer_port.links) <= AT_ONCE


def test_a_worker_that_connects_again_keeps_the_turns_of_its_pulls():
    crowd = _Crowd()
    for number in range(2):
        crowd.pull(1, f"dead{number}", [f"tcp://dead-{number}-{each}:1" for each in range(500)])
    crowd.pull(2, "theirs", [crowd.live])
    crowd.stage.hang_up(2)
    crowd.stage.attach("other", 3)
    crowd.stage.run(1.2)
    assert crowd.is_met


def test_a_peer_that_became_ready_late_is_taken_for_silent_while_it_waits_to_say_its_pools_again():
    """It stood still, was lost, and answered then to the hellos that lay in its socket."""
    crowd = _Crowd()
    stage = crowd.stage
    crowd.pull(2, "first", [crowd.live], (2, 3))
    stage.peer_says(welcome_of(), 1)
    lost = stage.context.metrics.peers_lost._value
    for losses in (1, 2):
        while lost.get() < losses:
            stage.run(0.05)
    stage.peer_says(welcome_of(), 1)
    crowd.pull(2, "reader", [crowd.live], (4, 5))
    claim = stage.asks(Claim)[-1]
    stage.peer_says(Grant(claim.claim, 7, 1, 5), 1)
    for number in range(2):
        crowd.pull(1, f"dead{number}", [f"tcp://dead-{number}-{each}:1" for each in range(1000)])
    crowd.pull(1, "stale", [crowd.live], pool="later", incarnation=99)
    assert stage.actors.handshake._peers.by_link[1].state is State.REFRESHING
    stage.run(5.0)
    assert "reader" in crowd.failed


def test_a_pull_that_waits_for_a_peer_to_say_its_pools_again_is_told_nothing_old_meanwhile():
    crowd = _Crowd()
    stage = crowd.stage
    crowd.pull(2, "first", [crowd.live], (2, 3))
    stage.peer_says(welcome_of(), 1)
    crowd.pull(1, "dead", crowd.dead)
    crowd.pull(2, "stale", [crowd.live], (4, 5), pool="later", incarnation=3)
    for number in range(4):
        call(stage.actors.handshake.need, crowd.live, worker=f"another{number}")
        stage.run()
    assert "stale" not in crowd.failed
    assert "other" in stage.actors.handshake._peers.by_link[1].wanted_by
