"""When vLLM is to make steps though it has nothing to compute: the workers have to be told, or to tell the daemons."""

from kvd.engines.vllm.metadata import HoldOrder, OpenOrder
from tests.engines.vllm.test_vllm_growing_scheduler import ASKED
from tests.engines.vllm.test_vllm_scheduler import Request, decoded, prefilled, side, table


def test_vllm_is_to_make_steps_while_a_worker_has_orders_that_it_could_not_send() -> None:
    scheduler = side(ranks=2)
    assert not scheduler.unsent
    scheduler.set_unsent({0: False, 1: True})
    scheduler.set_unsent({})
    assert scheduler.unsent
    scheduler.set_unsent({1: False})
    assert not scheduler.unsent


def test_an_offer_is_held_though_the_engine_is_paused_when_its_request_comes() -> None:
    """VLLM then neither schedules it nor counts it as one for which to make a step."""
    consumer = side()
    consumer.arrived(Request(list(range(9)), prefilled(side(), 9, [3, 1, 2])))
    assert consumer.unsent
    (hold,) = consumer.take_metadata().holds
    assert isinstance(hold, HoldOrder)
    assert not consumer.unsent


def test_an_offer_is_opened_though_the_engine_is_paused_when_its_request_comes() -> None:
    producer = side()
    producer.arrived(Request(list(range(9)), ASKED))
    assert producer.unsent
    (opened,) = producer.take_metadata().growing
    assert isinstance(opened, OpenOrder)
    assert not producer.unsent


def test_vllm_is_to_make_no_steps_for_a_request_that_waits_for_the_pull_of_another() -> None:
    consumer, params = side(), prefilled(side(), 9, [3, 1, 2])
    pulling, external = decoded(consumer, params, 9)
    consumer.allocated(pulling, [table(5, 6, 7)], external)
    consumer.arrived(Request(list(range(9)), params, request_id="second sample"))
    consumer.take_metadata()
    assert not consumer.unsent
    consumer.received(["r"], failed=["r"])
    assert consumer.unsent  # its own turn: the offer is held for it
    consumer.take_metadata()
    assert not consumer.unsent
