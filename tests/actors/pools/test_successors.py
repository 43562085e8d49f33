"""A pool goes to another process only when the one that had it has ended."""

import pytest

from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.peer import Broken, Release
from kvd.protocol.worker import Attach, Attached, Detach, Refused
from kvd.transport.interface import Registered
from tests.actors.pools.test_pools import OTHER
from tests.actors.scheduler.pulling import start_reading
from tests.actors.stage import CACHE, Memory, Stage, make_claim

SUCCESSOR = {"connection": 2, "instance": b"j" * 16, "pid": 8}


@pytest.fixture
def stage():
    stage = Stage(attach_wait=1.0, pool_linger=5.0)
    stage.attach(pid=7)
    return stage


def waits(stage):
    return len(stage.on_sessions) == 1


def test_a_successor_waits_until_the_process_before_it_has_ended(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    assert waits(stage)
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)
    assert stage.on_sessions[-1].kept


def test_a_successor_of_a_process_that_ended_before_its_session_does_not_wait(stage):
    stage.process_ends()
    stage.hang_up()
    assert isinstance(stage.attach(**SUCCESSOR), Attached)


def test_a_process_that_ended_is_waited_for_while_another_has_inherited_its_session(stage):
    stage.process_ends()
    assert stage.attach(**SUCCESSOR).code == ErrorCode.POOL_BUSY


def test_the_leases_of_a_process_that_lives_on_are_not_broken_for_its_successor(stage):
    stage.offer()
    stage.asked_by_peer(make_claim())
    before = len(stage.answers)
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    stage.run(0.9)
    assert len(stage.answers) == before


def test_a_successor_of_a_process_that_does_not_end_is_refused_with_its_number(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    stage.run(1.1)
    refused = stage.on_sessions[-1]
    assert isinstance(refused, Refused)
    assert refused.code == ErrorCode.POOL_BUSY
    assert "process 7 had it and has not ended; end that process" in refused.text
    stage.process_ends()
    assert isinstance(stage.session(Attach("w", b"j" * 16, CACHE.raw), 2), Attached)


def test_the_same_process_gets_its_pool_at_once_as_another_instance(stage):
    stage.hang_up()
    assert isinstance(stage.attach(connection=2, instance=b"j" * 16, pid=7), Attached)
    assert stage.forgotten == [1]


def test_a_process_that_comes_back_gets_its_pool_before_a_successor_that_waits_for_its_end(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    stage.attach(connection=3, pid=7)
    refused, attached = stage.on_sessions[1:]
    assert refused.code == ErrorCode.POOL_BUSY
    assert "process 7, which had it, has come back" in refused.text
    assert isinstance(attached, Attached)


def test_one_successor_waits_at_a_time_and_may_give_up(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    assert "another worker waits for it" in stage.attach(connection=3, instance=b"k" * 16, pid=9).text
    stage.hang_up(2)
    stage.attach(connection=4, instance=b"l" * 16, pid=10)
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_successor_that_wants_other_memory_waits_too_as_the_process_would_lose_its_bytes(stage):
    stage.hang_up()
    first, stage.memory = stage.memory, Memory(OTHER.spec.pool_bytes)
    stage.attach(**SUCCESSOR, raw=OTHER.raw)
    assert waits(stage)
    assert not first.closed
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)
    assert first.closed


def test_a_successor_that_wants_other_memory_than_a_process_that_nobody_can_watch_gets_it_at_once():
    stage = Stage(attach_wait=1.0)
    stage.attach(pid=0, watched=False)
    stage.hang_up()
    stage.memory = Memory(OTHER.spec.pool_bytes)
    attached = stage.attach(connection=2, instance=b"j" * 16, pid=0, watched=False, raw=OTHER.raw)
    assert isinstance(attached, Attached)


def test_a_pool_that_is_registered_anew_still_waits_for_the_process(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    call(stage.actors.pools.renew, "w")
    stage.run()
    assert waits(stage)
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_pool_whose_detach_was_refused_ends_when_nothing_writes_to_it_any_more(stage):
    first = stage.memory
    start_reading(stage, timeout=3600.0)
    call(stage.actors.pools.renew, "w")
    stage.session(Detach())
    stage.run(2.0)
    assert "ends later: it is in quarantine" in stage.on_sessions[-1].text
    assert stage.hung_up == [1]
    assert stage.attach(**SUCCESSOR).code == ErrorCode.POOL_BUSY
    assert not first.closed
    stage.memory = Memory(CACHE.spec.pool_bytes)
    stage.landed(1)
    assert first.closed
    attached = stage.attach(**{**SUCCESSOR, "connection": 3})
    assert isinstance(attached, Attached)
    assert not attached.kept


def test_a_process_that_nobody_can_watch_counts_as_ended_with_its_session():
    stage = Stage(attach_wait=1.0)
    stage.attach(pid=0, watched=False)
    stage.hang_up()
    assert isinstance(stage.attach(connection=2, instance=b"j" * 16, pid=0, watched=False), Attached)


def test_gpu_memory_is_not_lent_after_a_process_that_nobody_can_watch():
    stage = Stage(attach_wait=1.0, pool_linger=5.0)
    stage.memory.device = "cuda:0"
    stage.attach(pid=0, watched=False)
    stage.hang_up()
    refused = stage.attach(connection=2, instance=b"j" * 16, pid=0, watched=False)
    assert refused.code == ErrorCode.POOL_BUSY
    assert "a process of another PID namespace" in refused.text
    assert isinstance(stage.attach(connection=3, pid=0, watched=False), Attached)


def test_processes_are_watched_no_longer_than_their_pools_last(stage):
    stage.session(Detach())
    stage.hang_up()
    assert stage.forgotten == [1]
    stage.attach(connection=2, pid=7)
    stage.hang_up(2)
    assert stage.forgotten == [1]
    stage.run(5.1)
    assert stage.forgotten == [1]
    stage.attach(connection=3, pid=7)
    assert stage.forgotten == [1, 2]
    stage.connect(4, pid=8)
    stage.hang_up(4)
    assert stage.forgotten == [1, 2, 4]


@pytest.fixture
def claimed():
    """A pool whose process has ended while a peer reads from it, and for which a successor waits."""
    stage = Stage(attach_wait=1.0, pool_linger=5.0)
    stage.attach(pid=7)
    stage.offer()
    stage.asked_by_peer(make_claim(ttl=3600.0))
    stage.hang_up()
    stage.process_ends()
    stage.attach(**SUCCESSOR, descriptors=(9,))
    assert waits(stage)
    return stage


THIRD = {"connection": 3, "instance": b"k" * 16, "pid": 9}


def test_a_successor_that_dies_while_the_pool_quiesces_leaves_it_to_the_next_with_its_bytes(claimed):
    claimed.hang_up(2)
    assert claimed.discarded == [9]
    claimed.attach(**THIRD)
    assert waits(claimed)
    claimed.asked_by_peer(Release(1, finished=False))
    assert isinstance(claimed.on_sessions[-1], Attached)
    assert claimed.on_sessions[-1].kept
    assert not claimed.memory.closed


def test_a_pool_whose_successor_died_before_it_was_quiesced_is_kept_then(claimed):
    claimed.hang_up(2)
    claimed.asked_by_peer(Release(1, finished=False))
    assert claimed.actors.pools._records["w"].state == "kept"
    assert claimed.attach(**THIRD).kept


def test_a_lease_is_not_broken_for_a_successor_that_is_gone(claimed):
    claimed.hang_up(2)
    before = len(claimed.answers)
    claimed.run(4.9)
    assert len(claimed.answers) == before


def test_a_pool_whose_successor_died_is_given_up_in_time_though_a_lease_of_it_is_held(claimed):
    claimed.hang_up(2)
    claimed.run(5.0 + 1.0 + 0.3)
    assert isinstance(claimed.answers[-1][1], Broken)
    assert claimed.memory.closed


def test_a_successor_that_is_refused_for_a_quarantined_read_leaves_the_pool_with_its_bytes(stage):
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.process_ends()
    stage.attach(**SUCCESSOR)
    stage.run(2.5)
    assert "quarantine" in stage.on_sessions[-1].text
    stage.landed(1)
    assert stage.attach(**THIRD).kept


def test_a_detached_pool_ends_though_its_worker_dies_before_it_is_quiesced(stage):
    start_reading(stage, timeout=3600.0)
    stage.session(Detach())
    stage.hang_up()
    assert stage.attach(**SUCCESSOR).code == ErrorCode.POOL_BUSY
    stage.landed(1)
    assert stage.memory.closed


def have_quiesced_by_a_client_that_goes(stage):
    """The second client of the process that has the pool, from which a peer reads."""
    stage.offer()
    stage.asked_by_peer(make_claim(ttl=3600.0))
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16, pid=7)
    stage.hang_up(2)


def test_a_process_with_two_clients_gets_its_pool_back_when_it_is_quiesced_if_the_second_dies_before(stage):
    """The second one had it quiesced, so the first must not go on with the leases that it had."""
    have_quiesced_by_a_client_that_goes(stage)
    tenancy = stage.on_sessions[0].tenancy
    stage.attach(connection=3, pid=7)
    assert waits(stage)
    stage.asked_by_peer(Release(1, finished=False))
    attached = stage.on_sessions[-1]
    assert isinstance(attached, Attached)
    assert (attached.kept, attached.tenancy) == (True, tenancy)


def test_a_pool_that_quiesced_for_a_client_that_is_gone_still_waits_for_the_process_of_both(stage):
    have_quiesced_by_a_client_that_goes(stage)
    assert stage.attach(**THIRD).code == ErrorCode.POOL_BUSY
    stage.asked_by_peer(Release(1, finished=False))
    stage.attach(connection=4, instance=b"l" * 16, pid=10)
    assert len(stage.on_sessions) == 2
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_pool_that_is_renewed_while_a_successor_with_another_layout_waits_for_a_process_keeps_its_memory():
    stage = Stage(attach_wait=60.0, pool_linger=5.0)
    stage.attach(pid=7)
    stage.hang_up()
    first, stage.memory = stage.memory, Memory(OTHER.spec.pool_bytes)
    stage.attach(connection=2, instance=b"j" * 16, pid=8, raw=OTHER.raw)
    call(stage.actors.pools.renew, "w")
    stage.run()
    assert not first.closed
    stage.process_ends(1)
    assert first.closed
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_successor_with_another_layout_does_not_get_the_pool_of_a_process_that_ends_while_that_is_registered_anew():
    stage = Stage(attach_wait=60.0, pool_linger=5.0)
    stage.attach(pid=7)
    stage.hang_up()
    first, stage.memory = stage.memory, Memory(OTHER.spec.pool_bytes)
    stage.attach(connection=2, instance=b"j" * 16, pid=8, raw=OTHER.raw)
    transport, registering = stage.dependencies.transport, []
    register, transport.register = transport.register, lambda pool, _region: registering.append(pool)
    call(stage.actors.pools.renew, "w")
    stage.run()
    stage.process_ends(1)
    transport.register = register
    for pool in registering:
        stage.transport_says(Registered(pool, b"new keys"))
    assert first.closed
    [_, attached] = stage.on_sessions
    assert (type(attached), attached.pool_bytes) == (Attached, OTHER.spec.pool_bytes)


def test_a_deadline_that_passes_as_a_successor_leaves_does_not_end_the_pool_of_a_process_that_lives():
    stage = Stage(attach_wait=1.0, pool_linger=600.0)
    stage.attach(pid=7)
    stage.hang_up()
    stage.attach(connection=2, instance=b"j" * 16, pid=8)
    pools = stage.actors.pools
    call(pools.worker_gone, "w", 2)
    call(pools._overdue, "w")  # in the turn in which it left
    stage.run(1.0)
    assert not stage.memory.closed
