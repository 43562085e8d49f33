import pytest

from kvd import limits
from kvd.actors.actor import Actor, OnFailure, handles
from kvd.errors import InternalError
from kvd.sim.loop import VirtualLoop


class Supervisor:
    def __init__(self):
        self.failures = []

    def failed(self, actor, message, error):
        self.failures.append((actor.name, message, error))


class Counter(Actor):
    name = "counter"

    def __init__(self, loop, supervisor):
        super().__init__(loop, supervisor)
        self.seen = []

    @handles(int)
    def number(self, message):
        self.seen.append(message)
        if message == 3:
            raise ValueError("three")

    @handles(str)
    def again(self, message):
        self.seen.append(message)
        self.tell(1)


class Special(Counter):
    @handles(int)
    def number(self, message):
        self.seen.append(-message)


@pytest.fixture
def loop():
    return VirtualLoop()


@pytest.fixture
def supervisor():
    return Supervisor()


def test_messages_are_handled_in_order_and_after_the_teller_is_done(loop, supervisor):
    actor = Counter(loop, supervisor)
    actor.tell(1)
    actor.tell(2)
    assert actor.seen == []
    assert actor.waiting == 2
    loop.run_until(0)
    assert actor.seen == [1, 2]
    assert actor.waiting == 0


def test_what_it_tells_itself_waits_for_others_turns(loop, supervisor):
    actor, order = Counter(loop, supervisor), []
    actor.tell("x")
    loop.call_soon(lambda: order.append(list(actor.seen)))
    loop.run_until(0)
    assert order == [["x"]]
    assert actor.seen == ["x", 1]


def test_a_handler_that_raises_is_reported_and_the_next_message_handled(loop, supervisor):
    actor = Counter(loop, supervisor)
    actor.tell(3)
    actor.tell(4)
    loop.run_until(0)
    assert actor.seen == [3, 4]
    [(name, message, error)] = supervisor.failures
    assert (name, message, str(error)) == ("counter", 3, "three")


def test_a_message_that_nobody_handles_is_reported(loop, supervisor):
    actor = Counter(loop, supervisor)
    actor.tell(1.5)
    loop.run_until(0)
    assert [message for _, message, _ in supervisor.failures] == [1.5]


def test_a_full_mailbox_is_an_error_of_ours(loop, supervisor, monkeypatch):
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 2)
    actor = Counter(loop, supervisor)
    actor.tell(1)
    actor.tell(2)
    with pytest.raises(InternalError, match="counter"):
        actor.tell(3)


def test_a_subclass_may_handle_a_kind_otherwise(loop, supervisor):
    actor = Special(loop, supervisor)
    actor.tell(2)
    loop.run_until(0)
    assert actor.seen == [-2]


def test_a_delayed_message_can_be_called_off(loop, supervisor):
    actor = Counter(loop, supervisor)
    actor.tell_later(1.0, 1)
    actor.tell_later(1.0, 2).cancel()
    loop.run_until(2)
    assert actor.seen == [1]


def test_failures_stop_the_daemon_unless_an_actor_says_otherwise():
    assert Counter.on_failure is OnFailure.STOP
