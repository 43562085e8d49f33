"""The scheduler's half: which blocks are offered, pulled and let go of, request by request."""

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.client import Blocks
from kvd.engines.vllm.metadata import RankEndpoint
from kvd.engines.vllm.scheduler import SchedulerSide
from kvd.layout import Chunked, Full, Sliding, State
from kvd.protocol.ticket import decode
from tests.engines.vllm.blocks import Manager, bind

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Status(enum.Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2
    FINISHED_ERROR = 3


@dataclass
class Request:
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    request_id: str = "r"
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    mm_features: tuple[Any, ...] = ()
    lora_request: Any = None
    status: Status = Status.FINISHED_LENGTH_CAPPED
    num_in_flight_tokens: int = 0
    max_tokens: int = 5
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False)
    _all_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_computed_tokens = len(self.prompt_token_ids)
        self._all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


def table(*ids: int, cached: int = 0) -> list[Block]:
    return [Block(block, b"hash" if i < cached else None) for i, block in enumerate(ids)]


def side(*groups: Any, ranks: int = 1) -> SchedulerSide:
    made = SchedulerSide(groups or ((Full(), 4),), ranks)
    bind(made, Manager())
    made.set_endpoints({rank: endpoint(rank) for rank in range(ranks)})
    return made


def endpoint(rank: int) -> RankEndpoint:
    return RankEndpoint(f"d{rank}", f"tcp://h:{rank}", 7, f"vllm-{rank}")


def prefilled(producer: SchedulerSide, tokens: int, *tables: list[int], consumers: int = 1) -> dict[str, Any]:
    request = Request(list(range(tokens)), PREFILL | {"kvd_consumers": consumers})
    producer.arrived(request)
    request.num_computed_tokens = request.num_prompt_tokens
    params = producer.finished(request, tables)
    assert params is not None
    return params


def decoded(consumer: SchedulerSide, params: dict[str, Any], tokens: int, computed: int = 0) -> tuple[Request, int]:
    request = Request(list(range(tokens)), params)
    consumer.arrived(request)
    external = consumer.external(request, computed)
    assert external is not None
    return request, external


def test_a_prefill_ends_in_an_offer_and_a_ticket_of_all_ranks() -> None:
    producer = side(ranks=2)
    params = prefilled(producer, 9, [3, 1, 2, 0])
    (offer,) = producer.take_metadata().offers
    assert (offer.request, offer.tokens, offer.blocks) == ("r", 9, (Blocks(0, 0, [3, 1, 2]),))
    ticket = decode(params["kvd_ticket"])
    assert [(rank.pool, rank.address, rank.incarnation, rank.offer) for rank in ticket.ranks] == [
        ("vllm-0", "tcp://h:0", 7, offer.offer),
        ("vllm-1", "tcp://h:1", 7, offer.offer),
    ]
    assert ticket.tokens == 9
    assert params["do_remote_prefill"]
    assert not params["do_remote_decode"]


def test_the_decode_side_brings_all_but_the_token_it_computes_itself() -> None:
    params, consumer = prefilled(side(), 9, [3, 1, 2]), side()
    request, external = decoded(consumer, params, 9)
    assert external == 8
    consumer.allocated(request, [table(5, 6, 7)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.waits
    assert pull.blocks == (Blocks(0, 0, [5, 6]),)
    assert pull.ticket == params["kvd_ticket"]


@pytest.mark.parametrize(("tokens", "blocks"), [(2, [5]), (4, [5]), (5, [5]), (6, [5, 6]), (8, [5, 6])])
def test_short_prompts_and_block_boundaries_bring_what_the_last_token_attends_to(
    tokens: int, blocks: list[int]
) -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), tokens, [3, 1]), tokens)
    consumer.allocated(request, [table(5, 6)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.blocks == (Blocks(0, 0, blocks),)


def test_blocks_of_the_own_prefix_cache_are_not_brought() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 13, [3, 1, 2, 9]), 13, computed=8)
    assert external == 4
    consumer.allocated(request, [table(5, 6, 7, 8, cached=2)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.blocks == (Blocks(0, 2, [7]),)


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (9, 8)])
def test_a_request_that_misses_nothing_lets_the_producer_go(tokens: int, computed: int) -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), tokens, [3, 1, 2]), tokens, computed=computed)
    assert external == 0
    consumer.allocated(request, [table(5, 6, 7, cached=2)], 0)
    (pull,) = consumer.take_metadata().pulls
    assert (pull.blocks, pull.waits, pull.refused) == ((), False, "")


def test_each_group_brings_the_positions_of_its_window() -> None:
    groups = ((Full(), 4), (Sliding(6), 4))
    consumer = side(*groups)
    request, external = decoded(consumer, prefilled(side(*groups), 18, [1, 2, 3, 4, 5], [0, 0, 0, 9, 8]), 18)
    consumer.allocated(request, [table(11, 12, 13, 14, 15), table(0, 0, 0, 18, 19)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.blocks == (Blocks(0, 0, [11, 12, 13, 14, 15]), Blocks(1, 3, [18, 19]))


def test_cached_blocks_between_missing_ones_are_not_overwritten() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 17, [1, 2, 3, 4, 5]), 17)
    blocks = table(11, 12, 13, 14, 15)
    blocks[2].block_hash = b"hash"
    consumer.allocated(request, [blocks], external)
    (pull,) = consumer.take_metadata().pulls
    assert "prefix cache" in pull.refused


def test_blocks_before_a_gap_are_not_offered() -> None:
    producer = side((Full(), 4), (Sliding(6), 4))
    prefilled(producer, 18, [1, 2, 3, 4, 5], [9, 0, 0, 8, 7])
    (offer,) = producer.take_metadata().offers
    assert offer.blocks == (Blocks(0, 0, [1, 2, 3, 4, 5]), Blocks(1, 3, [8, 7]))


@pytest.mark.parametrize(
    ("window", "tokens", "left_out"),
    [
        (Sliding(6), 17, True),  # after 17 tokens the window begins at 12; computing token 16 needs 11
        (Sliding(6), 18, False),
        (Chunked(8), 16, True),  # after 16 tokens nothing is needed; computing token 15 needs 8 to 14
        (Chunked(8), 17, False),
        (Full(), 17, False),
        (State(), 16, True),  # the state after the last token has taken it in
        (State(), 18, True),
    ],
)
def test_a_prefill_leaves_out_its_last_token_where_the_decode_side_needs_a_block_it_would_drop(
    window: Any, tokens: int, left_out: bool
) -> None:
    producer = side((Full(), 4), (window, 4))
    request = Request(list(range(tokens)), dict(PREFILL))
    producer.arrived(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == len(request._all_token_ids)
    assert request.num_prompt_tokens == tokens - left_out
    consumer = side((Full(), 4), (window, 4))
    params = prefilled(producer, tokens, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert decoded(consumer, params, tokens)[1] == tokens - 1


STATES = ((Full(), 4), (State(), 4))


def test_of_a_state_the_last_block_is_offered_and_pulled_alone() -> None:
    """Not the one of an earlier chunk, nor those that vLLM keeps for drafts."""
    producer, consumer = side(*STATES), side(*STATES)
    params = prefilled(producer, 12, [1, 2, 3], [0, 9, 8, 7, 6])
    (offer,) = producer.take_metadata().offers
    assert (offer.tokens, offer.blocks) == (11, (Blocks(0, 0, [1, 2, 3]), Blocks(1, 2, [8])))
    request, external = decoded(consumer, params, 12, computed=4)
    assert external == 7
    consumer.allocated(request, [table(11, 12, 13, cached=1), table(19, 0, 18, 17, 16, cached=1)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.blocks == (Blocks(0, 1, [12, 13]), Blocks(1, 2, [18]))


def test_one_state_for_all_of_a_sequence_is_its_first_block() -> None:
    groups = ((Full(), 4), (State(), 2048))
    producer, consumer = side(*groups), side(*groups)
    params = prefilled(producer, 12, [1, 2, 3], [9, 8, 7])
    (offer,) = producer.take_metadata().offers
    assert offer.blocks[1] == Blocks(1, 0, [9])
    request, external = decoded(consumer, params, 12)
    consumer.allocated(request, [table(11, 12, 13), table(19, 18, 17)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.blocks[1] == Blocks(1, 0, [19])


@pytest.mark.parametrize(("computed", "in_flight"), [(12, 0), (13, 1), (12, 1)])
def test_a_state_that_has_gone_on_after_the_prompt_is_not_offered(computed: int, in_flight: int) -> None:
    """Or is about to: a step is under way."""
    producer = side(*STATES)
    request = Request(list(range(12)), dict(PREFILL))
    producer.arrived(request)
    request.num_computed_tokens, request.num_in_flight_tokens = computed, in_flight
    assert producer.finished(request, [[1, 2, 3, 4], [0, 0, 8, 7]]) is None
    assert producer.take_metadata().offers == []


def test_a_state_after_the_whole_prompt_is_let_go_of_and_the_prompt_computed() -> None:
    """A prefill of a model with several MTP modules cannot leave out as many tokens as a short prompt has."""
    producer = SchedulerSide(STATES, 1, 9)
    producer.set_endpoints({0: RankEndpoint("d0", "tcp://h:0", 7, "vllm-0")})
    consumer = side(*STATES)
    request, external = decoded(consumer, prefilled(producer, 6, [1, 2], [0, 9]), 6)
    assert external == 0
    consumer.allocated(request, [table(11, 12), table(0, 19)], external)
    (pull,) = consumer.take_metadata().pulls
    assert (pull.blocks, pull.waits, pull.refused) == ((), False, "")


def test_a_ticket_of_another_prompt_fails_the_load_of_a_state_too() -> None:
    consumer = side(*STATES)
    params = prefilled(side(*STATES), 12, [1, 2, 3], [0, 0, 8])
    request, external = decoded(consumer, params | {"kvd_prompt": 1}, 12)
    assert external == 11
    consumer.allocated(request, [table(11, 12, 13), table(0, 0, 18)], external)
    (pull,) = consumer.take_metadata().pulls
    assert "mix up requests" in pull.refused


@pytest.mark.parametrize(("lookahead", "left_out"), [(0, 0), (1, 0), (3, 2), (9, 0), (10, 0)])
def test_a_prefill_leaves_out_the_tokens_that_several_mtp_modules_look_ahead(lookahead: int, left_out: int) -> None:
    """A prompt that is no longer than that is computed whole."""
    producer = SchedulerSide(((Full(), 4),), 1, lookahead)
    producer.set_endpoints({0: RankEndpoint("d0", "tcp://h:0", 7, "vllm-0")})
    request = Request(list(range(8)), dict(PREFILL))
    producer.arrived(request)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == len(request._all_token_ids) == 8 - left_out
    request.num_computed_tokens = request.num_prompt_tokens
    params = producer.finished(request, [[3, 1]])
    assert params is not None
    assert decoded(side(), params, 8)[1] == min(7, 8 - left_out)


def test_a_request_is_pulled_once_however_often_it_is_scheduled() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    consumer.allocated(request, [table(5, 6, 7)], external)
    consumer.allocated(request, [table(5, 6, 7)], 0)
    assert len(consumer.take_metadata().pulls) == 1
    assert consumer.external(request, 0) == 0


def test_the_offer_of_a_request_that_is_not_scheduled_at_once_is_held_as_one_consumer_with_its_pull() -> None:
    params, consumer = prefilled(side(), 9, [3, 1, 2]), side()
    request = Request(list(range(9)), params)
    consumer.arrived(request)
    (hold,) = consumer.take_metadata().holds
    assert (hold.request, hold.ticket) == ("r", params["kvd_ticket"])
    assert consumer.take_metadata().holds == []
    consumer.allocated(request, [table(5, 6, 7)], consumer.external(request, 0))
    metadata = consumer.take_metadata()
    assert [(pull.consumer, pull.waits) for pull in metadata.pulls] == [(hold.hold, True)]
    assert metadata.holds == []


def test_the_offer_of_a_request_that_is_scheduled_at_once_is_not_held() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    consumer.allocated(request, [table(5, 6, 7)], external)
    metadata = consumer.take_metadata()
    assert (metadata.holds, metadata.pulls[0].consumer) == ([], "")


def test_an_abort_of_a_request_that_queues_lets_the_producer_go_as_the_consumer_that_held() -> None:
    consumer = side()
    request, _ = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    (hold,) = consumer.take_metadata().holds
    consumer.finished(request, [[]])
    (pull,) = consumer.take_metadata().pulls
    assert (pull.waits, pull.consumer) == (False, hold.hold)


def test_an_abort_during_the_pull_cancels_it() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    consumer.allocated(request, [table(5, 6, 7)], external)
    (pull,) = consumer.take_metadata().pulls
    assert consumer.finished(request, [[5, 6, 7]]) is None
    assert consumer.take_metadata().cancels == [pull.pull]


def test_an_abort_after_the_pull_cancels_nothing() -> None:
    consumer = side()
    request, external = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    consumer.allocated(request, [table(5, 6, 7)], external)
    consumer.received(["r"])
    consumer.finished(request, [[5, 6, 7]])
    assert consumer.take_metadata().cancels == []


def test_an_abort_before_the_pull_lets_the_producer_go() -> None:
    consumer = side()
    request, _ = decoded(consumer, prefilled(side(), 9, [3, 1, 2]), 9)
    consumer.finished(request, [[]])
    (pull,) = consumer.take_metadata().pulls
    assert not pull.waits


def test_a_request_that_the_decode_server_rejected_lets_the_producer_go() -> None:
    """VLLM's API server sends its parameters with a prompt of one token, to be aborted at once."""
    consumer, params = side(), prefilled(side(), 9, [3, 1, 2])
    request = Request([0], params, status=Status.FINISHED_ABORTED)
    consumer.arrived(request)
    assert consumer.finished(request, [[]]) is None
    (pull,) = consumer.take_metadata().pulls
    assert (pull.ticket, pull.blocks, pull.waits, pull.refused) == (params["kvd_ticket"], (), False, "")


class Samples:
    """Two requests of a decode engine with one ticket for nine tokens in blocks of four; the first one pulls."""

    def __init__(self, consumers: int = 1) -> None:
        self.scheduler, self.params = side(), prefilled(side(), 9, [3, 1, 2], consumers=consumers)
        self.first = self.arrives("first")
        self.second = self.arrives("second")
        self.scheduler.allocated(self.first, [table(5, 6, 7)], self.scheduler.external(self.first, 0) or 0)

    def arrives(self, name: str) -> Request:
        request = Request(list(range(9)), self.params, request_id=name)
        self.scheduler.arrived(request)
        return request


def test_of_several_requests_with_one_ticket_one_pulls_and_the_others_find_its_blocks_in_the_cache() -> None:
    """An offer for one consumer ends with the first one's pull: the samples of one prompt share it."""
    samples = Samples()
    scheduler, second = samples.scheduler, samples.second
    assert scheduler.external(second, 0) is None
    metadata = scheduler.take_metadata()
    assert (len(metadata.pulls), metadata.holds) == (1, [])
    scheduler.received(["first"])
    assert scheduler.external(second, 8) == 0
    scheduler.allocated(second, [table(5, 6, 8, cached=2)], 0)
    assert scheduler.external(samples.arrives("a later one"), 0) == 0
    metadata = scheduler.take_metadata()
    assert (metadata.pulls, metadata.holds) == ([], [])  # the offer has been over since


def test_requests_for_which_the_router_had_the_offer_stand_pull_each_for_itself() -> None:
    samples = Samples(consumers=2)
    assert samples.scheduler.external(samples.second, 0) == 8
    samples.scheduler.received(["first"])
    assert samples.scheduler.external(samples.second, 0) == 8


def test_of_tickets_that_were_pulled_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.engines.vllm.tickets.MAX_ENDED_TICKETS", 1)
    samples = Samples()
    samples.scheduler.received(["first"])
    again = Request(list(range(9)), prefilled(side(), 9, [3, 1, 2]), request_id="again")
    samples.scheduler.arrived(again)
    samples.scheduler.allocated(again, [table(5, 6, 7)], 8)
    samples.scheduler.received(["again"])
    assert samples.scheduler.external(samples.second, 0) == 8


def test_where_the_load_of_the_request_that_pulls_fails_the_next_one_pulls() -> None:
    samples = Samples()
    scheduler, second = samples.scheduler, samples.second
    scheduler.received(["first"], ["first"])
    assert scheduler.external(samples.first, 0) == 0
    scheduler.allocated(samples.first, [table(5, 6, 7)], 0)
    assert scheduler.external(second, 0) == 8
    scheduler.received(["first"])
    assert scheduler.external(second, 0) == 8
    scheduler.allocated(second, [table(8, 9, 10)], 8)
    scheduler.received(["second"])
    assert scheduler.external(samples.arrives("third"), 0) == 0


def test_where_vllm_ends_the_request_whose_load_fails_the_next_one_pulls_too() -> None:
    """With the policy "fail" it does so before it tells the connector that the load has failed."""
    samples = Samples()
    scheduler, second = samples.scheduler, samples.second
    scheduler.take_metadata()
    samples.first.status = Status.FINISHED_ERROR
    scheduler.finished(samples.first, [[5, 6, 7]])
    scheduler.received(["first"], ["first"])
    assert scheduler.external(second, 0) == 8
    assert [hold.request for hold in scheduler.take_metadata().holds] == ["second"]


@pytest.mark.parametrize("end", ["aborted in its pull", "aborted as it queues", "all in the cache"])
def test_a_ticket_that_was_not_wanted_is_not_pulled_again(end: str) -> None:
    """Its offer is over. So it is for a request that a router sends only to have the offer let go of."""
    samples, scheduler = Samples(), side()
    if end == "aborted in its pull":
        scheduler = samples.scheduler
        scheduler.take_metadata()
        scheduler.finished(samples.first, [[5, 6, 7]])
        assert len(scheduler.take_metadata().cancels) == 1
    else:
        first, _ = decoded(scheduler, samples.params, 9)
        if end == "aborted as it queues":
            scheduler.finished(first, [[]])
        else:
            scheduler.allocated(first, [table(5, 6, 7, cached=3)], 0)
        assert [pull.waits for pull in scheduler.take_metadata().pulls] == [False]
    last = Request(list(range(9)), samples.params, request_id="last")
    scheduler.arrived(last)
    external = scheduler.external(last, 0)
    assert external == (0 if end == "all in the cache" else 8)
    scheduler.allocated(last, [table(8, 9, 10)], external or 0)
    metadata = scheduler.take_metadata()
    assert metadata.holds == []
    if end == "all in the cache":
        assert metadata.pulls == []
    else:  # it is not computed here, either
        assert [(pull.ticket, pull.refused) for pull in metadata.pulls] == [
            ("", "a request with its ticket was aborted, so its offer is over")
        ]


@pytest.mark.parametrize("end", ["read", "aborted in its pull", "aborted as it queues"])
def test_a_request_that_holds_an_offer_pulls_what_another_one_has_not_read(end: str) -> None:
    """The offer is not over before it lets go, too. What was read it finds in the prefix cache."""
    scheduler, params = side(), prefilled(side(), 9, [3, 1, 2])
    one, two = (Request(list(range(9)), params, request_id=name) for name in ("one", "two"))
    scheduler.arrived(one)
    scheduler.arrived(two)
    assert len(scheduler.take_metadata().holds) == 2
    if end != "aborted as it queues":
        scheduler.allocated(one, [table(5, 6, 7)], scheduler.external(one, 0) or 0)
        scheduler.take_metadata()
    if end == "read":
        scheduler.received(["one"])
    else:
        scheduler.finished(one, [[5, 6, 7]])
    assert scheduler.external(two, 0) == (0 if end == "read" else 8)


def test_a_request_that_waits_for_anothers_pull_and_gets_nothing_is_held_again() -> None:
    samples = Samples()
    assert samples.scheduler.take_metadata().holds == []
    samples.scheduler.received(["first"], ["first"])  # the load failed
    assert [hold.request for hold in samples.scheduler.take_metadata().holds] == ["second"]


def test_a_prompt_that_another_ones_ticket_came_with_does_not_wait_for_its_pull() -> None:
    samples = Samples()
    other = Request([7] * 9, samples.params, request_id="mixed up")
    samples.scheduler.arrived(other)
    assert samples.scheduler.external(other, 0) == 8
    samples.scheduler.allocated(other, [table(8, 9, 10)], 8)
    assert [bool(pull.refused) for pull in samples.scheduler.take_metadata().pulls] == [False, True]


def test_an_aborted_prefill_is_not_offered() -> None:
    producer = side()
    request = Request(list(range(9)), dict(PREFILL), status=Status.FINISHED_ABORTED)
    assert producer.finished(request, [[1, 2, 3]]) is None
    assert producer.take_metadata().offers == []


def test_a_request_of_no_other_engine_is_left_alone() -> None:
    consumer = side()
    request, external = decoded(consumer, {}, 9)
    assert external == 0
    consumer.allocated(request, [table(5, 6, 7)], 0)
    assert consumer.finished(request, [[5, 6, 7]]) is None
    metadata = consumer.take_metadata()
    assert (metadata.pulls, metadata.offers, metadata.cancels) == ([], [], [])


@pytest.mark.parametrize("damage", ["none", "garbage", "other prompt", "longer"])
def test_a_ticket_that_cannot_be_this_prompts_fails_the_request(damage: str) -> None:
    params, tokens = prefilled(side(), 9, [3, 1, 2]), 9
    if damage == "none":
        del params["kvd_ticket"]
    elif damage == "garbage":
        params["kvd_ticket"] = "kvd1.AAAA"
    elif damage == "other prompt":
        params["kvd_prompt"] += 1
    else:
        tokens = 8
    consumer = side()
    request, external = decoded(consumer, params, tokens)
    assert external == tokens - 1
    consumer.allocated(request, [table(5, 6, 7)], external)
    (pull,) = consumer.take_metadata().pulls
    assert pull.refused


@pytest.mark.parametrize(
    ("path", "adapter_paths", "same"), [("/a", True, True), ("/b", True, False), ("/b", False, True)]
)
def test_an_adapter_has_one_path_on_both_sides_unless_the_sides_have_their_own(
    path: str, adapter_paths: bool, same: bool
) -> None:
    def adapted(prompt: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name="sql", lora_path=prompt)

    producer = SchedulerSide(((Full(), 4),), 1, adapter_paths=adapter_paths)
    producer.set_endpoints({0: RankEndpoint("d0", "tcp://h:0", 7, "vllm-0")})
    params = producer.finished(Request(list(range(9)), dict(PREFILL), lora_request=adapted("/a")), [[3, 1, 2]])
    consumer = SchedulerSide(((Full(), 4),), 1, adapter_paths=adapter_paths)
    request = Request(list(range(9)), params, lora_request=adapted(path))
    consumer.arrived(request)
    consumer.allocated(request, [table(5, 6, 7)], consumer.external(request, 0))
    (pull,) = consumer.take_metadata().pulls
    assert (pull.refused == "") is same


def test_a_prefill_that_leaves_the_last_token_out_leaves_all_of_it_out() -> None:
    """A prompt in which tokens and embeddings take turns has both, and vLLM ends at lengths that differ."""
    producer = side((Sliding(6), 4))
    embeddings, of_tokens = list(range(17)), [True] * 17
    request = Request(list(range(17)), dict(PREFILL), prompt_embeds=embeddings, prompt_is_token_ids=of_tokens)
    producer.arrived(request)
    lengths = request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids, request._all_token_ids
    assert {request.num_prompt_tokens, *map(len, lengths)} == {16}


def test_names_are_never_used_twice_and_fit_their_bound() -> None:
    producer, names = side(), set()
    for _ in range(3):
        request = Request(list(range(9)), dict(PREFILL), request_id="ä" * 400)
        producer.finished(request, [[3, 1, 2]])
        (order,) = producer.take_metadata().offers
        assert len(order.offer.encode()) <= 256
        names.add(order.offer)
    assert len(names) == 3


def test_the_ticket_has_the_secret_that_the_workers_offer_with_and_every_prefill_another() -> None:
    producer, secrets = side(ranks=2), set()
    for _ in range(3):
        params = prefilled(producer, 9, [3, 1, 2])
        (order,) = producer.take_metadata().offers
        assert {rank.secret for rank in decode(params["kvd_ticket"]).ranks} == {order.secret}
        assert len(order.secret) == 16
        secrets.add(order.secret)
    assert len(secrets) == 3


@pytest.mark.parametrize(("said", "consumers"), [({}, 1), ({"kvd_consumers": 4}, 4), ({"kvd_consumers": 0}, 0)])
def test_an_offer_is_for_as_many_consumers_as_the_router_says(said: dict[str, int], consumers: int) -> None:
    producer = side()
    producer.finished(Request(list(range(9)), {**PREFILL, **said}), [[3, 1, 2]])
    (order,) = producer.take_metadata().offers
    assert order.consumers == consumers


@pytest.mark.parametrize("said", [-1, 1 << 40, "2", True, None])
def test_a_number_of_consumers_that_is_none_is_not_offered_to(said: object, caplog: pytest.LogCaptureFixture) -> None:
    producer = side()
    assert producer.finished(Request(list(range(9)), {**PREFILL, "kvd_consumers": said}), [[3, 1, 2]]) is None
    assert producer.take_metadata().offers == []
    assert "kvd_consumers" in caplog.text


def loading(engine: SchedulerSide, manager: Manager, name: str, prompt: int, ids: list[int]) -> Request:
    """A request that waits for a pull into these blocks."""
    params = prefilled(side(), prompt, list(range(1, len(ids) + 1)))
    request = Request(list(range(prompt)), params, request_id=name)
    engine.arrived(request)
    external = engine.external(request, 0)
    assert external
    manager.take(name, ids)
    engine.allocated(request, manager.get_blocks(name).blocks, external)
    return request


def test_the_blocks_of_a_failed_load_are_free_before_vllm_comes_to_its_request() -> None:
    engine, manager = side(), Manager()
    bind(engine, manager)
    loading(engine, manager, "a", 13, [1, 2, 3, 4])
    engine.received([], failed=["a"])
    assert manager.freed == []  # a rank's daemon may still write to them
    engine.received(["a"])
    assert sorted(manager.freed) == [1, 2, 3, 4]


def test_the_blocks_of_a_failed_load_whose_request_has_ended_are_left_to_vllm() -> None:
    engine, manager = side(), Manager()
    bind(engine, manager)
    request = loading(engine, manager, "a", 13, [1, 2, 3, 4])
    engine.received([], failed=["a"])
    engine.finished(request, ([1, 2, 3, 4],))
    engine.received(["a"])
    assert manager.freed == []


def test_a_failed_load_that_lacks_blocks_to_be_computed_lets_those_pass_that_are_loaded() -> None:
    engine, manager = side(), Manager(num_gpu_blocks=9, block_tokens=(4,))
    bind(engine, manager)
    failed = loading(engine, manager, "a", 13, [1, 2, 3, 4])
    loaded = loading(engine, manager, "b", 14, [5, 6, 7, 8])
    engine.received(["a", "b"], failed=["a"])
    manager.take("other", [1])
    assert engine.external(failed, 0) is None
    engine.allocated(loaded, manager.get_blocks("b").blocks, 0)
    assert engine.external(failed, 0) == 0


def test_no_load_begins_while_one_that_failed_waits_for_blocks() -> None:
    engine, manager = side(), Manager()
    bind(engine, manager)
    failed = loading(engine, manager, "a", 13, [1, 2, 3, 4])
    engine.received(["a"], failed=["a"])
    later = Request(list(range(14)), prefilled(side(), 14, [1, 2, 3, 4]), request_id="b")
    engine.arrived(later)
    assert engine.external(later, 0) is None
    assert engine.external(failed, 0) == 0
    engine.allocated(failed, (table(1, 2, 3, 4),), 0)
    assert engine.external(later, 0) == 13
