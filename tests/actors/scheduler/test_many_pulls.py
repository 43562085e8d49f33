"""Many pulls at one moment go on, or end, some at a time: everybody else's requests are served in between."""

import pytest

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode, InternalError
from kvd.net.interface import PeerAnswered, WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Broken, Claim, Grant
from kvd.protocol.worker import Cancel, Failed, Pull
from kvd.transport.interface import PeerFailed, ReadFailed
from tests.actors.batches import sizes_of
from tests.actors.stage import make_ticket, welcome_of

PULLS = 5
TWO_AT_A_TIME = [2, 2, 1]


@pytest.fixture
def stage(stage, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 2 * limits.BLOCKS_PER_PULL)
    return stage


def pull_all(stage):
    for number in range(PULLS):
        stage.pull(f"p{number}", blocks=(), timeout=60.0)


def read_all(stage):
    pull_all(stage)
    stage.peer_says(welcome_of())
    for number in range(1, PULLS + 1):
        stage.peer_says(Grant(number, 7, 1, 5))


def codes(stage):
    return [(item.request, item.code) for item in stage.notified if isinstance(item, Failed)]


def test_pulls_that_waited_for_one_producer_are_claimed_some_at_a_time(stage, monkeypatch):
    sizes = sizes_of(stage.actors.scheduler.unrouted._ready, monkeypatch)
    pull_all(stage)
    stage.peer_says(welcome_of())
    assert sizes == TWO_AT_A_TIME
    assert [claim.consumer for claim in stage.asks(Claim)] == [f"p{number}" for number in range(PULLS)]


def test_pulls_of_many_blocks_that_waited_for_one_producer_are_claimed_fewer_at_a_time(stage, monkeypatch):
    sizes = sizes_of(stage.actors.scheduler.unrouted._ready, monkeypatch)
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 2 * limits.BLOCKS_PER_PULL + 1)
    for number in range(3):
        stage.pull(f"p{number}", blocks=(number,))
    stage.peer_says(welcome_of())
    assert sizes == [1, 1, 1]


def test_pulls_that_waited_for_one_route_are_claimed_some_at_a_time(stage, monkeypatch):
    works = []
    stage.actors.scheduler._producers._background = lambda work, done: works.append((work, done))
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 0)
    pull_all(stage)
    stage.peer_says(welcome_of())
    sizes = sizes_of(stage.actors.scheduler.unrouted._ready, monkeypatch)
    [(work, done)] = works
    done(work())
    stage.run()
    assert sizes == TWO_AT_A_TIME
    assert len(stage.asks(Claim)) == PULLS


def test_a_pull_that_ends_before_its_turn_comes_is_not_claimed_and_one_that_leaves_says_so(stage, monkeypatch):
    ready = stage.actors.scheduler.unrouted._ready
    pull_all(stage)
    go_on, scheduler = ready._handle, stage.actors.scheduler

    def go_on_and_cancel(pulls):
        go_on(pulls)
        for number in (2, 3):
            if ("w", f"p{number}") in scheduler._pulls:
                scheduler.cancel("w", Cancel(9, f"p{number}"))

    monkeypatch.setattr(ready, "_handle", go_on_and_cancel)
    stage.peer_says(welcome_of())
    stage.run(0.1)
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p0", "p1", "p4"]
    assert [type(item).__name__ for item in stage.notified] == ["Cancelled"] * 2


def test_grants_of_a_pool_that_was_registered_anew_are_used_some_at_a_time(stage, monkeypatch):
    pull_all(stage)
    stage.peer_says(welcome_of())
    for number in range(1, PULLS + 1):
        stage.peer_says(Grant(number, 7, 2, 5))
    sizes = sizes_of(stage.actors.scheduler.unrouted._ready, monkeypatch)
    stage.peer_says(welcome_of(epoch=2))
    assert sizes == TWO_AT_A_TIME


def test_pulls_whose_new_route_fails_begin_no_read_before_their_turn_to_fail(stage, monkeypatch):
    works = []
    for number in range(PULLS):
        stage.pull(f"p{number}", blocks=(number,), offered=(0, 1), timeout=60.0)
    stage.peer_says(welcome_of())
    stage.actors.scheduler._producers._background = lambda work, done: works.append((work, done))
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 0)
    for number in range(1, PULLS + 1):
        stage.peer_says(Grant(number, 7, 2, 5))
    stage.peer_says(welcome_of(epoch=2))
    [(_, done)] = works
    done(InternalError(ErrorCode.INTERNAL, "no memory"))
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 1 << 30)  # another pull may have had it made
    stage.peer_says(Grant(PULLS, 7, 2, 5))  # said again
    assert stage.reads == []
    assert len(codes(stage)) == PULLS
    assert not any(item.quarantined for item in stage.notified)


def test_leases_that_break_together_end_their_pulls_some_at_a_time(stage, monkeypatch):
    read_all(stage)
    sizes = sizes_of(stage.actors.scheduler.transfers._refusals._failing, monkeypatch)
    stage.peer_says(Broken(tuple(range(1, PULLS + 1)), "lease_broken", "the offer has ended (expired)"))
    assert sizes == TWO_AT_A_TIME
    assert codes(stage) == [(f"p{number}", "lease_broken") for number in range(PULLS)]


def test_a_lease_that_is_said_to_be_broken_again_and_again_fails_its_pull_once(stage, monkeypatch):
    read_all(stage)
    sizes = sizes_of(stage.actors.scheduler.transfers._refusals._failing, monkeypatch)
    frame = codec.encode(Broken((1,) * 1000, "lease_broken", "the offer has ended (expired)"))
    for _ in range(100):
        stage.dependencies.peer_port.on_event(PeerAnswered(1, frame))
    stage.run()
    assert sizes == [1]
    assert codes(stage) == [("p0", "lease_broken")]


def test_the_loss_of_a_producer_ends_its_pulls_some_at_a_time(stage, monkeypatch):
    read_all(stage)
    sizes = sizes_of(stage.actors.scheduler.transfers._refusals._failing, monkeypatch)
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "silent")
    stage.run()
    assert sizes == TWO_AT_A_TIME
    assert codes(stage) == [(f"p{number}", "peer_lost") for number in range(PULLS)]


def test_pulls_of_a_producer_that_is_lost_before_it_is_met_end_some_at_a_time(stage, monkeypatch):
    sizes = sizes_of(stage.actors.scheduler.unrouted._failing, monkeypatch)
    pull_all(stage)
    for _ in range(2):  # it may be told again before all have had their turn
        call(stage.actors.scheduler.peer_down, "tcp://peer:1", "silent")
    assert codes(stage) == []
    stage.run()
    assert sizes == TWO_AT_A_TIME
    assert codes(stage) == [(f"p{number}", "peer_lost") for number in range(PULLS)]


def test_pulls_that_are_to_fail_do_so_though_their_producer_is_back_before_their_turn(stage):
    """Some wait for a pool that it did not have, and ask it no more for that."""
    for number in range(PULLS):
        stage.pull(f"p{number}", blocks=(), ticket=make_ticket("later"), timeout=60.0)
    stage.peer_says(welcome_of())
    for _ in range(3):
        stage.run(0.1)
        stage.peer_says(welcome_of())
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "silent")
    call(stage.actors.scheduler.unrouted.peer_up, stage.actors.handshake._peers.by_link[1].view())
    stage.run()
    assert codes(stage) == [(f"p{number}", "peer_lost") for number in range(PULLS)]


def test_pulls_wait_for_a_producer_that_has_restarted_however_many_they_are(stage):
    pull_all(stage)
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "it was restarted", restarted=True)
    stage.run()
    stage.peer_says(welcome_of())
    assert len(stage.asks(Claim)) == PULLS


def test_a_worker_that_may_meet_none_of_its_peers_has_its_pulls_end_some_at_a_time(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PEERS_PER_WORKER", 0)
    sizes = sizes_of(stage.actors.scheduler.unrouted._failing, monkeypatch)
    reasons = {f"tcp://{name}:1": "no" for name in ("peer", "b")}
    for number in range(PULLS):
        frame = codec.encode(Pull(number, f"p{number}", make_ticket(), (), 60.0))
        stage.actors.gateway.received(WorkerFrame(b"\1" * 16, frame, 1000))
    call(stage.actors.scheduler.unrouted.peers_refused, "w", reasons)
    stage.run()
    assert sizes == TWO_AT_A_TIME
    assert len(codes(stage)) == PULLS


def test_a_pool_that_is_given_back_ends_its_pulls_some_at_a_time(stage, monkeypatch):
    pull_all(stage)
    sizes = sizes_of(stage.actors.scheduler._ending, monkeypatch)
    call(stage.actors.pools.renew, "w")
    stage.run()
    assert sizes == TWO_AT_A_TIME
    assert codes(stage) == [(f"p{number}", "pool_busy") for number in range(PULLS)]


def test_the_reads_of_a_producer_that_is_lost_fail_with_it_before_their_turn_too(stage):
    for number in range(1, PULLS + 1):
        stage.pull(f"p{number}", blocks=(number,), call=number, offered=(0,), timeout=60.0)
    stage.peer_says(welcome_of())
    for number in range(1, PULLS + 1):
        stage.peer_says(Grant(number, 7, 1, 5))
    transport = stage.dependencies.transport
    transport.on_event(PeerFailed("peer#1", "it hung up"))
    for number in range(1, PULLS + 1):
        stage.loop.call_later(0.0, transport.on_event, ReadFailed(number, "we have no peer 'peer#1'"))
    stage.run()
    assert codes(stage) == [(f"p{number}", "peer_lost") for number in range(1, PULLS + 1)]
