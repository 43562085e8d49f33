import pytest

from kvd import limits
from kvd.actors.runtime.actor import Actor, Dispatcher
from kvd.actors.runtime.deferred import Batch
from tests.simulator.virtual.loop import VirtualLoop


class Owner(Actor):
    name = "owner"


@pytest.fixture
def owner():
    return Owner(Dispatcher(VirtualLoop(), None))


def test_items_that_come_together_are_handled_in_one_message(owner):
    handled = []
    batch = Batch(owner, handled.extend)
    for item in range(5):
        batch.put(item)
    assert (owner.waiting, handled) == (1, [])
    owner.loop.run_until(0)
    assert handled == list(range(5))
    batch.put(5)
    owner.loop.run_until(0)
    assert handled[5:] == [5]


def test_a_message_handles_some_items_and_the_next_one_comes_behind_sockets_and_what_they_caused(owner, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 2)
    order = []

    def handle(items):
        order.append(items)
        owner.loop.call_soon(lambda: order.append("socket"))
        owner.call(order.append, "after")

    batch = Batch(owner, handle)
    for item in range(3):
        batch.put(item)
    owner.loop.run_until(0)
    assert order == [[0, 1], "after", "socket", [2], "after", "socket"]


def test_items_behind_those_that_could_not_be_handled_are_handled(owner, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_ITEMS", 1)
    handled = []

    def handle(items):
        if items == [0]:
            raise ValueError
        handled.extend(items)

    batch = Batch(owner, handle)
    for item in range(3):
        batch.put(item)
    with pytest.raises(ValueError):  # noqa: PT011
        batch._handle_some()
    owner.loop.run_until(0)
    batch.put(3)
    owner.loop.run_until(0)
    assert handled == [1, 2, 3]


def test_items_that_have_to_do_with_many_blocks_come_few_at_a_time(owner, monkeypatch):
    monkeypatch.setattr(limits, "BATCH_BLOCKS", 10)
    handled = []
    batch = Batch(owner, handled.append, blocks_of=lambda item: item)
    for item in (4, 6, 1, 30, 2, 3):
        batch.put(item)
    owner.loop.run_until(0)
    assert handled == [[4, 6], [1], [30], [2, 3]]


def test_an_item_that_waits_is_handled_once_in_its_place(owner):
    handled = []
    batch = Batch(owner, handled.extend)
    for item in (1, 2, 1):
        batch.put(item)
    owner.loop.run_until(0)
    assert handled == [1, 2]
    batch.put(1)
    owner.loop.run_until(0)
    assert handled == [1, 2, 1]


def test_an_item_that_is_deferred_is_handled_behind_all_others_and_only_if_it_waits(owner):
    handled = []
    batch = Batch(owner, handled.extend)
    for item in (1, 2, 3):
        batch.put(item)
    batch.defer(1)
    batch.defer(4)
    owner.loop.run_until(0)
    assert handled == [2, 3, 1]
