import pytest

from kvd import limits
from kvd.actors.runtime.actor import call
from kvd.protocol.worker import Acknowledge, Cancel, Detach, Error, Notifications, Released
from tests.actors.stage import Stage


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def end_offers(stage, *names):
    for name in names:
        stage.offer(name)
        stage.request(Cancel(9, name), session=bytes([stage.sessions]) * 16)


def batches(stage):
    return [reply for _, reply in stage.to_workers if isinstance(reply, Notifications)]


def test_notifications_are_numbered_from_1(stage):
    end_offers(stage, "a", "b")
    assert [(batch.first, len(batch.items)) for batch in batches(stage)] == [(1, 1), (2, 1)]


def test_a_worker_that_comes_back_gets_what_it_has_not_acknowledged(stage):
    end_offers(stage, "a", "b", "c")
    stage.request(Acknowledge(1))
    stage.hang_up()
    stage.to_workers.clear()
    stage.attach(connection=2)
    [batch] = batches(stage)
    assert (batch.first, [item.offer for item in batch.items]) == (2, ["b", "c"])


def test_a_refused_cancel_names_the_next_notification_whatever_was_sent_or_acknowledged(stage):
    for ended, expected in (((), 1), (("a", "b"), 3)):
        end_offers(stage, *ended)
        [error] = stage.request(Cancel(9, "nothing"))
        assert error.upcoming == expected
    stage.request(Acknowledge(1))
    stage.hang_up()
    stage.attach(connection=2)
    stage.room = False
    call(stage.actors.completion.notify, "w", Released("c", "read"))
    stage.run()
    stage.room = True
    replies = stage.request(Cancel(9, "nothing"), session=bytes([stage.sessions]) * 16)
    assert [reply.upcoming for reply in replies if isinstance(reply, Error)] == [4]


def test_notifications_for_a_worker_that_is_away_are_kept(stage):
    stage.offer("a", ttl=0.5)
    stage.hang_up()
    stage.run(1.0)
    stage.attach(connection=2)
    assert [item.offer for item in stage.notified] == ["a"]


def test_a_successor_starts_with_an_empty_log(stage):
    end_offers(stage, "a")
    stage.hang_up()
    stage.to_workers.clear()
    stage.attach(connection=2, instance=b"j" * 16)
    assert batches(stage) == []


def test_a_worker_that_detached_gets_no_old_notifications(stage):
    end_offers(stage, "a")
    stage.session(Detach())
    stage.to_workers.clear()
    stage.attach(connection=2)
    assert batches(stage) == []


@pytest.mark.parametrize("sequence", [0, 2, 10**6, (1 << 63) - 1])
def test_acknowledging_more_than_was_sent_does_no_harm(stage, sequence):
    end_offers(stage, "a")
    stage.request(Acknowledge(sequence))
    stage.request(Acknowledge(sequence))
    end_offers(stage, "b")
    assert stage.notified[-1].offer == "b"
    assert batches(stage)[-1].first == 2


def test_what_was_never_sent_cannot_be_acknowledged(stage):
    end_offers(stage, "a")
    stage.room = False
    call(stage.actors.completion.notify, "w", Released("b", "read"))
    stage.request(Acknowledge(2))
    stage.room = True
    stage.run(0.1)
    assert [(batch.first, [item.offer for item in batch.items]) for batch in batches(stage)][-1] == (2, ["b"])


def test_a_batch_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(limits, "NOTIFICATIONS_PER_BATCH", 2)
    end_offers(stage, "a", "b", "c")
    stage.hang_up()
    stage.to_workers.clear()
    stage.attach(connection=2)
    assert [(batch.first, len(batch.items)) for batch in batches(stage)] == [(1, 2), (3, 1)]


def test_a_drain_waits_until_every_worker_that_is_there_has_its_notifications(stage):
    end_offers(stage, "a", "b")
    call(stage.actors.completion.drain)
    stage.run()
    assert stage.idle == []
    stage.request(Acknowledge(1))
    assert stage.idle == []
    stage.request(Acknowledge(2))
    assert stage.idle == ["completion"]


def test_a_drain_waits_for_no_worker_that_is_gone(stage):
    end_offers(stage, "a")
    call(stage.actors.completion.drain)
    stage.run()
    assert stage.idle == []
    stage.hang_up()
    assert stage.idle == ["completion"]


def test_the_log_of_a_worker_that_never_comes_back_ends_with_its_pool():
    stage = Stage(pool_linger=5.0)
    first = stage.attach()
    end_offers(stage, "a", "b")
    stage.hang_up()
    stage.process_ends()
    stage.run(1.0)
    assert len(stage.actors.completion._logs["w"].items) == 2
    stage.run(10.0)
    assert stage.actors.completion._logs == {}
    stage.to_workers.clear()
    assert stage.attach(connection=2).tenancy != first.tenancy
    assert batches(stage) == []


def test_what_is_acknowledged_while_the_queue_is_full_need_not_be_acknowledged_again(stage):
    end_offers(stage, "a")
    stage.room = False
    call(stage.actors.completion.notify, "w", Released("b", "read"))
    stage.request(Acknowledge(1))
    assert [item.offer for item in stage.actors.completion._logs["w"].items] == ["b"]


def test_a_batch_that_was_refused_comes_again_before_what_was_told_meanwhile(stage):
    completion = stage.actors.completion
    call(completion.notify, "w", Released("a", "read"))
    stage.run()
    stage.room = False
    call(completion.notify, "w", Released("b", "read"))
    stage.run()
    stage.room = True
    call(completion.notify, "w", Released("c", "read"))  # while "b", which was refused, waits to be sent again
    stage.run(0.1)
    assert [(batch.first, len(batch.items)) for batch in batches(stage)] == [(1, 1), (1, 3)]


def test_notifications_that_come_together_are_sent_together(stage):
    for offer in "abc":
        call(stage.actors.completion.notify, "w", Released(offer, "read"))
    stage.run()
    assert [(batch.first, len(batch.items)) for batch in batches(stage)] == [(1, 3)]
