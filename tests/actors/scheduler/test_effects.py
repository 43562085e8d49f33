import pytest

from kvd.actors.runtime.machine import EffectQueue


def test_effects_are_carried_out_in_order_and_never_one_within_another():
    order = []
    queue = EffectQueue(when_empty=lambda: order.append("empty"))

    def outer():
        order.append("outer begins")
        queue.put(order.append, "inner")
        queue.run()
        order.append("outer ends")

    queue.put(outer)
    queue.put(order.append, "second")
    assert order == []
    queue.run()
    assert order == ["outer begins", "outer ends", "second", "inner", "empty"]


def test_an_effect_that_raises_leaves_the_others_to_the_next_run():
    done = []
    queue = EffectQueue(when_empty=lambda: None)

    def fail():
        raise ValueError("no")

    queue.put(fail)
    queue.put(done.append, 1)
    with pytest.raises(ValueError, match="no"):
        queue.run()
    assert done == []
    queue.run()
    assert done == [1]
