import pytest

from kvd import limits
from kvd.actors.runtime.deferred import Deadlines
from tests.simulator.virtual.loop import Handle, VirtualLoop


@pytest.fixture
def loop():
    return VirtualLoop()


@pytest.fixture
def expired():
    return []


@pytest.fixture
def expiry(loop, expired):
    return Deadlines(loop, lambda key: expired.append((loop.time(), key)))


def test_each_key_expires_at_its_deadline(loop, expiry, expired):
    expiry.set("b", 2.0)
    expiry.set("a", 1.0)
    loop.run_until(5)
    assert expired == [(1.0, "a"), (2.0, "b")]
    assert len(expiry) == 0


def test_a_deadline_that_is_moved_later_counts_alone(loop, expiry, expired):
    expiry.set("a", 1.0)
    expiry.set("a", 3.0)
    loop.run_until(5)
    assert expired == [(3.0, "a")]


def test_a_deadline_that_is_moved_earlier_counts_alone(loop, expiry, expired):
    expiry.set("a", 3.0)
    expiry.set("a", 1.0)
    loop.run_until(5)
    assert expired == [(1.0, "a")]


def test_an_unset_key_does_not_expire(loop, expiry, expired):
    expiry.set("a", 1.0)
    expiry.unset("a")
    expiry.unset("unknown")
    loop.run_until(5)
    assert not expired


def test_a_key_may_be_set_again_after_it_was_unset(loop, expiry, expired):
    expiry.set("a", 1.0)
    expiry.unset("a")
    expiry.set("a", 2.0)
    loop.run_until(5)
    assert expired == [(2.0, "a")]


def test_a_key_may_be_set_again_while_it_expires(loop):
    times = []

    def again(key):
        times.append(loop.time())
        if len(times) < 3:
            expiry.set(key, loop.time() + 1.0)

    expiry = Deadlines(loop, again)
    expiry.set("a", 1.0)
    loop.run_until(10)
    assert times == [1.0, 2.0, 3.0]


def test_many_moves_leave_no_heap_behind(loop, expiry, expired):
    for step in range(10_000):
        expiry.set("a", 100.0 - step * 0.001)
        expiry.set("b", 1.0 + step)
    assert len(expiry._heap) < 200
    loop.run_until(20_000)
    assert [key for _, key in expired] == ["a", "b"]


class StandingStill:
    """A loop that runs nothing until it is told to, as a process does that gets no processor: its timers are late."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_later(self, delay, callback, *args):
        handle = Handle(None, callback, args)
        self.timers.append((self.now + delay, handle))
        return handle

    def run_at(self, now):
        self.now = now
        while due := [handle for at, handle in self.timers if at <= now and not handle.cancelled]:
            self.timers = [(at, handle) for at, handle in self.timers if at > now]
            for handle in due:
                handle.callback(*handle.args)


@pytest.fixture
def standing_still():
    return StandingStill()


def expiry_of(loop, **more):
    expired = []
    return Deadlines(loop, lambda key: expired.append((loop.time(), key)), **more), expired


def test_what_others_had_to_send_gets_a_moment_to_be_read_after_a_standstill(standing_still):
    expiry, expired = expiry_of(standing_still, for_others=True)
    expiry.set("renewed", 5.0)
    expiry.set("silent", 5.0)
    standing_still.run_at(9.0)
    assert expired == []
    expiry.set("renewed", 14.0)  # its renewal had waited in the socket
    standing_still.run_at(9.0 + limits.CATCH_UP_SECONDS)
    assert expired == [(9.0 + limits.CATCH_UP_SECONDS, "silent")]


def test_the_moment_is_given_once_for_each_deadline_however_often_the_loop_stands_still(standing_still):
    expiry, expired = expiry_of(standing_still, for_others=True)
    expiry.set("a", 5.0)
    standing_still.run_at(9.0)
    standing_still.run_at(20.0)
    assert expired == [(20.0, "a")]
    expiry.set("a", 25.0)
    standing_still.run_at(29.0)
    assert len(expired) == 1
    standing_still.run_at(40.0)
    assert expired[1:] == [(40.0, "a")]


def test_a_deadline_of_ones_own_is_kept_after_a_standstill(standing_still):
    expiry, expired = expiry_of(standing_still)
    expiry.set("a", 5.0)
    standing_still.run_at(9.0)
    assert expired == [(9.0, "a")]


def test_a_timer_that_is_late_as_on_a_busy_loop_gives_no_more_than_a_look(standing_still):
    expiry, expired = expiry_of(standing_still, for_others=True)
    expiry.set("a", 5.0)
    standing_still.run_at(5.0 + limits.STANDSTILL_SECONDS)
    assert expired == []
    standing_still.run_at(5.0 + limits.STANDSTILL_SECONDS + limits.LAST_LOOK_SECONDS)
    assert [key for _, key in expired] == ["a"]


def test_what_others_had_to_send_by_the_very_end_of_a_standstill_is_read_first(standing_still):
    expiry, expired = expiry_of(standing_still, for_others=True)
    expiry.set("renewed", 8.99)
    expiry.set("silent", 8.99)
    standing_still.run_at(9.0)
    assert expired == []
    expiry.set("renewed", 14.0)
    standing_still.run_at(9.0 + limits.LAST_LOOK_SECONDS)
    assert [key for _, key in expired] == ["silent"]


def test_a_timer_that_is_on_time_moves_nothing(standing_still):
    expiry, expired = expiry_of(standing_still, for_others=True)
    expiry.set("a", 5.0)
    standing_still.run_at(5.0)
    assert [key for _, key in expired] == ["a"]


def test_what_is_due_at_one_moment_ends_some_at_a_time_with_sockets_in_between(loop, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 2)
    order = []
    expiry = Deadlines(loop, lambda key: (order.append(key), loop.call_soon(order.append, "socket")))
    for key in "abcde":
        expiry.set(key, 1.0)
    expiry.set("later", 2.0)
    loop.run_until(1.0)
    assert order == [*"ab", "socket", "socket", *"cd", "socket", "socket", "e", "socket"]
    loop.run_until(3.0)
    assert order[-2:] == ["later", "socket"]
    assert len(expiry) == 0


def test_many_deadlines_for_others_get_the_same_moment_after_a_standstill(standing_still, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 2)
    expiry, expired = expiry_of(standing_still, for_others=True)
    for key in "abcde":
        expiry.set(key, 5.0)
    standing_still.run_at(9.0)
    assert expired == []
    expiry.unset("d")
    standing_still.run_at(9.0 + limits.CATCH_UP_SECONDS)
    assert expired == [(9.0 + limits.CATCH_UP_SECONDS, key) for key in "abce"]
