"""A pool goes to another process only when the one that had it has ended."""

import pytest

from kvd.actors.pools.messages import RenewPool
from kvd.errors import ErrorCode
from kvd.protocol.worker import Attach, Attached, Detach, Refused
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


def test_a_successor_that_wants_another_pool_gets_new_memory_at_once(stage):
    stage.hang_up()
    stage.memory = Memory(OTHER.spec.pool_bytes)
    assert isinstance(stage.attach(**SUCCESSOR, raw=OTHER.raw), Attached)


def test_a_pool_that_is_registered_anew_still_waits_for_the_process(stage):
    stage.hang_up()
    stage.attach(**SUCCESSOR)
    stage.context.pools.tell(RenewPool("w"))
    stage.run()
    assert waits(stage)
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)


def test_a_process_whose_detach_was_refused_is_watched_until_it_ends(stage):
    start_reading(stage, timeout=3600.0)
    stage.context.pools.tell(RenewPool("w"))
    stage.session(Detach())
    stage.run(2.0)
    assert "quarantine" in stage.on_sessions[-1].text
    assert stage.hung_up == [1]
    stage.landed(1)
    stage.attach(**SUCCESSOR)
    assert not isinstance(stage.on_sessions[-1], Attached)
    stage.process_ends()
    assert isinstance(stage.on_sessions[-1], Attached)


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
    assert stage.forgotten == [1, 2]
    stage.connect(3, pid=8)
    stage.hang_up(3)
    assert stage.forgotten == [1, 2, 3]
