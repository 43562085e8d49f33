import pytest

from kvd import limits
from kvd.actors.runtime.actor import Actor, Dispatcher
from kvd.actors.runtime.batch import InBatches
from tests.simulator.virtual.loop import VirtualLoop


class Owner(Actor):
    name = "owner"


@pytest.fixture
def owner():
    return Owner(Dispatcher(VirtualLoop(), None))


def test_items_that_come_together_are_handled_in_one_message(owner):
    handled = []
    batch = InBatches(owner, handled.append)
    for item in range(5):
        batch(item)
    assert (owner.waiting, handled) == (1, [])
    owner.loop.run_until(0)
    assert handled == list(range(5))
    batch(5)
    owner.loop.run_until(0)
    assert handled[5:] == [5]


def test_a_message_handles_a_bounded_number_of_items_and_the_next_one_comes_behind_what_they_caused(owner, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 2)
    order = []
    batch = InBatches(owner, lambda item: (order.append(item), owner.soon(order.append, f"after {item}")))
    for item in range(3):
        batch(item)
    owner.loop.run_until(0)
    assert order == [0, 1, "after 0", "after 1", 2, "after 2"]
