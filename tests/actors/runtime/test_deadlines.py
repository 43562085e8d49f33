import pytest

from kvd.actors.runtime.deadlines import Deadlines
from tests.simulator.virtual.loop import VirtualLoop


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
