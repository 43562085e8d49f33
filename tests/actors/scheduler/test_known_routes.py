"""Routes are worked out once; those that take long leave the loop, and everybody else's pulls go on."""

from collections import deque
from types import SimpleNamespace

import msgspec
import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.actors.runtime.actor import call
from kvd.actors.runtime.pools import PeerPool, Pool
from kvd.actors.scheduler import producers
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.routes import is_long
from kvd.errors import BadRequest, ErrorCode, InternalError, KvdError
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Grant, Held, Hello, PoolInfo, Settle
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Failed, Pull
from tests.actors.stage import SECRET, Stage, ids, make_ticket, welcome_of
from tests.simulator.virtual.cache import make_cache

SHORT = 1 << 20


@pytest.fixture
def stage(monkeypatch):
    """A stage on which all routes are long; `works` has those that the thread was given."""
    return routing(Stage(), monkeypatch)


def routing(stage, monkeypatch):
    stage.works = deque()
    producers_of(stage)._background = lambda work, done: stage.works.append((work, done))
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 0)
    stage.attach()
    return stage


def producers_of(stage):
    return stage.actors.scheduler._producers


def is_idle(stage):
    return not stage.works and not producers_of(stage)._waiting and producers_of(stage)._making is None


def make_route(stage):
    """The thread works out the route that it was given; returns the name of the pool that it leads to."""
    work, done = stage.works.popleft()
    try:
        result = work()
    except KvdError as error:
        result = error
    done(result)
    stage.run()
    return work.args[0].name


def pull_of(stage, worker, name, blocks=(2, 3)):
    spans = (Span(0, 0, ids(*blocks)),)
    assert stage.request(Pull(2, name, make_ticket(), spans, 30.0), bytes([worker]) * 16) == []


def test_a_pull_waits_for_a_long_route_while_those_of_others_go_on(stage, monkeypatch):
    stage.attach("v", connection=2)
    pull_of(stage, 1, "long")
    stage.peer_says(welcome_of())
    assert len(stage.works) == 1
    pull_of(stage, 1, "too", blocks=(4, 5))
    assert len(stage.works) == 1
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_ROUTED_AT_ONCE", SHORT)
        pull_of(stage, 2, "short")
    assert [claim.consumer for claim in stage.asks(Claim)] == ["short"]
    make_route(stage)
    assert [claim.consumer for claim in stage.asks(Claim)] == ["short", "long", "too"]
    pull_of(stage, 1, "again", blocks=(6, 7))
    assert stage.asks(Claim)[-1].consumer == "again"
    assert is_idle(stage)


@pytest.mark.parametrize("at_once", [0, SHORT], ids=["long", "short"])
def test_what_does_not_fit_is_found_out_once(stage, monkeypatch, at_once):
    asked = []

    def make(*_):
        asked.append(1)
        raise BadRequest(ErrorCode.INCOMPATIBLE, "head sizes differ")

    monkeypatch.setattr(producers, "make_route", make)
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", at_once)
    for number in range(1, 4):
        pull_of(stage, 1, f"p{number}")
        stage.peer_says(welcome_of())  # a layout that does not fit is asked for again
        while stage.works:
            make_route(stage)
        assert [(item.code, item.text) for item in stage.notified] == [("incompatible", "head sizes differ")] * number
    assert len(asked) == 1
    assert is_idle(stage)


def test_a_failure_of_the_thread_fails_those_that_wait_and_later_pulls_try_again(stage, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(producers, "make_route", fail)
        pull_of(stage, 1, "p1")
        pull_of(stage, 1, "p2", blocks=(4, 5))
        stage.peer_says(welcome_of())
        make_route(stage)
    assert [(item.request, item.code) for item in stage.notified] == [("p1", "internal"), ("p2", "internal")]
    assert is_idle(stage)
    pull_of(stage, 1, "p3")
    make_route(stage)
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p3"]


def fail(*_):
    raise InternalError(ErrorCode.INTERNAL, "internal MemoryError; see the daemon's log")


def test_users_take_turns_however_many_routes_they_wait_for(monkeypatch):
    users = {1000: "a1 a2 a3", 1001: "b1", 1002: "c1"}
    stage = routing(Stage(rules=[Rule(("*",), uid=uid) for uid in users]), monkeypatch)
    of_worker = {name: uid for uid, names in users.items() for name in names.split()}
    for number, (name, uid) in enumerate(of_worker.items(), 2):
        stage.attach(name, connection=number, uid=uid)
        request = Pull(2, "p", make_ticket(), (Span(0, 0, ids(2, 3)),), 30.0)
        stage.actors.gateway.received(WorkerFrame(bytes([number]) * 16, codec.encode(request), uid))
        stage.run()
    stage.peer_says(welcome_of())
    begun = []
    while stage.works:
        assert len(stage.works) == 1
        begun.append(make_route(stage))
    assert begun == ["a1", "a2", "b1", "c1", "a3"]
    assert len(stage.asks(Claim)) == 5
    assert is_idle(stage)


def test_a_user_waits_for_so_many_routes(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTES_WAITING", 1)
    for number in (2, 3):
        stage.attach(f"w{number}", connection=number)
    for number in (1, 2, 3):
        pull_of(stage, number, f"p{number}")
    stage.peer_says(welcome_of())
    [refused] = stage.notified
    assert (refused.request, refused.code) == ("p3", "overloaded")
    while stage.works:
        make_route(stage)
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p1", "p2"]


def test_routes_that_are_dropped_together_are_told_together(stage, monkeypatch):
    """Each time all pulls are looked at."""
    for number in (2, 3, 4):
        stage.attach(f"w{number}", connection=number)
    for number in (1, 2, 3, 4):
        pull_of(stage, number, f"p{number}")
    stage.peer_says(welcome_of())
    told, made = [], producers_of(stage)._made
    monkeypatch.setattr(
        producers_of(stage), "_made", lambda numbers, failure: told.append(numbers) or made(numbers, failure)
    )
    call(stage.actors.scheduler.peer_down, "tcp://peer:1", "silent")
    stage.run()
    assert [len(numbers) for numbers in told] == [3]


def test_a_pull_that_is_cancelled_meanwhile_tells_its_producer_once_the_route_is_known(stage):
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    stage.request(Cancel(5, "p"))
    assert stage.notified == [Cancelled("p", quarantined=False)]
    make_route(stage)
    stage.run(0.1)
    assert len(stage.asks(Settle)) == 1
    assert stage.asks(Claim) == []


def test_a_pull_whose_time_is_over_meanwhile_fails_once_and_the_route_is_kept_for_others(stage):
    stage.pull(timeout=1.0)
    stage.peer_says(welcome_of())
    stage.run(1.0)
    [failed] = stage.notified
    assert (type(failed), failed.code) == (Failed, "deadline")
    make_route(stage)
    assert producers_of(stage).routes == 1
    assert stage.asks(Claim) == []


def test_a_pull_whose_producer_is_lost_meanwhile_fails_and_nothing_of_the_route_is_kept(stage):
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    stage.run(5.0)
    [failed] = stage.notified
    assert (type(failed), failed.code) == (Failed, "peer_lost")
    make_route(stage)
    assert producers_of(stage).routes == 0
    assert is_idle(stage)


def test_what_waits_behind_a_route_is_not_made_once_its_producer_is_lost(stage):
    stage.attach("v", connection=2)
    for worker in (1, 2):
        pull_of(stage, worker, f"p{worker}")
    stage.peer_says(welcome_of())
    stage.run(5.0)
    assert len(stage.notified) == 2
    make_route(stage)
    assert is_idle(stage)


def test_what_waits_behind_a_route_is_not_made_once_its_pulls_have_ended(stage):
    for number, timeout in enumerate((1.0, 1.0, 30.0)):
        ticket = make_ticket(pool=f"pool{number}")
        assert stage.request(Pull(2, f"p{number}", ticket, (Span(0, 0, ids(number)),), timeout)) == []
    stage.peer_says(welcome_of(pools=("pool0", "pool1", "pool2")))
    stage.run(1.0)
    assert len(stage.notified) == 2
    make_route(stage)
    assert len(stage.works) == 1
    make_route(stage)
    assert [claim.consumer for claim in stage.asks(Claim)] == ["p2"]
    assert is_idle(stage)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_producer_that_restarts_without_the_pool_while_the_route_is_worked_out_is_waited_for(stage, cancelled):
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    if cancelled:
        stage.request(Cancel(5, "p"))
    stage.pongs(6)
    for _ in range(4):
        stage.peer_says(welcome_of(pools=("earlier",), incarnation=6))
    hellos = len(stage.asks(Hello))
    make_route(stage)
    stage.run(0.6)
    assert len(stage.asks(Hello)) == hellos + 1, "it looks again once, as one that has waited for no route"
    stage.peer_says(welcome_of(incarnation=6))
    make_route(stage)
    stage.run(0.1)
    assert len(stage.asks(Settle if cancelled else Claim)) == 1
    assert is_idle(stage)


def test_a_grant_of_a_pool_that_was_registered_anew_waits_for_the_route_from_that(stage):
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    make_route(stage)
    stage.peer_says(Grant(1, 7, 2, 5))
    stage.peer_says(welcome_of(epoch=2))
    assert stage.reads == []
    make_route(stage)
    assert len(stage.reads) == 1
    assert is_idle(stage)


def test_a_route_that_waits_is_asked_for_again_if_another_producer_of_the_pull_is_lost_meanwhile(stage, monkeypatch):
    """That one has done its part, so the pull does not fail with it."""
    halves = [make_cache("flash-hnd", rank, 2, num_blocks=8, block_tokens=2, groups=1) for rank in range(2)]

    def welcome(name, *, epoch=1):
        half = halves["ab".index(name)]
        pool = PoolInfo("there", epoch, bytes(8), half.spec.pool_bytes, half.raw)
        return msgspec.structs.replace(welcome_of(), daemon=name, agent=f"{name}#1", pools=(pool,))

    ranks = tuple(TicketRank(name, f"tcp://{name}:1", 0, "there", "o", 0, SECRET) for name in "ab")
    ticket = Ticket(4, ranks, ((Span(0, 0, ids(0, 1)),),)).encode()
    stage.request(Pull(2, "p", ticket, (Span(0, 0, ids(2, 3)),), 600.0))
    for link, name in enumerate("ab", 1):
        stage.peer_says(welcome(name), link)
    make_route(stage)
    claims = {to: message.claim for to, message in stage.to_peers if isinstance(message, Claim)}
    stage.peer_says(Grant(claims[2], 7, 1, 5), 2)
    stage.landed(stage.reads[-1].read)
    stage.peer_says(Held(claims[2]), 2)
    pull_of(stage, 1, "q", (4, 5))  # its route is made first
    stage.peer_says(welcome_of(), 3)
    stage.peer_says(Grant(claims[1], 7, 2, 5), 1)
    stage.peer_says(welcome("a", epoch=2), 1)
    assert len(producers_of(stage)._waiting) == 1
    call(stage.actors.scheduler.peer_down, "tcp://b:1", "silent")
    stage.run()
    make_route(stage)
    make_route(stage)
    assert [read.agent for read in stage.reads] == ["b#1", "a#1"]


def test_a_route_to_large_blocks_of_our_own_is_long_too(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 400)
    small, large = (make_cache("flash-hnd", 0, 1, num_blocks=8, block_tokens=size, groups=1) for size in (2, 64))
    assert not is_long([small, small])
    assert is_long([small, large])
    asked = []
    monkeypatch.setattr(producers, "is_long", lambda pools: bool(asked.extend(pools)))
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    assert [type(pool) for pool in asked] == [PeerPool, Pool]


def test_a_route_to_an_engine_of_many_ranks_is_long_too(monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTED_AT_ONCE", 400)
    alone, one_of_many = (
        make_cache("flash-hnd", 0, ranks, num_blocks=8, block_tokens=2, groups=1) for ranks in (1, 512)
    )
    assert not is_long([alone, alone])
    assert is_long([alone, one_of_many])


def test_a_block_may_take_so_many_descriptors_of_all_ranks(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTE_DESCRIPTORS", 0)
    pull_of(stage, 1, "p")
    stage.peer_says(welcome_of())
    make_route(stage)
    [failed] = stage.notified
    assert failed.code == "incompatible"
    assert failed.text.startswith("1 of 1 ranks: one block would take ")


@pytest.fixture
def made(monkeypatch):
    """The ranks of each route that was worked out."""
    made = []

    def make(_pool, ranks, _views):
        made.append(ranks)
        planners = [
            SimpleNamespace(of_a_block=2048 if rank == "many" else 1, units=2048 if rank == "large" else 2)
            for rank in ranks
        ]
        return tuple(SimpleNamespace(planner=planner) for planner in planners)

    monkeypatch.setattr(producers, "route_key", lambda _pool, ranks, _views: (1, ranks))
    monkeypatch.setattr(producers, "make_route", make)
    monkeypatch.setattr(producers, "is_long", lambda _pools: False)
    return made


def of_ranks(*ranks):
    return SimpleNamespace(pool=SimpleNamespace(uid=0), ticket=SimpleNamespace(ranks=ranks), views={}, routing=0)


def test_routes_have_a_bound_by_their_ranks_and_those_used_last_stay(made, monkeypatch):
    monkeypatch.setattr(limits, "MAX_ROUTED_RANKS", 4)
    known = Producers(None, None, None, None)
    for ranks in (("a",), ("b",), ("c", "d"), ("a",)):
        assert len(known.find(of_ranks(*ranks))) == len(ranks)
    assert made == [("a",), ("b",), ("c", "d")]
    known.find(of_ranks("e"))
    assert known.routes == 3
    known.find(of_ranks("a"))
    assert len(made) == 4
    known.find(of_ranks("b"))
    assert made[-1] == ("b",)
    for number in range(100):
        known.find(of_ranks(number, "x", "y"))
    assert known.routes == 1
    known.find(of_ranks(*range(9)))
    assert known.routes == 1


@pytest.mark.parametrize("rank", ["many", "large"])
def test_ranks_whose_blocks_take_many_descriptors_or_units_count_as_several(made, monkeypatch, rank):
    monkeypatch.setattr(limits, "MAX_ROUTED_RANKS", 4)
    known = Producers(None, None, None, None)
    known.find(of_ranks("a"))
    known.find(of_ranks(rank))
    assert known.routes == 2
    known.find(of_ranks("b"))
    assert known.routes == 2
