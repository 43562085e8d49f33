"""The scheduler's half of offers that grow: what is opened, extended and closed, and what becomes of it otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.client import Blocks
from kvd.engines.vllm.growing.params import is_growing
from kvd.engines.vllm.growing.scheduler import STARVED_SECONDS
from kvd.engines.vllm.metadata import ExtendOrder, OpenOrder, RankEndpoint, StepMetadata, WithdrawOrder
from kvd.engines.vllm.scheduler import SchedulerSide
from kvd.layout import Full, Sliding, State
from kvd.protocol.ticket import decode
from tests.engines.vllm.blocks import Manager, bind
from tests.engines.vllm.test_vllm_scheduler import PREFILL, Request, Status, side, table

OFFER = "kvdo1." + 32 * "x"
ASKED = PREFILL | {"kvd_offer": OFFER}
DECODE = {
    "do_remote_prefill": True,
    "kvd_offer": OFFER,
    "kvd_producer": [{"daemon": "d", "address": "tcp://h:0", "pool": "p"}],
}


def step(producer: SchedulerSide, request: Any, more: int, *blocks: list[int], **output: Any) -> StepMetadata:
    """One step of vLLM's scheduler, in which `more` tokens of the request are computed into these blocks, if it can."""
    if not more:
        producer.external(request, 0)
    tables = {request.request_id: tuple(blocks)}
    made = {
        "num_scheduled_tokens": {request.request_id: more} if more else {},
        "preempted_req_ids": set(),
        "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=set()),
        "kv_connector_block_state": SimpleNamespace(get_block_ids=tables.get),
    }
    producer.scheduled(SimpleNamespace(**made | output))
    request.num_computed_tokens += more
    return producer.take_metadata()


def passed_step(producer: SchedulerSide) -> StepMetadata:
    """One that vLLM makes for other reasons: it asks of no request, and computes nothing."""
    resumed = SimpleNamespace(resumed_req_ids=set())
    output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=set(), scheduled_cached_reqs=resumed)
    producer.scheduled(output)
    return producer.take_metadata()


def arrived(producer: SchedulerSide, tokens: int, params: dict[str, Any] = ASKED, name: str = "r") -> Request:
    request = Request(list(range(tokens)), dict(params), name)
    producer.arrived(request)
    request.num_computed_tokens = 0
    return request


def consumer_of(params: dict[str, Any], tokens: int, *groups: Any) -> tuple[SchedulerSide, Request, int]:
    consumer = side(*groups)
    request = Request(list(range(tokens)), params)
    consumer.arrived(request)
    return consumer, request, consumer.external(request, 0) or 0


def test_an_offer_is_opened_at_once_extended_after_each_step_and_closed_in_the_end() -> None:
    producer = side()
    request = arrived(producer, 10)
    opened, extended = step(producer, request, 6, [3, 4]).growing
    assert isinstance(opened, OpenOrder)
    assert (opened.request, opened.consumers) == ("r", 1)
    assert extended == ExtendOrder("r", opened.offer, 6, (Blocks(0, 0, [3, 4]),))
    assert step(producer, request, 1, [3, 4]).growing == [ExtendOrder("r", opened.offer, 7, ())]
    assert step(producer, request, 3, [3, 4, 9]).growing == [ExtendOrder("r", opened.offer, 10, (Blocks(0, 2, [9]),))]
    params = producer.finished(request, ([3, 4, 9],))
    metadata = producer.take_metadata()
    assert metadata.growing == [ExtendOrder("r", opened.offer, 10, (), closes=True)]
    assert metadata.offers == []
    assert params is not None
    assert "kvd_ticket" not in params
    assert params["kvd_offer"] == OFFER


def test_both_engines_make_the_same_offer_of_what_the_router_chose() -> None:
    producer = side(ranks=2)
    request = arrived(producer, 10, ASKED | {"kvd_consumers": 2})
    (opened, _) = step(producer, request, 10, [3, 4, 9]).growing
    params = producer.finished(request, ([3, 4, 9],))
    assert params is not None
    assert params["kvd_consumers"] == 2
    consumer, asked, external = consumer_of(params, 10)
    assert external == 9
    consumer.allocated(asked, [table(5, 6, 7)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.grows
    ticket = decode(pull.ticket)
    assert ticket.grows
    assert [(rank.daemon, rank.address, rank.pool, rank.incarnation) for rank in ticket.ranks] == [
        ("d0", "tcp://h:0", "vllm-0", 0),
        ("d1", "tcp://h:1", "vllm-1", 0),
    ]
    assert {(rank.offer, rank.secret) for rank in ticket.ranks} == {(opened.offer, opened.secret)}


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_not_wanted_of_a_prefill_that_goes_on_is_let_go_of_for_as_long_as_it_does(cached: bool) -> None:
    """Or its blocks are held for their time, if it has queued for longer than a pull may take."""
    consumer, request, _ = consumer_of(DECODE, 10)
    if cached:
        consumer.external(request, 9)
        consumer.allocated(request, [table(5, 6, 7, cached=2)], 0)
    else:
        consumer.finished(request, ([],))
    (pull,) = consumer.take_metadata().pulls
    assert (pull.blocks, pull.waits, pull.grows) == ((), False, True)


def test_the_answer_of_a_prefill_that_was_not_asked_so_names_the_daemons_for_the_next_request() -> None:
    for alone in (True, False):
        producer = SchedulerSide(((Full(), 4),), 1, alone=alone)
        producer.set_endpoints({0: RankEndpoint("d0", "tcp://h:0", 7, "vllm-0")})
        request = arrived(producer, 8, PREFILL)
        assert step(producer, request, 8, [1, 2]).growing == []
        params = producer.finished(request, ([1, 2],))
        assert params is not None
        assert "kvd_ticket" in params
        assert params.get("kvd_producer") == (
            [{"daemon": "d0", "address": "tcp://h:0", "pool": "vllm-0"}] * alone or None
        )
        assert not is_growing(params)


@pytest.mark.parametrize("tokens", [1, 2, 9, 10, 11, 12])
@pytest.mark.parametrize("groups", [((Full(), 4),), ((Full(), 4), (Sliding(4), 4)), ((State(), 4), (Full(), 4))])
def test_the_decode_engine_expects_what_the_prefill_engine_closes_with(tokens: int, groups: Any) -> None:
    producer = side(*groups)
    request = arrived(producer, tokens)
    blocks = [list(range(1, 9)) for _ in groups]
    orders = step(producer, request, request.num_prompt_tokens, *blocks).growing
    producer.finished(request, blocks)
    orders += producer.take_metadata().growing
    consumer, _, external = consumer_of(DECODE, tokens, *groups)
    if not orders:  # it cannot leave out the only token
        assert external == 0
        return
    assert isinstance(orders[-1], ExtendOrder)
    assert orders[-1].closes
    assert external == min(orders[-1].tokens, tokens - 1)
    (rank,) = decode(consumer._params["r"].ticket).ranks
    assert isinstance(orders[0], OpenOrder)
    assert (rank.offer, rank.secret) == (orders[0].offer, orders[0].secret)


def test_windows_and_states_come_with_the_close() -> None:
    producer = side((Full(), 4), (Sliding(5), 4))
    request = arrived(producer, 12)
    _, extended = step(producer, request, 11, [1, 2, 3], [0, 5, 6]).growing
    assert isinstance(extended, ExtendOrder)
    assert not extended.closes
    assert [part.group for part in extended.blocks] == [0]
    producer.finished(request, ([1, 2, 3], [0, 5, 6]))
    (closed,) = producer.take_metadata().growing
    assert isinstance(closed, ExtendOrder)
    assert closed.closes
    assert closed.blocks == (Blocks(1, 1, [5, 6]),)


def test_what_attends_to_no_token_for_good_is_told_in_the_end_alone() -> None:
    producer = side((Sliding(5), 4))
    request = arrived(producer, 12)
    (opened,) = step(producer, request, 12, [1, 2, 3]).growing
    assert isinstance(opened, OpenOrder)


@pytest.mark.parametrize("output", [{"preempted_req_ids": {"r"}}, {"resumed": {"r"}}])
def test_a_prefill_whose_blocks_are_taken_ends_its_offer_and_is_offered_with_a_ticket_in_the_end(output: Any) -> None:
    producer = side()
    request = arrived(producer, 8)
    opened, _ = step(producer, request, 4, [1]).growing
    if "resumed" in output:
        output = {"scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=output["resumed"])}
    assert step(producer, request, 4, [1, 2], **output).growing == [WithdrawOrder("r", opened.offer)]
    params = producer.finished(request, ([1, 2],))
    metadata = producer.take_metadata()
    assert metadata.growing == []
    assert len(metadata.offers) == 1
    assert params is not None
    assert "kvd_ticket" in params
    assert "kvd_offer" not in params


def test_a_prefill_that_computes_again_what_it_said_was_complete_ends_its_offer() -> None:
    producer = side()
    request = arrived(producer, 8)
    opened, _ = step(producer, request, 6, [1, 2]).growing
    request.num_computed_tokens = 4
    assert step(producer, request, 2, [1, 2]).growing == [WithdrawOrder("r", opened.offer)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the scheduler's half reads."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_prefill_that_lacks_blocks_while_nothing_is_computed_ends_its_offer(clock: list[float]) -> None:
    """The decode engine keeps blocks for it, which the requests may need whose offers have those that it lacks."""
    producer = side()
    step(producer, arrived(producer, 4, PREFILL, "idle"), 0)
    clock[0] += 60
    request = arrived(producer, 8)
    (opened,) = step(producer, request, 0).growing
    for _ in range(int(STARVED_SECONDS) - 1):
        clock[0] += 1
        assert step(producer, request, 0).growing == []
    clock[0] += 1
    assert isinstance(opened, OpenOrder)
    assert step(producer, request, 0).growing == [WithdrawOrder("r", opened.offer)]
    assert step(producer, request, 8, [1, 2]).growing == []
    params = producer.finished(request, ([1, 2],))
    assert params is not None
    assert "kvd_ticket" in params


def test_a_prefill_keeps_its_offer_while_others_are_computed_and_once_it_has_begun(clock: list[float]) -> None:
    producer = side()
    other, request = arrived(producer, 40, PREFILL, "other"), arrived(producer, 8)
    step(producer, other, 4, [3])
    for _ in range(3):
        for _ in range(int(STARVED_SECONDS) - 1):
            clock[0] += 1
            assert step(producer, other, 0).growing == []
        assert step(producer, other, 4, [3]).growing == []
    (extended,) = step(producer, request, 4, [1]).growing
    assert isinstance(extended, ExtendOrder)
    assert not extended.closes
    for _ in range(60):
        clock[0] += 1
        assert step(producer, request, 0).growing == []


def test_prefills_keep_their_offers_while_the_engine_is_paused(clock: list[float]) -> None:
    """It makes steps in which it tries to schedule nothing: workers are told of requests, and offers are unread."""
    producer = side()
    for number in range(3 * int(STARVED_SECONDS)):
        arrived(producer, 8, ASKED | {"kvd_offer": f"kvdo1.{number:032}"}, str(number))
        for orders in ([OpenOrder], []):
            assert [type(order) for order in passed_step(producer).growing] == orders
        clock[0] += 1


def test_a_prefill_that_another_connector_has_begun_ends_its_offer_when_it_lacks_blocks(clock: list[float]) -> None:
    """VLLM asks of it no more, nor of those behind it."""
    producer, blocks = side(), Manager(lacks_blocks=True)
    bind(producer, blocks)
    request = arrived(producer, 8)
    (opened,) = step(producer, request, 0).growing
    producer.allocated(request, [table(1)], 0)
    request.num_computed_tokens = 4
    for _ in range(int(STARVED_SECONDS) - 1):
        clock[0] += 1
        blocks.allocate_slots(request)
        assert passed_step(producer).growing == []
    clock[0] += 1
    blocks.allocate_slots(request)
    assert isinstance(opened, OpenOrder)
    assert passed_step(producer).growing == [WithdrawOrder("r", opened.offer)]


def test_a_prefill_that_lacks_blocks_ends_its_offer_however_many_requests_come(clock: list[float]) -> None:
    producer = side()
    request = arrived(producer, 8)
    for number in range(10 * int(STARVED_SECONDS)):
        arrived(producer, 8, ASKED | {"kvd_offer": f"kvdo1.{number:032}"}, str(number))
        ended = [order.request for order in step(producer, request, 0).growing if isinstance(order, WithdrawOrder)]
        if ended:
            break
        clock[0] += 0.5
    assert ended[0] == "r"
    assert number == 2 * STARVED_SECONDS


def test_a_prefill_keeps_its_offer_while_a_long_step_computes_others(clock: list[float]) -> None:
    """VLLM plans a step ahead, with nothing to compute if it has no blocks, and the next one when the long one ends."""
    producer = side()
    other = arrived(producer, 40, PREFILL, "other")
    request = arrived(producer, 8)
    step(producer, other, 4, [3])
    step(producer, request, 0)
    clock[0] += 10 * STARVED_SECONDS
    assert step(producer, request, 0).growing == []


def test_an_aborted_prefill_ends_its_offer() -> None:
    producer = side()
    request = arrived(producer, 8)
    opened, _ = step(producer, request, 4, [1]).growing
    request.status = Status.FINISHED_ABORTED
    assert producer.finished(request, ([1],)) is None
    assert producer.take_metadata().growing == [WithdrawOrder("r", opened.offer)]


def test_two_requests_do_not_share_an_offer() -> None:
    producer = side()
    first, second = arrived(producer, 8), arrived(producer, 8, name="s")
    (opened, _) = step(producer, first, 4, [1]).growing
    assert opened.request == "r"
    second.num_computed_tokens = 8
    params = producer.finished(second, ([5, 6],))
    assert params is not None
    assert "kvd_ticket" in params


@pytest.mark.parametrize("offer", ["", "x" * 32, "kvdo1.short", "kvdo1." + "x" * 59, 7, None])
def test_what_a_router_should_not_draw_is_not_opened_and_not_pulled(offer: Any) -> None:
    producer = side()
    request = arrived(producer, 8, PREFILL | {"kvd_offer": offer})
    assert step(producer, request, 8, [1, 2]).growing == []
    asked = {
        "do_remote_prefill": True,
        "kvd_offer": offer,
        "kvd_producer": [{"daemon": "d", "address": "a", "pool": "p"}],
    }
    consumer, decoding, external = consumer_of(asked, 8)
    consumer.allocated(decoding, [table(5, 6)], external)
    (pull,) = consumer.take_metadata().pulls
    assert "kvd_offer must be" in pull.refused


@pytest.mark.parametrize("producer", [None, [], {}, [{"daemon": "d"}], [{"daemon": "d", "address": "a", "pool": 7}]])
def test_a_request_without_the_daemons_of_its_prefill_fails_by_name(producer: Any) -> None:
    consumer, decoding, external = consumer_of(DECODE | {"kvd_producer": producer}, 8)
    consumer.allocated(decoding, [table(5, 6)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.refused


@given(prompts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=5), min_size=2, max_size=2, unique_by=tuple))
def test_another_prompt_has_another_secret_under_the_same_name(prompts: list[list[int]]) -> None:
    made = []
    for prompt in prompts:
        producer = side()
        request = Request(list(prompt), dict(ASKED))
        producer.arrived(request)
        made += producer.take_metadata().growing
    assert isinstance(made[0], OpenOrder)
    assert isinstance(made[1], OpenOrder)
    assert made[0].offer == made[1].offer
    assert made[0].secret != made[1].secret


def test_secrets_show_in_no_representation() -> None:
    producer = side()
    (opened,) = step(producer, arrived(producer, 8), 0).growing
    assert isinstance(opened, OpenOrder)
    assert repr(opened.secret) not in repr(opened)
    assert OFFER not in repr(producer._growing._growing["r"].chosen)
