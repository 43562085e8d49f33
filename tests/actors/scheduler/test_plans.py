"""Large plans leave the loop: everybody else's pulls go on, and what changes meanwhile is noticed."""

from collections import deque

import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.actors.runtime.actor import call
from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import WorkerFrame
from kvd.plan import Planner, route
from kvd.protocol import codec
from kvd.protocol.peer import Broken, Claim, Fence, Grant, Held, Release, Renew
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Cancelled, Done, Failed, Pull
from kvd.transport.interface import Landed
from tests.actors.scheduler.pulling import outcome
from tests.actors.scheduler.test_same_host_reads import known_ticket, read_once
from tests.actors.stage import CACHE, Stage, ids, make_ticket, welcome_of

BIG = (2, 3, 4, 5)
BIG_TICKET = make_ticket(blocks=BIG)


@pytest.fixture
def stage(monkeypatch):
    """A stage on which plans of more than two blocks are large; `works` has those that threads were given."""
    stage = planning(Stage(claim_ttl=3.0, retry=0.5), monkeypatch)
    stage.attach()
    return stage


def planning(stage, monkeypatch):
    stage.works, stage.planned = deque(), deque()
    make = plans(stage)._make

    def make_noted(transfer, name):
        stage.planned.append(transfer.pull.key)
        make(transfer, name)

    monkeypatch.setattr(plans(stage), "_make", make_noted)
    plans(stage)._background = lambda work, done: stage.works.append((work, done))
    planner = Planner(CACHE.spec, CACHE.spec, route([CACHE.spec], CACHE.spec).shares[0])
    monkeypatch.setattr(limits, "MAX_PLANNED_AT_ONCE", planner.most(2))
    return stage


def in_parts(monkeypatch):
    """Of what `planning` prepares, plans are cut into parts of one block."""
    monkeypatch.setattr(limits, "PLANNED_PART", limits.MAX_PLANNED_AT_ONCE // 2)


def pull_big(stage, name="p", session=b"\1" * 16, blocks=BIG):
    assert stage.request(Pull(2, name, BIG_TICKET, (Span(0, 0, ids(*blocks)),), 5.0), session) == []


def make_plan(stage):
    """A thread makes the plan that was begun first."""
    work, done = stage.works.popleft()
    stage.planned.popleft()
    try:
        result = work()
    except BadRequest as error:
        result = error
    done(result)
    stage.run()


def plans(stage):
    return stage.actors.scheduler.transfers._plans


def is_idle(stage):
    return not stage.works and not plans(stage)._queued and not plans(stage)._running


def test_a_read_begins_once_its_plan_is_made_and_its_claim_is_renewed_until_then(stage):
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert stage.reads == []
    for _ in range(3):
        stage.pongs(5)
    assert len(stage.asks(Claim)) == 1
    assert len(stage.asks(Renew)) >= 2
    make_plan(stage)
    [read] = stage.reads
    assert read.descriptors.count > 0
    stage.landed(1)
    assert stage.asks(Fence) == [Fence(1, 7)]
    stage.peer_says(Held(1))
    assert outcome(stage) == Done("p")
    assert is_idle(stage)


def test_a_small_read_between_layouts_of_many_strides_is_planned_on_a_thread_too(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_STRIDES_AT_ONCE", 0)
    pull_big(stage, blocks=BIG[:1])
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert stage.reads == []
    make_plan(stage)
    assert len(stage.reads) == 1
    assert is_idle(stage)


def test_a_plan_that_is_made_before_the_grant_is_used_with_it(stage):
    pull_big(stage)
    stage.peer_says(welcome_of())
    make_plan(stage)
    assert stage.reads == []
    stage.peer_says(Grant(1, 7, 1, 5))
    assert len(stage.reads) == 1
    assert stage.works == deque()


def test_a_small_pull_of_another_worker_is_done_while_a_large_plan_is_made(stage):
    stage.attach("v", connection=2)
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    assert len(stage.works) == 1
    assert stage.request(Pull(2, "q", make_ticket(), (Span(0, 0, ids(2, 3)),), 5.0), b"\2" * 16) == []
    stage.peer_says(Grant(2, 7, 1, 5))
    stage.landed(2)
    stage.peer_says(Held(2))
    assert outcome(stage) == Done("q")
    assert len(stage.works) == 1
    make_plan(stage)
    assert [read.read for read in stage.reads] == [2, 1]


def test_a_worker_has_one_thread_at_a_time_and_workers_take_turns(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PLANS", 2)
    for number, name in enumerate(("v", "u"), 2):
        stage.attach(name, connection=number)
    stage.pull("first", blocks=())
    stage.peer_says(welcome_of())
    for session, name in ((1, "w1"), (1, "w2"), (2, "v1"), (2, "v2"), (3, "u1")):
        spans = (Span(0, 0, ids(*BIG) if name[1] == "1" else ids(0, 1, 6)),)
        assert stage.request(Pull(2, name, BIG_TICKET, spans, 5.0), bytes([session]) * 16) == []
    begun = []
    while stage.works:
        assert len(stage.planned) == len({worker for worker, _ in stage.planned}) <= 2
        begun += [name for _, name in stage.planned if name not in begun]
        make_plan(stage)
    assert begun == ["w1", "v1", "w2", "v2", "u1"]
    assert is_idle(stage)


def test_users_take_turns_however_many_workers_they_have(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PLANS", 2)
    users = {1000: "a1 a2 a3 a4", 1001: "b1 b2 b3 b4", 1002: "c1"}
    stage = planning(Stage(rules=[Rule(("*",), uid=uid) for uid in users]), monkeypatch)
    of_worker = {name: uid for uid, names in users.items() for name in names.split()}
    for number, (name, uid) in enumerate(of_worker.items(), 1):
        stage.attach(name, connection=number, uid=uid)
    stage.pull("first", blocks=())
    stage.peer_says(welcome_of())
    for number, (name, uid) in enumerate(of_worker.items(), 1):
        request = Pull(2, name, BIG_TICKET, (Span(0, 0, ids(*BIG)),), 5.0)
        stage.actors.gateway.received(WorkerFrame(bytes([number]) * 16, codec.encode(request), uid))
        stage.run()
    made = []
    while stage.works:
        made.append(stage.planned[0][0])
        make_plan(stage)
    assert sorted(made) == sorted(of_worker)
    assert made.index("c1") <= 4
    assert is_idle(stage)


@pytest.mark.parametrize("blocks", [(0, 1), (4, 5, 6, 7)], ids=["small", "large"])
@pytest.mark.parametrize("end", ["landed", "cancelled", "failed"])
def test_what_is_planned_of_a_users_reads_is_bounded_and_others_of_its_are_planned_as_they_end(
    monkeypatch, blocks, end
):
    stage = planning(Stage(rules=[Rule(("*",), uid=uid) for uid in (1000, 1001)]), monkeypatch)
    for number, uid in enumerate((1000, 1000, 1001), 1):
        stage.attach(f"w{number}", connection=number, uid=uid)
    stage.pull("first", blocks=())
    stage.peer_says(welcome_of())
    monkeypatch.setattr(limits, "MAX_PLANNED", 1)
    pull_big(stage, "p", blocks=(2, 3, 4))
    make_plan(stage)
    stage.peer_says(Grant(2, 7, 1, 5))
    assert [read.read for read in stage.reads] == [2]
    pull_big(stage, "q", b"\2" * 16, blocks=blocks)
    stage.peer_says(Grant(3, 7, 1, 5))
    assert stage.works == deque()
    request = Pull(2, "of another user", BIG_TICKET, (Span(0, 0, ids(2, 3, 4)),), 5.0)
    stage.actors.gateway.received(WorkerFrame(b"\3" * 16, codec.encode(request), 1001))
    stage.run()
    make_plan(stage)
    stage.peer_says(Grant(4, 7, 1, 5))
    assert [read.read for read in stage.reads] == [2, 4]
    if end == "landed":
        stage.landed(2)
    elif end == "failed":
        stage.read_failed(2)
    else:
        stage.request(Cancel(9, "p"))
        assert stage.works == deque()
        stage.landed(2)
    make_plan(stage)
    assert [read.read for read in stage.reads] == [2, 4, 3]
    for number in (3, 4):
        stage.landed(number)
    assert not plans(stage)._planned_of
    assert is_idle(stage)


def test_a_small_plan_that_waited_for_room_is_made_with_its_grant_and_by_no_thread_after_it(stage, monkeypatch):
    stage.pull("first", blocks=())
    stage.peer_says(welcome_of())
    room = limits.MAX_PLANNED
    monkeypatch.setattr(limits, "MAX_PLANNED", 1)
    pull_big(stage, "p", blocks=(2, 3, 4))
    make_plan(stage)
    stage.peer_says(Grant(2, 7, 1, 5))
    pull_big(stage, "q", blocks=(5, 6, 7))
    pull_big(stage, "r", blocks=(0, 1))
    stage.landed(2)  # q is planned now, and r waits behind it, as both are of one worker
    monkeypatch.setattr(limits, "MAX_PLANNED", room)
    stage.peer_says(Grant(4, 7, 1, 5))
    assert [read.read for read in stage.reads] == [2, 4]
    make_plan(stage)
    assert is_idle(stage)


def test_a_pull_that_is_cancelled_while_it_is_planned_ends_at_once_and_its_plan_is_dropped(stage):
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    stage.request(Cancel(9, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=False)
    assert stage.asks(Release) == [Release(1, finished=True)]
    make_plan(stage)
    assert stage.reads == []
    assert is_idle(stage)


def test_a_plan_that_waits_for_its_turn_is_not_made_once_its_pull_has_ended(stage):
    pull_big(stage, "p", blocks=(2, 3, 4))
    pull_big(stage, "q", blocks=(5, 6, 7))
    stage.peer_says(welcome_of())
    assert len(stage.works) == 1
    stage.request(Cancel(9, "q"))
    assert plans(stage)._queued == {}
    make_plan(stage)
    assert is_idle(stage)


@pytest.mark.parametrize("granted", [False, True])
def test_a_lease_that_ends_while_its_read_is_planned_fails_the_pull(stage, granted):
    pull_big(stage)
    stage.peer_says(welcome_of())
    if granted:
        stage.peer_says(Grant(1, 7, 1, 5))
    stage.peer_says(Broken((1,), "lease_broken", "gone"))
    assert outcome(stage) == Failed("p", "lease_broken", "gone", quarantined=False)
    make_plan(stage)
    assert stage.reads == []
    assert is_idle(stage)


def test_a_pool_that_ends_does_not_wait_for_the_plan_of_a_pull_into_it(stage):
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    pool = stage.actors.scheduler._pulls["w", "p"].pool
    call(stage.actors.scheduler.quiesce, pool, "it ends", force=True)
    stage.run()
    assert outcome(stage).code == ErrorCode.POOL_BUSY
    assert stage.actors.scheduler._targets.is_quiet(pool.id)
    make_plan(stage)
    assert stage.reads == []


def test_what_cannot_be_planned_fails_its_pull(stage):
    spans = (Span(0, 0, ids(2, 3, 4, 5)),)
    stage.request(Pull(2, "p", make_ticket(blocks=(0, 1, 99, 2)), spans, 5.0))
    stage.peer_says(welcome_of())
    assert stage.notified == []
    make_plan(stage)
    assert outcome(stage).code == ErrorCode.BAD_BLOCKS


def test_a_grant_of_another_epoch_is_read_by_a_plan_of_its_own(stage):
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 2, 5))  # the pool was registered anew
    stage.peer_says(welcome_of(epoch=2))
    make_plan(stage)
    assert stage.reads == []
    make_plan(stage)
    assert len(stage.reads) == 1
    assert is_idle(stage)


def test_a_large_read_of_a_lease_that_the_ticket_names_is_claimed_while_it_is_planned(stage):
    read_once(stage)
    whole = known_ticket(blocks=BIG)
    stage.request(Pull(2, "q", whole, (Span(0, 0, ids(4, 5, 6, 7)),), 5.0))
    assert [claim.claim for claim in stage.asks(Claim)] == [1, 2]
    stage.peer_says(Grant(2, 9, 1, 5))
    assert len(stage.reads) == 1
    make_plan(stage)
    assert [read.expected for read in stage.reads] == [0, 0]


def test_a_large_read_begins_when_the_first_part_of_its_plan_is_made(stage, monkeypatch):
    pull_big(stage, "whole")
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    make_plan(stage)
    whole = stage.reads.pop().descriptors.copies
    stage.landed(1)
    stage.peer_says(Held(1))
    in_parts(monkeypatch)
    pull_big(stage)
    stage.peer_says(Grant(2, 7, 1, 5))
    made = []
    for part in range(len(BIG)):
        assert [len(stage.reads), len(stage.works)] == [part, 1]
        make_plan(stage)
        made += stage.reads[part].descriptors.copies
        assert stage.asks(Fence) == [Fence(1, 7)]
        stage.landed(2)
    assert bytes_of(made) == bytes_of(whole)
    assert stage.asks(Fence) == [Fence(1, 7), Fence(2, 7)]
    stage.peer_says(Held(2))
    assert stage.notified == [Done("whole"), Done("p")]
    assert is_idle(stage)


def bytes_of(copies):
    return sorted((src + at, dst + at) for src, dst, length in copies for at in range(length))


def test_one_part_is_planned_ahead_of_the_one_that_is_read(stage, monkeypatch):
    in_parts(monkeypatch)
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    make_plan(stage)
    make_plan(stage)
    assert [len(stage.reads), len(stage.works)] == [1, 0]
    stage.landed(1)
    assert [len(stage.reads), len(stage.works)] == [2, 1]
    make_plan(stage)
    stage.landed(1)
    assert [len(stage.reads), len(stage.works)] == [3, 1]
    assert len({tuple(read.descriptors.copies) for read in stage.reads}) == 3


def test_only_the_read_of_the_last_part_looks_for_the_stamp(stage, monkeypatch):
    read_once(stage)
    in_parts(monkeypatch)
    stage.request(Pull(2, "q", known_ticket(blocks=BIG), (Span(0, 0, ids(4, 5, 6, 7)),), 5.0))
    stage.peer_says(Grant(2, 9, 1, 5))
    first = len(stage.reads)
    for _ in BIG:
        make_plan(stage)
        found = stage.actors.scheduler.transfers._open[2].stamp
        stage.transport_says(Landed(2, 0.01, stamp=found))
    assert [bool(read.stamp) for read in stage.reads[first:]] == [False, False, False, True]
    assert stage.notified[-1] == Done("q")


def test_the_large_plans_of_two_workers_take_turns_part_by_part(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PLANS", 1)
    in_parts(monkeypatch)
    stage.attach("v", connection=2)
    pull_big(stage)
    pull_big(stage, "q", b"\2" * 16)
    stage.peer_says(welcome_of())
    for number in (1, 2):
        stage.peer_says(Grant(number, 7, 1, 5))
    made = []
    while stage.works:
        made.append(stage.planned[0][1])
        make_plan(stage)
        if made[-1] == "p":
            stage.landed(1)
    assert made[:4] == ["p", "q", "p", "q"]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pull_that_is_cancelled_between_two_parts_reads_no_more_of_them(stage, monkeypatch, ahead):
    in_parts(monkeypatch)
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    make_plan(stage)
    if ahead:
        make_plan(stage)
    stage.request(Cancel(9, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=True)
    while stage.works:
        make_plan(stage)
    stage.landed(1)
    assert len(stage.reads) == 1
    assert stage.asks(Release) == [Release(1, finished=True)]
    assert not plans(stage)._planned_of
    assert is_idle(stage)


def test_a_pull_that_is_cancelled_while_a_later_part_is_planned_ends_at_once(stage, monkeypatch):
    in_parts(monkeypatch)
    pull_big(stage)
    stage.peer_says(welcome_of())
    stage.peer_says(Grant(1, 7, 1, 5))
    make_plan(stage)
    stage.landed(1)
    stage.request(Cancel(9, "p"))
    assert outcome(stage) == Cancelled("p", quarantined=False)
    make_plan(stage)
    assert len(stage.reads) == 1
    assert not plans(stage)._planned_of
    assert is_idle(stage)
