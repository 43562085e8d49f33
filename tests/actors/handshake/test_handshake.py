from itertools import pairwise

import msgspec
import pytest

from kvd import limits
from kvd.actors.handshake.peer import Peer
from kvd.actors.handshake.peer_table import State
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import Claim, Grant, Held, Hello, Ping, Pong, PoolInfo, Refuse, Welcome
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import VERSION, Span
from kvd.protocol.worker import Done
from kvd.transport.interface import PeerAdded, PeerFailed
from tests.actors.stage import INCARNATION, SECRET, Stage, ids, make_ticket, welcome_of


@pytest.fixture
def stage():
    stage = Stage(heartbeat=1.0, peer_idle=10.0)
    stage.attach()
    return stage


# --- peers that connect to us


def test_hello_is_answered_with_who_we_are_and_our_pools(stage):
    [welcome] = stage.asked_by_peer(Hello("peer", 3))
    assert isinstance(welcome, Welcome)
    assert (welcome.daemon, welcome.incarnation, welcome.agent) == ("d", INCARNATION, "d#1")
    assert [info.pool for info in welcome.pools] == ["w"]


def test_another_version_is_refused(stage):
    [refuse] = stage.asked_by_peer(Hello("peer", 3, VERSION + 1))
    assert (type(refuse), refuse.claim, refuse.code) == (Refuse, 0, ErrorCode.BAD_VERSION)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91\xa5claim", b"\x92\xa4ping\xff", b"\xff" * 50])
def test_garbage_is_refused(stage, frame):
    [refuse] = stage.asked_by_peer(frame)
    assert (type(refuse), refuse.claim, refuse.code) == (Refuse, 0, ErrorCode.BAD_MESSAGE)


def test_ping_is_answered(stage):
    assert stage.asked_by_peer(Ping(4)) == [Pong(4, INCARNATION)]


# --- peers that we connect to


def test_a_peer_is_greeted_every_heartbeat_until_it_answers(stage):
    stage.pull(timeout=60.0)
    assert len(stage.asks(Hello)) == 1
    stage.run(2.5)
    assert len(stage.asks(Hello)) == 3
    stage.peer_says(welcome_of())
    stage.run(1.0)
    assert len(stage.asks(Hello)) == 3
    assert len(stage.asks(Ping)) == 1


def test_a_peer_that_lives_and_is_not_ready_yet_is_waited_for(stage):
    stage.pull(timeout=60.0)
    for _ in range(10):
        stage.peer_says(Pong(0, 9))
        stage.run(1.0)
    assert stage.notified == []
    stage.peer_says(welcome_of())
    assert len(stage.asks(Claim)) == 1


def test_a_peer_of_another_version_is_lost(stage):
    stage.pull()
    stage.peer_says(welcome_of(version=VERSION + 1))
    assert stage.notified[0].code == ErrorCode.PEER_LOST


def test_garbage_of_a_peer_is_dropped(stage):
    stage.pull()
    stage.peer_says(b"garbage")
    stage.peer_says(welcome_of())
    assert len(stage.asks(Claim)) == 1


def test_a_peer_that_is_silent_for_three_heartbeats_is_lost(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.run(3.0)
    assert stage.notified == []
    stage.run(1.1)
    [failed] = stage.notified
    assert failed.code == ErrorCode.PEER_LOST
    assert ("remove_peer", "peer#1") in stage.commands


def test_a_pull_that_comes_while_its_peer_is_lost_waits_three_heartbeats_too(stage):
    stage.pull("early", timeout=60.0)
    stage.run(6.6)
    assert [failed.request for failed in stage.notified] == ["early"]
    stage.pull("late", timeout=60.0)
    stage.run(2.9)
    assert len(stage.notified) == 1
    stage.run(1.5)
    assert [failed.request for failed in stage.notified] == ["early", "late"]


def test_a_pull_that_comes_while_the_read_of_another_drains_waits_three_heartbeats_too(stage):
    """The claim of a read that has not ended is renewed all the time, which does not mean that somebody waits."""
    stage.pull("early", timeout=60.0)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    stage.run(6.6)
    assert [failed.request for failed in stage.notified] == ["early"]
    stage.pull("late", blocks=(4, 5), timeout=60.0)
    stage.run(2.9)
    assert len(stage.notified) == 1
    stage.run(1.5)
    assert [failed.request for failed in stage.notified] == ["early", "late"]


def test_a_peer_that_answers_is_not_lost(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    for _ in range(6):
        stage.pongs(5)
    assert stage.notified == []


@pytest.mark.parametrize("seconds", [4.0, 60.0])
def test_a_peer_is_not_lost_because_this_daemon_stood_still(stage, seconds):
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    for _ in range(3):
        stage.pongs(5)
        stage.stand_still(seconds)
        stage.pongs(5)  # it had answered, and lay in the socket
    assert stage.notified == []
    assert ("remove_peer", "peer#1") not in stage.commands


def test_a_peer_that_dies_while_this_daemon_stands_still_is_lost_three_heartbeats_later(stage):
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    stage.stand_still(60.0)
    stage.run(2.9)
    assert stage.notified == []
    stage.run(1.2)
    assert [failed.code for failed in stage.notified] == [ErrorCode.PEER_LOST]


def test_a_load_is_not_given_up_for_a_hello_whose_answer_came_while_this_daemon_stood_still(stage):
    stage.dependencies.transport.add_peer = lambda *_: None
    stage.pull(timeout=600.0)
    handshake = stage.actors.handshake
    stage.loop.stand_still(40.0)
    handshake.call(handshake._unanswered, 1)  # the hello's deadline has passed, and its call waits
    call(handshake.replied, 1, welcome_of())
    handshake.call(handshake._unanswered, 1)
    stage.run()
    assert handshake._peers.by_link[1].state is State.LOADING
    assert stage.notified == []


def test_a_peer_that_restarted_is_greeted_again(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.pongs(6)
    assert stage.notified[0].code == ErrorCode.PEER_LOST
    assert len(stage.asks(Hello)) == 2
    before = len(stage.asks(Claim))
    stage.pull("q", blocks=(4, 5), timeout=60.0)
    stage.peer_says(welcome_of(incarnation=6))
    assert len(stage.asks(Claim)) == before + 1


def test_only_the_answer_to_the_last_ping_tells_of_a_restart_and_it_does_so_once(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.peer_says(Pong(0, 6))
    stage.peer_says(Pong(1, 6))
    stage.pongs(5)
    last = stage.asks(Ping)[-1].number
    for number in (last, last - 1, last + 1):
        stage.peer_says(Pong(number, 6))
    assert stage.notified == []
    stage.pongs(6)
    for incarnation in range(7, 20):
        stage.peer_says(welcome_of(incarnation=incarnation - 1))
        stage.peer_says(Pong(last + 1, incarnation))
    assert len(stage.asks(Hello)) == 2


def test_a_peer_that_the_transport_cannot_have_is_greeted_after_a_growing_while_and_pulls_hear_why_at_once():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    stage.dependencies.transport.add_peer = lambda *_: None
    stage.pull("first", timeout=600.0)
    moments = []
    while len(moments) < 8 and stage.loop.now < 200.0:
        if len(stage.asks(Hello)) > len(moments):
            moments.append(stage.loop.now)
            stage.peer_says(welcome_of())
            stage.transport_says(PeerFailed("peer#1", "bad metadata"))
        stage.run(0.5)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert all(least <= pause <= least + 1.6 for pause, least in zip(pauses, (1, 2, 4, 8, 16, 32, 32), strict=True))
    stage.pull("second", blocks=(4, 5), timeout=600.0)
    assert [failed.request for failed in stage.notified] == ["first", "second"]
    assert all("bad metadata" in failed.text for failed in stage.notified)


def test_a_pull_waits_for_a_peer_that_is_greeted_within_a_heartbeat_though_the_transport_failed_repeatedly(stage):
    add_peer, stage.dependencies.transport.add_peer = stage.dependencies.transport.add_peer, lambda *_: None
    stage.pull("first", timeout=60.0)
    for seconds in (0.0, 2.5):
        stage.run(seconds)
        stage.peer_says(welcome_of())
        stage.transport_says(PeerFailed("peer#1", "nobody serves there"))
    stage.dependencies.transport.add_peer = add_peer
    stage.run(0.9)  # it is greeted two heartbeats after the second failure
    stage.pull("second", blocks=(4, 5), timeout=60.0)
    assert [failed.request for failed in stage.notified] == ["first", "second"]
    stage.run(0.2)
    stage.pull("third", blocks=(4, 5), timeout=60.0)
    stage.run(2.0)
    stage.peer_says(welcome_of())
    assert len(stage.notified) == 2
    assert len(stage.asks(Claim)) == 1


def restarted_transport(starts=1):
    """What a daemon says whose transport's process is another one."""
    return msgspec.structs.replace(welcome_of(), metadata=b"anew", starts=starts)


def unreached(stage):
    """What is said of the peer, and for how many seconds; and the gauge."""
    found = stage.context.metrics.registry.get_sample_value("kvd_peers_unreached")
    return (*stage.notes.get("peer tcp://peer:1", (None, 0.0)), found)


def test_a_peer_that_answers_messages_and_is_not_reached_for_reading_is_named_until_it_is():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    stage.transport_says(PeerFailed("peer#1", "connection timed out"))
    assert unreached(stage) == (None, 0.0, 0.0)  # it may be dead
    add_peer, stage.dependencies.transport.add_peer = stage.dependencies.transport.add_peer, lambda *_: None
    stage.peer_says(restarted_transport())
    for _ in range(5):
        stage.pongs(5)
    stage.transport_says(PeerFailed("peer#1", "no answer"))
    text, seconds, gauge = unreached(stage)
    assert "peer at tcp://peer:1 answers messages, and its memory is not reached" in text
    assert "no answer" in text
    assert "unprotected_transport" in text
    assert (seconds, gauge) == (5.0, 1.0)
    stage.dependencies.transport.add_peer = add_peer
    stage.run(3.0)
    stage.peer_says(welcome_of())
    assert unreached(stage) == (None, 0.0, 0.0)


def test_a_peer_that_says_that_its_transport_does_not_come_back_is_named_until_it_is_reached_or_silent():
    stage = Stage(heartbeat=1.0)
    stage.attach()
    refuse = Refuse(0, ErrorCode.TRANSPORT, "the transport of p to other hosts ended 31 s ago")
    for ends in (lambda: (stage.run(1.0), stage.peer_says(welcome_of())), lambda: stage.run(8.0)):
        stage.pull(timeout=600.0)
        stage.peer_says(refuse)
        stage.run(2.0)
        stage.peer_says(refuse)
        text, seconds, gauge = unreached(stage)
        assert "answers messages, and its memory is not reached (it refused the handshake: the transport of p" in text
        assert (seconds, gauge) == (2.0, 1.0)
        assert stage.actors.handshake.report()[0].unreached_seconds == 2.0
        ends()
        assert unreached(stage) == (None, 0.0, 0.0)
        stage.transport_says(PeerFailed("peer#1", "connection reset"))


def test_a_peer_that_refuses_the_handshake_for_another_reason_is_not_said_to_be_out_of_reach(stage):
    stage.pull(timeout=600.0)
    stage.peer_says(Refuse(0, ErrorCode.BAD_VERSION, "it speaks another version"))
    assert unreached(stage) == (None, 0.0, 0.0)
    assert stage.actors.handshake.report()[0].unreached_seconds is None


def test_a_peer_that_does_not_answer_messages_either_is_not_said_to_be_out_of_reach_of_reads_alone(stage):
    stage.dependencies.transport.add_peer = lambda *_: None
    stage.pull(timeout=600.0)
    for _ in range(2):
        stage.peer_says(welcome_of())
        stage.transport_says(PeerFailed("peer#1", "no answer"))
        stage.run(3.0)
    assert unreached(stage)[0] is not None
    stage.run(8.0)
    assert unreached(stage) == (None, 0.0, 0.0)


def test_a_peer_that_the_transport_lost_is_greeted_at_once_but_not_twice_within_a_heartbeat(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    assert len(stage.asks(Hello)) == 2
    stage.peer_says(restarted_transport())
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    assert len(stage.asks(Hello)) == 2
    stage.run(2.5)
    assert len(stage.asks(Hello)) == 3
    stage.peer_says(welcome_of())
    stage.pongs(5)
    stage.pongs(5)
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    assert len(stage.asks(Hello)) == 4


@pytest.mark.parametrize("metadata", [b"m", b"of other pools"])
def test_a_welcome_that_tells_of_a_transport_that_was_just_lost_is_not_believed_for_a_heartbeat(stage, metadata):
    """Its daemon has not heard yet that the process is dead: a pull would be lost to it, and the next ones for long."""
    stage.pull("torn", timeout=60.0)
    stage.peer_says(welcome_of())
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    stage.pull("next", blocks=(4, 5), timeout=60.0)
    stage.peer_says(msgspec.structs.replace(welcome_of(), metadata=metadata))
    assert stage.actors.handshake.report()[0].state == "greeting"
    stage.run(1.5)
    stage.peer_says(restarted_transport())
    assert stage.actors.handshake.report()[0].state == "ready"
    assert [failed.request for failed in stage.notified] == ["torn"]


def test_a_peer_whose_connection_was_lost_alone_is_believed_after_a_heartbeat(stage):
    stage.pull(timeout=60.0)
    stage.peer_says(welcome_of())
    stage.transport_says(PeerFailed("peer#1", "connection reset"))
    stage.run(2.1)
    stage.peer_says(welcome_of())
    assert stage.actors.handshake.report()[0].state == "ready"


def test_hellos_of_one_peer_have_a_pace_and_those_beyond_are_not_answered(stage):
    flood = [
        answer for _ in range(limits.MAX_PEERS + 500) for answer in stage.asked_by_peer(Hello("loud", 1), b"loud#1#x")
    ]
    assert len(flood) == limits.MAX_PEERS
    assert stage.asked_by_peer(Hello("loud", 1), b"loud#2#y") == []
    assert len(stage.asked_by_peer(Hello("loud", 1), b"calm#1#z")) == 1
    stage.run(1.0)
    assert len(stage.asked_by_peer(Hello("loud", 1), b"loud#1#x")) == 1


def test_an_idle_peer_is_forgotten(stage):
    stage.pull(timeout=1.0)
    for _ in range(13):
        stage.peer_says(welcome_of())
        stage.run(1.0)
    assert ("disconnect", 1) in stage.commands
    assert not stage.actors.handshake._peers.by_address
    assert not stage.actors.scheduler._producers.ready


def test_the_next_pull_from_a_peer_that_was_forgotten_meets_it_again(stage):
    stage.pull(timeout=1.0)
    for _ in range(13):
        stage.peer_says(welcome_of())
        stage.run(1.0)
    assert not stage.actors.handshake._peers.by_address
    stage.pull(name="again", call=3)
    stage.peer_says(welcome_of(), link=2)
    stage.peer_says(Grant(2, 7, 1, 5), link=2)
    stage.landed(2)
    stage.peer_says(Held(2), link=2)
    assert stage.notified[-1] == Done("again")


def test_an_idle_peer_is_kept_for_a_pull_that_waits_for_another(stage):
    spans = (Span(0, 0, ids(0, 1)),)
    ranks = tuple(TicketRank("peer", f"tcp://{name}:1", 0, "there", "o", 0, SECRET) for name in ("a", "b"))
    stage.pull(ticket=Ticket(4, ranks, (spans,)).encode(), timeout=60.0)
    for _ in range(15):
        stage.peer_says(welcome_of(), link=1)
        stage.peer_says(b"\xc1", link=2)
        stage.actors.handshake._peers.by_link[2].missed = 0  # b's connection is up, it does not say welcome
        stage.run(1.0)
    assert stage.notified == []
    assert ("disconnect", 1) not in stage.commands


def test_a_spec_that_is_none_makes_a_peer_lost(stage):
    stage.pull()
    info = PoolInfo("there", 1, bytes(8), 100, b"\x80")
    stage.peer_says(Welcome("peer", 5, "peer#1", b"m", (info,)))
    [failed] = stage.notified
    assert failed.code == ErrorCode.PEER_LOST
    assert "described itself wrongly" in failed.text


def test_stamps_where_no_memory_can_be_make_a_peer_lost(stage):
    stage.pull()
    stage.peer_says(msgspec.structs.replace(welcome_of(), stamps=b"\xff" * 8))
    [failed] = stage.notified
    assert failed.code == ErrorCode.PEER_LOST
    assert "0x100000000000fffff, where no memory can be" in failed.text


def test_too_many_peers_are_refused(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS", 1)
    stage.pull()
    stage.pull("q", blocks=(4, 5), ticket=make_ticket(address="tcp://other:1"))
    assert stage.notified[0].request == "q"
    assert stage.notified[0].code == ErrorCode.PEER_LOST


def test_a_status_tells_of_so_many_peers_at_most_and_first_of_those_in_trouble():
    stage = Stage()
    last = limits.MAX_REPORTED_PEERS + 1
    for number in range(1, last + 1):
        call(stage.actors.handshake.need, f"tcp://peer-{number}:1", worker="w")
        stage.run()
        if number < last:
            stage.peer_says(welcome_of(), number)
    report = stage.actors.handshake.report()
    assert len(report) == limits.MAX_REPORTED_PEERS
    assert report[0].address == f"tcp://peer-{last}:1"


def test_peers_that_nobody_waits_for_are_greeted_one_after_the_other_within_a_heartbeat():
    stage = Stage()
    call(stage.actors.handshake.connector.expect, frozenset(f"tcp://peer-{number}:1" for number in range(100)))
    most = 0
    for _ in range(100):
        before = len(stage.asks(Hello))
        stage.run(0.01)
        most = max(most, len(stage.asks(Hello)) - before)
    assert len(stage.asks(Hello)) >= 100
    assert most <= 4


class _Handshakes:
    """So many peers that pulls wait for; the transport adds an agent when it is told to."""

    def __init__(self, peers: int) -> None:
        self.stage = Stage(heartbeat=1.0)
        self.adding: list[str] = []
        self.stage.dependencies.transport.add_peer = lambda agent, *_: self.adding.append(agent)
        for number in range(1, peers + 1):
            call(self.stage.actors.handshake.need, f"tcp://peer-{number}:1", worker="w")
        self.stage.run()

    @property
    def greeted(self) -> list[int]:
        return [link for link, message in self.stage.to_peers if isinstance(message, Hello)]

    def welcomed(self, link: int) -> None:
        welcome = welcome_of()
        self.stage.peer_says(Welcome(welcome.daemon, 5, f"peer#{link}", b"m", welcome.pools), link)

    def added(self) -> None:
        self.stage.transport_says(PeerAdded(self.adding.pop(0), b"m"))


def test_so_many_handshakes_are_under_way_at_a_time_and_each_that_ends_lets_the_next_begin(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 4)
    crowd = _Handshakes(10)
    assert crowd.greeted == [1, 2, 3, 4]
    for link in crowd.greeted:
        crowd.welcomed(link)
    assert (len(crowd.adding), len(crowd.greeted)) == (4, 4)
    while crowd.adding:
        crowd.added()
        assert len(crowd.adding) <= 4
        for link in crowd.greeted[4:]:
            crowd.welcomed(link)
    assert sorted(crowd.greeted) == list(range(1, 11))
    assert crowd.stage.context.metrics.peers.labels("ready")._value.get() == 10


def test_peers_that_do_not_answer_keep_the_others_waiting_for_a_tenth_of_a_heartbeat(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 2)
    crowd = _Handshakes(6)
    assert crowd.greeted == [1, 2]
    crowd.stage.run(0.11)
    assert crowd.greeted[2:] == [3, 4]
    crowd.welcomed(1)
    assert crowd.adding == []
    crowd.stage.run(0.2)
    assert crowd.greeted[4:6] == [5, 6]
    assert crowd.adding == ["peer#1"]


def test_a_peer_that_a_pull_waits_for_is_greeted_before_those_that_are_expected(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 1)
    crowd = _Handshakes(1)
    crowd.welcomed(1)
    call(crowd.stage.actors.handshake.connector.expect, frozenset(f"tcp://expected-{number}:1" for number in range(3)))
    crowd.stage.run(1.0)
    call(crowd.stage.actors.handshake.need, "tcp://expected-2:1", worker="w")
    crowd.added()
    assert crowd.greeted == [1, 4]


def test_a_handshake_that_fails_lets_the_next_begin(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 1)
    crowd = _Handshakes(3)
    crowd.welcomed(1)
    crowd.stage.transport_says(PeerFailed("peer#1", "no route"))
    assert crowd.greeted == [1, 2]
    crowd.stage.peer_says(Refuse(0, ErrorCode.BAD_VERSION, "speaks 9"), 2)
    assert crowd.greeted == [1, 2, 3]


def test_a_peer_is_met_at_once_while_many_of_another_key_wait_for_their_metadata_to_be_tried(stage):
    added = []
    stage.dependencies.transport.add_peer = lambda agent, *_: added.append(agent)
    key, links = "ab" * 32, stage.dependencies.peer_port.links
    hostile = tuple(TicketRank("peer", f"tcp://h{n}:1#{key}", 0, "there", "o", 0, SECRET) for n in range(48))
    stage.pull("h", (), ticket=Ticket(4, hostile, ((Span(0, 0, ids(0)),),)).encode(), timeout=60.0)
    for link in list(links):
        stage.peer_says(msgspec.structs.replace(welcome_of(), agent=f"peer#{link}"), link)
    assert len(added) == limits.MAX_HANDSHAKES_PER_KEY
    stage.pull("r", (0,), ticket=make_ticket(address=f"tcp://honest:1#{'cd' * 32}"), timeout=60.0)
    (honest,) = [link for link, address in links.items() if "honest" in address]
    stage.peer_says(msgspec.structs.replace(welcome_of(), agent="peer#honest"), honest)
    assert added[-1] == "peer#honest"


def test_a_peer_that_is_ready_again_is_kept_though_it_was_idle_before(stage):
    stage.pull(timeout=0.5)
    stage.peer_says(welcome_of())
    stage.pongs(5)
    handshake = stage.actors.handshake
    handshake._peers.by_link[1].needed = -10.0
    handshake.call(handshake._beat, 1)  # it has been idle for long
    handshake.call(handshake._announce, handshake._peers.by_link[1])  # and is made ready by what lay in the socket
    stage.run()
    assert "tcp://peer:1" in stage.actors.scheduler._producers.ready
    assert "tcp://peer:1" in handshake._peers.by_address
    stage.pull(name="again", timeout=5.0, call=3)
    assert stage.to_peers[-1] == (1, stage.asks(Claim)[-1])
    stage.run(2.0)
    assert "tcp://peer:1" in handshake._peers.by_address  # a pull needs it


def test_what_the_scheduler_knows_of_a_peer_ends_with_it(stage):
    stage.pull(timeout=0.5)
    stage.peer_says(welcome_of())
    for _ in range(12):
        stage.pongs(5) if "tcp://peer:1" in stage.actors.handshake._peers.by_address else stage.run(1.0)
    assert "tcp://peer:1" not in stage.actors.handshake._peers.by_address
    assert "tcp://peer:1" not in stage.actors.scheduler._producers.ready


def test_a_peer_whose_transport_was_started_again_is_asked_for_its_new_keys_and_not_again_and_again(stage):
    given = []
    add_peer = stage.dependencies.transport.add_peer
    stage.dependencies.transport.add_peer = lambda agent, metadata, address: (
        given.append(metadata),
        add_peer(agent, metadata, address),
    )
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    for starts in range(1, 9):
        stage.pongs(5, starts=starts)
        if len(stage.asks(Hello)) == 2:
            stage.peer_says(restarted_transport(starts))
    assert given == [b"m", b"anew"]
    assert len(stage.asks(Hello)) == 2
    assert [failed.code for failed in stage.notified] == ["peer_lost"], "what was under way is lost, as after any loss"


def test_other_keys_of_a_transport_that_is_not_used_within_the_host_change_nothing(stage):
    stage.same_host = True
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    for starts in range(1, 4):
        stage.pongs(5, starts=starts)
    assert len(stage.asks(Hello)) == 1
    assert stage.notified == []


@pytest.mark.parametrize("loading", [False, True], ids=["taken", "being-taken"])
def test_new_keys_that_one_link_to_a_daemon_has_are_not_news_by_another_whatever_its_welcome_said(stage, loading):
    for link, address in enumerate(("tcp://peer:1", "tcp://PEER:1"), 1):
        stage.pull(f"p{link}", (link,), ticket=make_ticket(address=address, blocks=(0,)), timeout=600.0)
        stage.peer_says(welcome_of(), link)
    if loading:
        stage.dependencies.transport.add_peer = lambda *_: None
    stage.pull("late", (4,), ticket=make_ticket(pool="new", blocks=(0,)), timeout=600.0)
    anew = msgspec.structs.replace(restarted_transport(), starts=2, pools=welcome_of(("there", "new")).pools)
    stage.peer_says(anew)
    for starts in (2, 1):  # the second was under way on the other link for longer
        stage.pongs(5, link=2, starts=starts)
    assert stage.notified == []
    stage.pongs(5, link=2, starts=3)
    assert {failed.request for failed in stage.notified} == {"p1", "p2", "late"}


def refreshed(stage, answer):
    """How often a peer is greeted that answers at once, beyond the first hello of each link; in at most 30 answers."""
    for number in range(30):
        greeted = [link for link, message in stage.to_peers if isinstance(message, Hello)]
        if number == len(greeted):
            break
        stage.peer_says(answer(number), greeted[number])
    return len(greeted) - len(set(greeted))


def test_a_daemon_that_tells_two_links_ever_different_things_is_not_asked_as_fast_as_it_answers(stage):
    for link, address in enumerate(("tcp://peer:1", "tcp://PEER:1"), 1):
        stage.pull(f"p{link}", (link,), ticket=make_ticket(address=address, blocks=(0,)), timeout=600.0)
    assert refreshed(stage, lambda starts: msgspec.structs.replace(welcome_of(), starts=starts)) == 8  # four each


def test_a_peer_that_grants_a_pool_of_which_no_welcome_tells_is_not_asked_as_fast_as_it_answers(stage):
    stage.pull(timeout=600.0)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 99, 5))
    assert refreshed(stage, lambda _: welcome_of()) == 4
    stage.run(1.0)
    assert len(stage.asks(Hello)) == 6
    stage.peer_says(welcome_of(epoch=99))
    assert ("read", 1) in stage.commands


def test_other_keys_count_once_in_32_heartbeats():
    peer = Peer("tcp://peer:1", 1, silent_from=0.0, state=State.READY, welcome=welcome_of())
    peer.reached = PeerAdded("peer#1", b"m")
    told = [peer.answered(Pong(peer.ping().number, 5, 1 + second), float(second), 1.0) for second in range(70)]
    assert [second for second, event in enumerate(told) if event is not None] == [0, 32, 64]
