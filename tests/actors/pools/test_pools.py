import pytest

from kvd.actors.pools.requests import DetachPool
from kvd.actors.runtime.actor import call
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.net.interface import SessionClosed, SessionOpened, WorkerFrame
from kvd.protocol import codec
from kvd.protocol.peer import Broken, Release
from kvd.protocol.types import Span
from kvd.protocol.worker import Attach, Attached, Cancel, Detach, Detached, Notifications, Offer, Released
from kvd.transport.interface import RegisterFailed
from tests.actors.scheduler.pulling import start_reading
from tests.actors.stage import CACHE, SECRET, Memory, Stage, ids, make_claim
from tests.simulator.virtual.cache import make_cache

OTHER = make_cache("flash-hnd", 0, 1, num_blocks=4, block_tokens=2, groups=1)


@pytest.fixture
def stage():
    return Stage(attach_wait=1.0, pool_linger=5.0)


def test_a_pool_is_lent_once_at_a_time(stage):
    stage.attach()
    refused = stage.attach(connection=2, instance=b"j" * 16)
    assert refused.code == ErrorCode.POOL_BUSY
    assert "lent" in refused.text


def test_a_worker_that_comes_back_gets_its_pool_at_once_with_its_bytes(stage):
    stage.attach()
    stage.offer()
    stage.hang_up()
    attached = stage.attach(connection=2)
    assert isinstance(attached, Attached)
    assert attached.kept
    assert attached.session == b"\2" * 16


def test_a_successor_waits_until_the_offers_of_its_predecessor_have_ended(stage):
    stage.attach()
    stage.offer(ttl=30.0)
    stage.asked_by_peer(make_claim())
    stage.hang_up()
    before = len(stage.on_sessions)
    stage.attach(connection=2, instance=b"j" * 16)
    assert len(stage.on_sessions) == before
    stage.asked_by_peer(Release(1, finished=False))
    assert isinstance(stage.on_sessions[-1], Attached)
    assert stage.on_sessions[-1].kept


def test_a_successor_waits_for_a_claim_only_so_long(stage):
    stage.attach()
    stage.offer(ttl=30.0)
    stage.asked_by_peer(make_claim(ttl=3600.0))
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16)
    stage.run(1.1)
    assert isinstance(stage.on_sessions[-1], Attached)
    assert isinstance(stage.answers[-1][1], Broken)


def test_a_worker_that_comes_back_with_another_spec_gets_another_pool(stage):
    stage.attach()
    stage.hang_up()
    stage.memory = Memory(OTHER.spec.pool_bytes)
    attached = stage.attach(connection=2, raw=OTHER.raw)
    assert attached.pool_bytes == OTHER.spec.pool_bytes
    assert not attached.kept
    assert ("deregister", 1) in stage.commands


def test_another_user_does_not_get_the_pool(stage):
    stage.attach()
    stage.hang_up()
    stage.actors.gateway.received(SessionOpened(2, 1, 2000, 2000))
    assert stage.session(Attach("w", b"j" * 16, CACHE.raw), 2).code == ErrorCode.NOT_PERMITTED


def test_a_pool_that_nobody_comes_back_for_is_given_up(stage):
    stage.attach()
    stage.hang_up()
    stage.process_ends()
    memory = stage.memory
    stage.run(4.9)
    assert not memory.closed
    stage.run(0.2)
    assert memory.closed


def test_the_pool_of_a_process_that_lives_is_kept_until_some_time_after_its_end(stage):
    """Its session is lost, and it does not poll: it idles. Its bytes are its own, whoever else waits for memory."""
    stage.attach()
    stage.hang_up()
    stage.run(60.0)
    assert not stage.memory.closed
    stage.process_ends()
    stage.run(4.9)
    assert not stage.memory.closed
    stage.run(0.3)
    assert stage.memory.closed


def test_a_process_that_nobody_can_watch_counts_as_ended_with_its_session_where_pools_are_given_up(stage):
    stage.attach(pid=0, watched=False)
    stage.hang_up()
    stage.run(5.2)
    assert stage.memory.closed


def test_a_detached_pool_is_gone(stage):
    stage.attach()
    assert isinstance(stage.session(Detach()), Detached)
    assert stage.memory.closed


def test_memory_is_given_back_beside_the_loop_once_the_transport_has_let_go_and_detached_is_said_after_it(stage):
    works = []
    stage.actors.pools.memory._background = lambda work, done: works.append((work, done))
    stage.connect()
    stage.session(Attach("w", b"i" * 16, CACHE.raw))
    allocate, made = works.pop()
    made(allocate())
    stage.run()
    assert not isinstance(stage.session(Detach()), Detached)
    assert ("deregister", 1) in stage.commands
    (give_back, given_back) = works.pop()
    assert not stage.memory.closed
    given_back(give_back())
    stage.run()
    assert stage.memory.closed
    assert isinstance(stage.on_sessions[-1], Detached)


def test_a_descriptor_that_a_worker_kept_is_adopted(stage):
    attached = stage.attach(descriptors=(9,))
    assert attached.kept
    assert ("adopt", 9) in stage.commands


def test_a_descriptor_that_is_not_needed_is_closed(stage):
    stage.attach()
    stage.hang_up()
    stage.attach(connection=2, descriptors=(9,))
    assert stage.discarded == [9]


def test_the_descriptor_of_a_successor_that_dies_waiting_is_closed(stage):
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16, descriptors=(9,))
    assert stage.discarded == []
    stage.hang_up(2)
    assert stage.discarded == [9]


def test_a_successor_does_not_get_a_pool_that_is_still_written_to(stage):
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16)
    stage.run(5.0)
    assert stage.on_sessions[-1].code == ErrorCode.POOL_BUSY
    assert "quarantine" in stage.on_sessions[-1].text
    stage.landed(1)
    stage.attach(connection=3, instance=b"k" * 16)
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_worker_is_told_that_there_is_no_memory_for_its_pool(stage, monkeypatch):
    def allocate(name, size):
        raise Unavailable(ErrorCode.OVERLOADED, "full")

    stage.dependencies.provider.allocate = allocate

    def background(work, done):
        try:
            done(work())
        except Unavailable as error:
            done(error)

    stage.actors.pools.memory._background = background
    assert stage.attach().code == ErrorCode.OVERLOADED
    del stage.dependencies.provider.allocate
    assert isinstance(stage.attach(connection=2), Attached)


def test_an_offer_to_a_pool_that_is_being_given_back_is_refused(stage):
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.session(Detach())
    assert stage.request(Cancel(1, "p"))[0].code == ErrorCode.NOT_ATTACHED


def test_a_detach_of_a_pool_that_was_lost_meanwhile_is_refused(stage):
    stage.attach()
    register, stage.dependencies.transport.register = stage.dependencies.transport.register, lambda *_: None
    call(stage.actors.pools.renew, "w")
    stage.run()
    call(stage.actors.pools.memory.register_failed, RegisterFailed(1, "no keys"))
    refused = stage.session(Detach())
    assert refused.code == ErrorCode.TRANSPORT
    stage.dependencies.transport.register = register
    assert isinstance(stage.attach(connection=2), Attached)


def test_a_cancel_that_comes_as_its_worker_loses_its_pool_is_refused_and_ends_nothing_else(stage):
    stage.attach()
    stage.dependencies.transport.register = lambda pool, region: None
    call(stage.actors.pools.renew, "w")
    stage.run()

    def background(work, done):
        done(work())
        stage.actors.gateway.received(WorkerFrame(b"\1" * 16, codec.encode(Cancel(5, "nothing")), 1000))

    stage.actors.pools.memory._background = background
    call(stage.actors.pools.memory.register_failed, RegisterFailed(1, "no keys"))
    stage.run()
    refused = stage.to_workers[-1][1]
    assert (refused.call, refused.code, refused.upcoming) == (5, ErrorCode.UNKNOWN_REQUEST, 0)
    assert stage.hung_up == [1]


def test_a_detach_of_a_connection_that_does_not_have_the_pool_changes_nothing(stage):
    stage.attach()
    call(stage.actors.pools.detach, DetachPool(99, "w"))
    stage.run()
    assert stage.actors.pools._records["w"].state == "lent"
    assert isinstance(stage.session(Detach()), Detached)


def test_a_successor_that_waits_for_a_pool_that_is_lost_is_refused_and_its_descriptor_closed(stage):
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16, descriptors=(9,))
    call(stage.actors.pools.renew, "w")
    transport = stage.dependencies.transport
    transport.register = lambda pool, *_: transport.on_event(RegisterFailed(pool, "no keys"))
    stage.landed(1)
    assert stage.on_sessions[-1].code == ErrorCode.TRANSPORT
    assert stage.discarded == [9]
    assert stage.actors.pools._records == {}


def test_a_pool_whose_worker_left_while_it_was_made_is_kept_for_it(stage):
    works = []
    stage.actors.pools.memory._background = lambda work, done: works.append((work, done))
    stage.attach()
    stage.hang_up()
    allocate, made = works.pop()
    made(allocate())
    stage.run()
    assert stage.actors.pools._records["w"].state == "kept"
    assert isinstance(stage.attach(connection=2), Attached)


def test_a_worker_that_comes_back_after_another_had_its_pool_is_told_that_it_is_another_pool(stage):
    first = stage.attach()
    stage.hang_up()
    assert stage.attach(connection=2).tenancy == first.tenancy
    stage.hang_up(2)
    other = stage.attach(connection=3, instance=b"j" * 16)
    stage.hang_up(3)
    again = stage.attach(connection=4)
    assert len({first.tenancy, other.tenancy, again.tenancy}) == 3


@pytest.mark.parametrize("gets_it", [True, False])
def test_notifications_are_numbered_from_1_again_if_another_worker_had_the_pool_in_between(stage, gets_it):
    """Also if that one was gone by the time it got the pool."""
    stage.attach()
    stage.offer("before")
    stage.hang_up()
    lend = stage.actors.pools._lend

    def lend_late(record):
        stage.actors.gateway.received(SessionClosed(2))
        lend(record)

    stage.actors.pools._lend = lend if gets_it else lend_late
    stage.attach(connection=2, instance=b"j" * 16)
    stage.actors.pools._lend = lend
    stage.hang_up(2)
    stage.attach(connection=3)
    session = bytes([stage.sessions]) * 16
    stage.request(Offer(1, "n", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET), session)
    stage.request(Cancel(2, "n"), session)
    assert stage.to_workers[-1] == (session, Notifications(1, (Released("n", "withdrawn"),)))


def test_a_worker_that_came_back_while_the_daemon_stood_still_gets_its_pool(stage):
    stage.attach()
    stage.hang_up()
    stage.process_ends()
    stage.run(5.05)  # its time is over, and what was sent to the daemon meanwhile is read only now
    stage.attach(connection=2, instance=b"j" * 16)
    assert stage.on_sessions[-1].kept
    stage.hang_up(2)
    stage.process_ends(2)
    stage.run(5.2)
    assert ("deregister", 1) in stage.commands


class Store:
    """What the last daemon left: one descriptor."""

    def __init__(self, descriptor):
        self.descriptor, self.kept, self.dropped = descriptor, [], []

    def take(self, worker, uid, spec, pid):
        return self.descriptor

    def lent(self, worker, uid, pid):
        self.holder = (worker, pid)

    def keep(self, worker, uid, spec, descriptor):
        self.kept.append((worker, descriptor))

    def drop(self, worker):
        self.descriptor = -1
        self.dropped.append(worker)


def adopting(stage, store, error):
    """The stage's daemon with a store; adopting what is in it fails with `error`."""

    def adopt(descriptor, size):
        stage.commands.append(("adopt", descriptor))
        raise error

    stage.dependencies.provider.adopt = adopt
    stage.actors.pools.memory._store = store


def test_a_pool_that_a_process_of_before_the_daemon_has_mapped_is_refused_and_the_next_attempt_gets_it():
    stage = Stage()
    store = stage.actors.pools.memory._store = Store(-1)
    busy = Unavailable(ErrorCode.POOL_BUSY, "it has not ended")
    store.take = lambda *_: (_ for _ in ()).throw(busy)
    refused = stage.attach(pid=7)
    assert (refused.code, refused.text) == (ErrorCode.POOL_BUSY, busy.text)
    assert stage.actors.pools._records == {}
    del store.take
    assert isinstance(stage.attach(connection=2, pid=8), Attached)
    assert store.holder == ("w", 8)


def test_a_stored_descriptor_that_is_no_pool_is_dropped_and_its_worker_gets_new_memory(stage):
    """Freed before its daemon was killed; or its daemon's `device` is another one now."""
    store = Store(9)
    adopting(stage, store, BadRequest(ErrorCode.BAD_POOL, "its pool has ended meanwhile"))
    attached = stage.attach()
    assert isinstance(attached, Attached)
    assert not attached.kept
    assert ("adopt", 9) in stage.commands
    assert store.dropped == ["w"]
    assert store.kept == [("w", stage.memory.descriptor)]


def test_a_stored_pool_that_cannot_be_had_now_stays_stored(stage):
    store = Store(9)
    adopting(stage, store, Unavailable(ErrorCode.OVERLOADED, "it cannot be faulted in"))
    assert stage.attach().code == ErrorCode.OVERLOADED
    assert store.dropped == []
    del stage.dependencies.provider.adopt
    assert stage.attach(connection=2).kept


def test_a_descriptor_of_its_own_that_is_no_pool_is_refused(stage):
    adopting(stage, Store(-1), BadRequest(ErrorCode.BAD_POOL, "no memfd"))
    assert stage.attach(descriptors=(8,)).code == ErrorCode.BAD_POOL
