import pytest

from kvd import limits
from kvd.actors.runtime.actor import Actor, Component, Dispatcher, OnFailure, call
from kvd.errors import InternalError
from tests.simulator.virtual.loop import VirtualLoop


class Supervisor:
    def __init__(self):
        self.failures = []

    def failed(self, actor, method, error):
        self.failures.append((actor.name, method, error))


class Counter(Actor):
    name = "counter"

    def __init__(self, dispatcher):
        super().__init__(dispatcher)
        self.seen = []

    def count(self, number):
        self.seen.append(number)
        if number == 3:
            raise ValueError("three")

    def again(self, number):
        self.seen.append(number)
        call(self.count, 1)


@pytest.fixture
def loop():
    return VirtualLoop()


@pytest.fixture
def supervisor():
    return Supervisor()


@pytest.fixture
def dispatcher(loop, supervisor):
    return Dispatcher(loop, supervisor)


def test_messages_are_handled_in_order_and_after_the_teller_is_done(loop, supervisor, dispatcher):
    actor = Counter(dispatcher)
    call(actor.count, 1)
    call(actor.count, 2)
    assert actor.seen == []
    assert actor.waiting == 2
    loop.run_until(0)
    assert actor.seen == [1, 2]
    assert actor.waiting == 0


def test_messages_of_two_actors_are_handled_in_the_order_they_were_told(loop, dispatcher):
    one, other, order = Counter(dispatcher), Counter(dispatcher), []
    one.seen = other.seen = order
    call(one.again, 0)
    call(other.count, 7)
    call(one.count, 8)
    loop.run_until(0)
    assert order == [0, 7, 8, 1]


def test_a_chain_of_messages_takes_one_turn_of_the_loop_and_a_long_one_lets_others_in(loop, dispatcher, monkeypatch):
    monkeypatch.setattr(limits, "MESSAGES_PER_TURN", 3)
    actor, seen = Counter(dispatcher), []
    for number in range(10, 14):
        call(actor.count, number)
    loop.call_soon(lambda: seen.append(list(actor.seen)))
    loop.run_until(0)
    assert seen == [[10, 11, 12]]
    assert actor.seen == [10, 11, 12, 13]


def test_frames_are_admitted_no_faster_than_messages_are_handled_and_readers_take_turns(loop, dispatcher, monkeypatch):
    monkeypatch.setattr(limits, "INTAKE_CLOSES", 8)
    monkeypatch.setattr(limits, "INTAKE_OPENS", 2)
    monkeypatch.setattr(limits, "MESSAGES_PER_TURN", 5)
    actor, taken, most = Counter(dispatcher), {"a": 0, "b": 0, "c": 0}, 0

    def reader(name):
        def read():
            nonlocal most
            for _ in range(4):
                if not dispatcher.admits(read):
                    return
                taken[name] += 1
                call(actor.again, 0)  # which makes another call
            most = max(most, actor.waiting)
            if taken[name] < 400:
                loop.call_soon(read)

        return read

    for name in taken:
        loop.call_soon(reader(name))
    while sum(taken.values()) < 600:
        loop._run(loop.ready.popleft())
    assert most <= 2 * 8
    assert max(taken.values()) - min(taken.values()) <= 8


def test_a_probe_is_answered_when_all_before_it_is_handled(loop, dispatcher):
    actor, answers = Counter(dispatcher), []
    call(actor.count, 1)
    call(actor.probe, lambda name: answers.append((name, list(actor.seen))))
    loop.run_until(0)
    assert answers == [("counter", [1])]


def test_a_handler_that_raises_is_reported_and_the_next_message_handled(loop, supervisor, dispatcher):
    actor = Counter(dispatcher)
    call(actor.count, 3)
    call(actor.count, 4)
    loop.run_until(0)
    assert actor.seen == [3, 4]
    [(name, method, error)] = supervisor.failures
    assert (name, method, str(error)) == ("counter", "count", "three")


def test_a_call_with_wrong_arguments_is_reported(loop, supervisor, dispatcher):
    actor = Counter(dispatcher)
    call(actor.count)
    loop.run_until(0)
    assert [(method, type(error)) for _, method, error in supervisor.failures] == [("count", TypeError)]


def test_a_method_of_a_part_waits_in_the_mailbox_of_its_actor(loop, supervisor, dispatcher):
    class Part(Component):
        def __init__(self, actor):
            self.actor, self.seen = actor, []

        def note(self, number, *, twice=False):
            self.seen += [number] * (1 + twice)
            raise LookupError("of a part")

    actor = Counter(dispatcher)
    part = Part(actor)
    call(part.note, 7, twice=True)
    assert (actor.waiting, part.seen) == (1, [])
    loop.run_until(0)
    assert part.seen == [7, 7]
    assert [(name, method) for name, method, _ in supervisor.failures] == [("counter", "note")]


def test_a_full_mailbox_is_an_error_of_ours(dispatcher, monkeypatch):
    monkeypatch.setattr(limits, "MAILBOX_MESSAGES", 2)
    actor = Counter(dispatcher)
    call(actor.count, 1)
    call(actor.count, 2)
    with pytest.raises(InternalError, match="counter"):
        call(actor.count, 3)


def test_a_delayed_message_can_be_called_off(loop, supervisor, dispatcher):
    actor = Counter(dispatcher)
    actor.later(1.0, actor.seen.append, 1)
    actor.later(1.0, actor.seen.append, 2).cancel()
    loop.run_until(2)
    assert actor.seen == [1]


def test_failures_stop_the_daemon_unless_an_actor_says_otherwise():
    assert Counter.on_failure is OnFailure.STOP


def test_messages_behind_a_failure_that_cannot_be_reported_are_handled_all_the_same(loop, supervisor, dispatcher):
    def failed(actor, message, error):
        raise BrokenPipeError("nobody reads the log any more")

    supervisor.failed = failed
    actor = Counter(dispatcher)
    for number in (3, 4):
        call(actor.count, number)
    with pytest.raises(BrokenPipeError):
        loop.run_until(0.0)
    loop.run_until(0.0)
    assert actor.seen == [3, 4]
