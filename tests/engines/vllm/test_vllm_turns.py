"""What is kept of answers for the next turn, for how long, and what the next turn's prefill makes of it."""

from collections import Counter
from typing import Any

import pytest

from kvd.client import Blocks
from kvd.engines.vllm.growing.scheduler import STARVED_SECONDS
from kvd.engines.vllm.metadata import ExtendOrder, OpenOrder, WithdrawOrder
from kvd.engines.vllm.scheduler import SchedulerSide
from kvd.engines.vllm.turns import kept as kept_turns
from kvd.engines.vllm.turns.scheduler import TurnPolicy
from kvd.layout import Full, Sliding
from kvd.protocol.ticket import decode
from tests.engines.vllm.blocks import Manager, bind
from tests.engines.vllm.test_vllm_growing_scheduler import passed_step, step
from tests.engines.vllm.test_vllm_scheduler import PREFILL, Request, Status, endpoint, prefilled, table

BLOCK = 32
CONSUMER = {"do_remote_prefill": True}


def side(manager: Manager | None = None, *groups: Any, ranks: int = 1, **policy: Any) -> SchedulerSide:
    made = SchedulerSide(groups or ((Full(), BLOCK),), ranks, turns=TurnPolicy(**policy))
    made.set_endpoints({rank: endpoint(rank) for rank in range(ranks)})
    bind(made, manager or Manager())
    return made


def decode_turn(
    engine: SchedulerSide, manager: Manager, tokens: list[int], *ids: list[int], name: Any = "t", answer: int = 100
) -> dict[str, Any] | None:
    """An answer of `answer` tokens, of which the last was not computed on, has ended."""
    request = Request(tokens[:-answer], CONSUMER | {"kvd_turn": name}, request_id=f"r{name}")
    request._all_token_ids = list(tokens)
    request.num_computed_tokens = len(tokens) - 1
    params = engine.answered(request, manager.take(request.request_id, *ids))
    manager.end(request.request_id)
    return params


def asked(engine: SchedulerSide, name: str) -> dict[str, Any] | None:
    return engine.answered(Request([0], {"kvd_turn": name}, request_id="ask"), ([9],))


def resumed(engine: SchedulerSide, params: dict[str, Any], tokens: list[int], computed: int = 0) -> tuple[Request, int]:
    request = Request(tokens, PREFILL | params, request_id="next")
    engine.arrived(request)
    external = engine.external(request, computed)
    assert external is not None
    return request, external


def passed_over(engine: SchedulerSide, blocks: int) -> Request:
    """A request that vLLM has come to, and that lacks the blocks for it."""
    request = Request(list(range(BLOCK * blocks)), None, request_id="new")
    engine.arrived(request)
    assert engine.external(request, 0) == 0
    return request


SEQUENCE = list(range(300))
NINE = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def test_an_answer_is_kept_and_its_parameters_are_given_to_who_names_it_once() -> None:
    manager = Manager()
    engine = side(manager, ranks=2)
    assert decode_turn(engine, manager, SEQUENCE, *NINE) is None
    (offer,) = engine.take_metadata().offers
    assert (offer.tokens, offer.blocks, offer.turn_ttl) == (299, (Blocks(0, 0, NINE[0]),), 300.0)
    assert manager.freed == []
    assert asked(engine, "other") is None
    params = asked(engine, "t")
    assert params is not None
    assert decode(params["kvd_ticket"]).tokens == 299
    assert (params["do_remote_decode"], params["do_remote_prefill"], params["kvd_ttl"]) == (True, False, 300.0)
    assert asked(engine, "t") is None
    engine.turns.kept.ended([(offer.offer, "read")])
    assert manager.freed == []
    engine.turns.kept.ended([(offer.offer, "read")])
    assert sorted(manager.freed) == NINE[0]
    assert engine.turns.take_counts().kept_turns == ["read"]


def test_a_turn_that_one_rank_has_lost_is_given_up_on_the_others_and_to_nobody() -> None:
    manager = Manager()
    engine = side(manager, ranks=2)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    (offer,) = engine.take_metadata().offers
    engine.turns.kept.ended([(offer.offer, "daemon lost")])
    assert engine.take_metadata().withdrawals == [offer.offer]
    assert asked(engine, "t") is None
    engine.turns.kept.ended([(offer.offer, "withdrawn")])
    assert sorted(manager.freed) == NINE[0]
    assert engine.turns.take_counts().kept_turns == ["daemon lost"]


@pytest.mark.parametrize(("name", "every", "returned"), [(True, False, True), (None, True, True), (None, False, False)])
def test_an_answer_has_its_parameters_where_that_is_asked_for(name: Any, every: bool, returned: bool) -> None:
    manager = Manager()
    params = decode_turn(side(manager, every=every), manager, SEQUENCE, *NINE, name=name)
    assert (params is not None) is returned


def test_an_aborted_answer_and_a_step_too_many_are_not_offered() -> None:
    manager = Manager()
    engine = side(manager)
    request = Request(SEQUENCE, CONSUMER | {"kvd_turn": "t"}, status=Status.FINISHED_ABORTED)
    assert engine.answered(request, manager.take("r", *NINE)) is None
    request = Request(SEQUENCE[:200], CONSUMER | {"kvd_turn": "t"})
    request._all_token_ids, request.num_computed_tokens, request.num_in_flight_tokens = SEQUENCE, 300, 1
    engine.answered(request, manager.take("r", *NINE))
    (offer,) = engine.take_metadata().offers
    assert offer.tokens == 299


def test_the_next_turn_pulls_what_it_misses_and_then_offers_its_prefill() -> None:
    manager, prefill = Manager(), side()
    engine = side(manager)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    params = asked(engine, "t")
    assert params is not None
    request, external = resumed(prefill, params, [*SEQUENCE, *range(50)], computed=192)
    assert external == 299 - 192
    prefill.allocated(request, [table(*range(11, 22), cached=6)], external)
    (pull,) = prefill.take_metadata().pulls
    assert (pull.ticket, pull.waits, pull.blocks) == (params["kvd_ticket"], True, (Blocks(0, 6, [17, 18, 19, 20]),))
    prefill.received(["next"])
    assert prefill.turns.take_counts().turns == ["pulled"]
    request.num_computed_tokens = 350
    offered = prefill.finished(request, [list(range(11, 22))])
    assert offered is not None
    assert decode(offered["kvd_ticket"]).tokens == 350


OFFER = {"kvd_offer": "kvdo1." + 32 * "x"}


def test_a_turn_that_both_servers_got_at_once_extends_its_offer_by_what_it_has_pulled_and_computed() -> None:
    manager, prefill = Manager(), side()
    engine = side(manager)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    request, external = resumed(prefill, (asked(engine, "t") or {}) | OFFER, [*SEQUENCE, *range(50)], computed=192)
    request.num_computed_tokens = 192
    prefill.allocated(request, [table(*range(11, 22), cached=6)], external)
    metadata = step(prefill, request, 0)
    (opened,) = metadata.growing  # nothing of it, while the turn is on its way
    assert isinstance(opened, OpenOrder)
    assert [pull.waits for pull in metadata.pulls] == [True]
    prefill.received(["next"])
    request.num_computed_tokens = 299
    blocks = list(range(11, 22))
    assert step(prefill, request, 51, blocks).growing == [
        ExtendOrder("next", opened.offer, 350, (Blocks(0, 0, blocks),))
    ]
    answer = prefill.finished(request, [blocks])
    assert prefill.take_metadata().growing == [ExtendOrder("next", opened.offer, 350, (), closes=True)]
    assert answer is not None
    assert answer["kvd_offer"] == OFFER["kvd_offer"]


def pulled_turn(blocks: Manager | None = None) -> tuple[SchedulerSide, Request, Any]:
    """A turn whose earlier blocks are on their way, its prefill engine, and the order that has opened its offer."""
    manager, prefill = Manager(), side(blocks)
    engine = side(manager)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    request, external = resumed(prefill, (asked(engine, "t") or {}) | OFFER, [*SEQUENCE, *range(50)])
    prefill.allocated(request, [table(*range(11, 22))], external)
    (opened,) = step(prefill, request, 0).growing
    return prefill, request, opened


def test_a_turn_that_is_pulled_for_long_keeps_its_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not one that lacks blocks, though nothing is computed."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    prefill, request, opened = pulled_turn()
    for _ in range(60):
        now[0] += 1
        assert step(prefill, request, 0).growing == []
    prefill.received(["next"])
    (extended,) = step(prefill, request, 350, list(range(11, 22))).growing
    assert extended.offer == opened.offer


def test_a_turn_lacks_blocks_only_after_its_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have to wait for its first step, with nothing computed before it either."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    prefill, request, opened = pulled_turn()
    for _ in range(2 * int(STARVED_SECONDS)):
        now[0] += 1
        assert step(prefill, request, 0).growing == []
    prefill.received(["next"])
    for _ in range(int(STARVED_SECONDS) - 1):
        now[0] += 1
        assert step(prefill, request, 0).growing == []
    now[0] += 1
    assert step(prefill, request, 0).growing == [WithdrawOrder("next", opened.offer)]


def test_a_turn_that_has_come_keeps_its_offer_while_the_engine_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM asks nothing of it any more: that it lacks blocks for it shows that it comes to it."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    blocks = Manager(lacks_blocks=True)
    prefill, request, opened = pulled_turn(blocks)
    prefill.received(["next"])
    for _ in range(3 * int(STARVED_SECONDS)):
        now[0] += 1
        assert passed_step(prefill).growing == []
    for _ in range(int(STARVED_SECONDS)):
        now[0] += 1
        blocks.allocate_slots(request)
        assert passed_step(prefill).growing == []
    now[0] += 1
    blocks.allocate_slots(request)
    assert passed_step(prefill).growing == [WithdrawOrder("next", opened.offer)]


def test_a_turn_whose_pull_has_failed_does_not_keep_its_offer_while_its_blocks_are_in_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing extends the offer, for which a decode engine waits, until the daemon has freed them."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    prefill, request, opened = pulled_turn()
    prefill.received([], ["next"])
    for _ in range(int(STARVED_SECONDS) - 1):
        now[0] += 1
        assert step(prefill, request, 0).growing == []
    now[0] += 1
    assert step(prefill, request, 0).growing == [WithdrawOrder("next", opened.offer)]


def test_a_turn_that_is_aborted_while_it_is_pulled_ends_its_offer_too() -> None:
    prefill, request, opened = pulled_turn()
    request.status = Status.FINISHED_ABORTED
    assert prefill.finished(request, [list(range(11, 22))]) is None
    metadata = prefill.take_metadata()
    assert len(metadata.cancels) == 1
    assert metadata.growing == [WithdrawOrder("next", opened.offer)]


def test_a_pull_that_fails_is_computed_and_counted() -> None:
    manager, prefill = Manager(), side()
    engine = side(manager)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    request, external = resumed(prefill, asked(engine, "t") or {}, [*SEQUENCE, 1])
    prefill.allocated(request, [table(*range(1, 12))], external)
    prefill.received(["next"], ["next"])
    assert prefill.external(request, 0) == 0
    assert prefill.turns.take_counts().turns == ["gone"]


@pytest.mark.parametrize(
    ("tokens", "computed", "policy", "outcome"),
    [
        ([9, *SEQUENCE], 0, {}, "differs"),
        ([*SEQUENCE, 1], 256, {}, "cached"),
        ([*SEQUENCE, 1], 0, {"recompute": False}, "policy"),
        ([*SEQUENCE, 1], 0, {"copies": True}, "policy"),
    ],
)
def test_what_is_not_pulled_is_let_go_of_and_counted(
    tokens: list[int], computed: int, policy: dict[str, Any], outcome: str
) -> None:
    manager, prefill = Manager(), side(**policy)
    engine = side(manager)
    decode_turn(engine, manager, SEQUENCE, *NINE)
    request, external = resumed(prefill, asked(engine, "t") or {}, tokens, computed)
    assert external == 0
    prefill.allocated(request, [table(*range(1, 12))], 0)
    (pull,) = prefill.take_metadata().pulls
    assert (pull.waits, pull.blocks) == (False, ())
    assert prefill.turns.take_counts().turns == [outcome]


def test_windows_travel_with_all_of_the_turn_alone() -> None:
    groups = ((Full(), BLOCK), (Sliding(40), BLOCK))
    manager = Manager()
    engine = side(manager, *groups)
    decode_turn(engine, manager, SEQUENCE, *NINE, [0] * 8 + [21, 22])
    params = asked(engine, "t") or {}
    prefill = side(None, *groups)
    assert resumed(prefill, params, [*SEQUENCE, 1])[1] == 299
    assert resumed(side(None, *groups), params, [*SEQUENCE[:290], 1, 2, 3])[1] == 0


# --- bounds ---------------------------------------------------------------------------------------------------------


def keep(engine: SchedulerSide, manager: Manager, name: str, *ids: int) -> list[str]:
    """Keeps a turn of these blocks. Returns the offers that are withdrawn for it."""
    decode_turn(engine, manager, list(range(len(ids) * BLOCK)), list(ids), name=name, answer=BLOCK)
    return engine.take_metadata().withdrawals


def test_a_share_of_the_cache_is_kept_and_the_oldest_go_first() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.25)
    assert keep(engine, manager, "a", *range(1, 9)) == []
    assert keep(engine, manager, "b", *range(1, 13)) == []  # eight of them are kept already
    assert keep(engine, manager, "c", *range(13, 17)) == []
    withdrawn = keep(engine, manager, "d", *range(17, 19))
    assert [offer.partition("#")[0] for offer in withdrawn] == ["ra", "rb"]
    assert [asked(engine, name) is None for name in "abcd"] == [True, True, False, False]
    assert keep(engine, manager, "e", *range(20, 37)) == []
    assert asked(engine, "e") is None
    assert engine.turns.take_counts().kept_turns == ["not kept"]


def test_nothing_is_kept_while_blocks_are_scarce() -> None:
    manager = Manager(64)
    engine = side(manager)
    manager.take("others", list(range(10, 63)))
    keep(engine, manager, "a", *range(1, 9))
    assert asked(engine, "a") is None


def test_a_request_that_waits_for_blocks_gets_those_of_the_oldest_turns() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.5)
    keep(engine, manager, "a", *range(1, 9))
    keep(engine, manager, "b", *range(9, 17))
    manager.take("others", list(range(17, 60)))
    passed_over(engine, 8)
    (withdrawn,) = engine.take_metadata().withdrawals
    assert "ra#" in withdrawn
    passed_over(engine, 8)
    assert engine.take_metadata().withdrawals == []  # they are on their way
    assert engine.unsent
    engine.turns.kept.ended([(withdrawn, "withdrawn")])
    assert not engine.unsent
    assert set(manager.freed) >= set(range(1, 9))
    engine.allocated(Request(list(range(BLOCK * 8)), None, request_id="new"), [table(1)], 0)
    manager.take("new", list(range(1, 9)))
    assert engine.take_metadata().withdrawals == []


def test_a_request_that_was_preempted_gets_the_blocks_of_turns_that_were_kept_since() -> None:
    manager = Manager(64)
    engine = side(manager)
    preempted = passed_over(engine, 55)
    engine.allocated(preempted, [table(*range(1, 56))], 0)
    keep(engine, manager, "a", *range(1, 16))
    assert engine.take_metadata().withdrawals == []
    assert engine.external(preempted, 0) == 0
    assert len(engine.take_metadata().withdrawals) == 1


def test_a_request_that_is_loaded_gets_blocks_of_turns_for_what_its_load_left_before_any_other() -> None:
    """VLLM comes to nothing behind it while it lacks blocks."""
    manager, other = Manager(64), Manager()
    engine, decode_engine = side(manager), side(other)
    decode_turn(decode_engine, other, SEQUENCE, *NINE)
    params = asked(decode_engine, "t")
    assert params is not None
    request, external = resumed(engine, params, [*SEQUENCE, *range(BLOCK * 50 - 300)])
    manager.take("next", list(range(1, 11)))
    engine.allocated(request, manager.get_blocks("next").blocks, external)
    keep(engine, manager, "a", *range(11, 26))
    passed_over(engine, 1)
    assert engine.take_metadata().withdrawals == []
    engine.received(["next"])
    passed_over(engine, 1)
    assert len(engine.take_metadata().withdrawals) == 1
    engine.allocated(request, manager.get_blocks("next").blocks, 0)
    keep(engine, manager, "b", *range(26, 41))
    assert engine.take_metadata().withdrawals == []


@pytest.mark.parametrize("end", ["it has all of its blocks", "it was aborted", "it waits for another's pull"])
def test_turns_are_not_given_up_for_a_request_that_lacks_no_blocks(end: str) -> None:
    manager = Manager(64)
    engine = side(manager)
    keep(engine, manager, "a", *range(1, 16))
    if end == "it waits for another's pull":
        params = prefilled(side(), BLOCK * 60, list(range(1, 61)))
        first, second = (Request(list(range(BLOCK * 60)), params, request_id=name) for name in ("first", "second"))
        engine.arrived(first)
        engine.arrived(second)
        engine.allocated(first, [table(*range(1, 61))], engine.external(first, 0) or 0)
        assert engine.external(second, 0) is None
    else:
        request = passed_over(engine, 55)
        if end == "it was aborted":
            request.status = Status.FINISHED_ABORTED
            engine.finished(request, [[]])
        else:
            engine.allocated(request, [table(*range(1, 56))], 0)
    assert engine.take_metadata().withdrawals == []


@pytest.mark.parametrize(("steps", "seconds"), [(9, 0.11), (2, 10.0)])
def test_a_running_request_that_lacks_a_block_waits_for_a_turn_instead_of_a_preemption(
    steps: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a second, and for two long steps: what came in the first one is not known yet in the next."""
    manager, now = Manager(64), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine = side(manager)
    assert not engine.turns.kept.frees()
    keep(engine, manager, "a", *range(1, 5))
    keep(engine, manager, "b", *range(5, 9))
    assert engine.turns.kept.frees()
    assert engine.turns.kept.frees()
    (withdrawn,) = engine.take_metadata().withdrawals
    assert "ra#" in withdrawn
    for _ in range(steps):
        now[0] += seconds
        assert engine.turns.kept.frees()
        assert engine.unsent
        assert engine.take_metadata().withdrawals == []
    now[0] += seconds
    assert not engine.turns.kept.frees()  # a daemon that does not answer is waited for no longer
    assert not engine.unsent


@pytest.mark.parametrize("why", ["an answer needs its room", "its name is used again", "a rank has lost it", "reset"])
def test_a_turn_that_is_given_up_after_a_long_step_is_awaited_for_as_many_steps_as_any(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in whose output that happens is over: nothing was told of it while that went on."""
    manager, now = Manager(64), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine = side(manager, share=0.25, ranks=2)
    keep(engine, manager, "a", *range(1, 11))
    (offer,) = engine.turns.kept._kept
    now[0] += 10
    if why == "a rank has lost it":
        engine.turns.kept.ended([(offer, "daemon lost")])
    elif why == "reset":
        engine.turns.kept.clear()
    else:
        name = "b" if why == "an answer needs its room" else "a"
        decode_turn(engine, manager, SEQUENCE, list(range(20, 30)), name=name)
    assert engine.unsent
    waits = []
    for planned in range(4):
        waits.append(engine.turns.kept.frees())
        assert engine.take_metadata().withdrawals == ([offer] if planned == 0 else [])
        now[0] += 10
    assert waits == [True, True, True, False]


def test_no_more_is_given_up_than_a_request_lacks_where_turns_share_blocks() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.75)
    for number, name in enumerate("abc"):  # of one conversation
        keep(engine, manager, name, *range(1, 9 + 4 * number))
    keep(engine, manager, "other", *range(30, 36))
    assert engine.turns.kept.frees()
    (withdrawn,) = engine.take_metadata().withdrawals
    assert "rc#" in withdrawn  # the others would free nothing
    assert engine.turns.kept.frees()
    manager.take("others", list(range(17, 30)), list(range(36, 62)))
    passed_over(engine, 8)
    second = engine.take_metadata().withdrawals
    assert [offer.partition("#")[0] for offer in second] == ["rb"]
    assert engine.take_metadata().withdrawals == []
    engine.turns.kept.ended((offer, "withdrawn") for offer in (withdrawn, *second))
    assert set(range(9, 17)) <= set(manager.freed)


def test_a_conversation_that_is_given_up_goes_whole_before_a_later_one() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.75)
    for number, name in enumerate("abc"):  # of one conversation
        keep(engine, manager, name, *range(1, 9 + 4 * number))
    keep(engine, manager, "other", *range(30, 36))
    manager.take("others", list(range(17, 30)), list(range(36, 62)))
    passed_over(engine, 14)
    assert [offer.partition("#")[0] for offer in engine.take_metadata().withdrawals] == ["rc", "rb", "ra"]


def test_a_conversation_goes_whole_in_whatever_order_its_turns_were_kept() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.75)
    for name, blocks in (("b", 12), ("a", 8), ("c", 16)):  # b was asked for again from an earlier point
        keep(engine, manager, name, *range(1, blocks + 1))
    keep(engine, manager, "other", *range(30, 36))
    manager.take("others", list(range(17, 30)), list(range(36, 62)))
    passed_over(engine, 14)
    assert [offer.partition("#")[0] for offer in engine.take_metadata().withdrawals] == ["rc", "rb", "ra"]


def test_turns_are_looked_at_once_and_once_more_if_they_go_however_many_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(512)
    engine = side(manager, share=0.5)
    for number in range(60):
        keep(engine, manager, f"busy{number}", 1, 10 + number)
        manager.take(f"runs{number}", [1, 10 + number])
    for number in range(60):
        keep(engine, manager, f"idle{number}", 1, 100 + number)
    looks = []
    adds = kept_turns.KeptTurns._adds
    monkeypatch.setattr(kept_turns.KeptTurns, "_adds", lambda kept, turn: looks.append(turn) or adds(kept, turn))
    manager.take("others", list(range(200, 512)))
    passed_over(engine, 200)
    assert len(engine.take_metadata().withdrawals) == 60
    assert len(looks) == 60 + 2 * 60


def test_turns_that_share_blocks_with_the_one_they_make_room_for_go_until_there_is_enough() -> None:
    manager = Manager(64)
    engine = side(manager, share=0.25)
    assert keep(engine, manager, "a", *range(1, 9)) == []
    assert keep(engine, manager, "b", *range(1, 5), *range(20, 28)) == []
    withdrawn = keep(engine, manager, "c", *range(1, 13))  # without a and b 12 are kept, with b 20
    assert [offer.partition("#")[0] for offer in withdrawn] == ["ra", "rb"]


def test_the_blocks_of_a_turn_are_not_looked_at_again_for_each_one_that_goes_for_it() -> None:
    looks = []

    class Counted(Counter[int]):
        def __contains__(self, block: object) -> bool:
            looks.append(block)
            return super().__contains__(block)

    manager = Manager(512)
    engine = side(manager, share=0.5)
    engine.turns.kept._held = Counted()
    for number in range(100):
        keep(engine, manager, f"short{number}", 10 + number)
    looks.clear()
    assert len(keep(engine, manager, "long", *range(200, 450))) == 94
    assert len(looks) <= 250


def test_blocks_of_a_turn_that_is_given_up_are_awaited_after_an_earlier_one_that_has_them_was_read() -> None:
    manager = Manager(64)
    engine = side(manager)
    for name, blocks in (("a", 4), ("b", 8)):
        decode_turn(engine, manager, list(range(blocks * BLOCK)), list(range(1, blocks + 1)), name=name, answer=BLOCK)
    first, second = engine.take_metadata().offers
    assert engine.turns.kept.frees()
    assert engine.take_metadata().withdrawals == [second.offer]
    engine.turns.kept.ended([(first.offer, "read")])
    assert manager.freed == []
    assert engine.turns.kept.frees()
    engine.turns.kept.ended([(second.offer, "withdrawn")])
    assert sorted(manager.freed) == list(range(1, 9))


def test_turns_whose_blocks_running_requests_have_are_not_given_up() -> None:
    manager = Manager(64)
    engine = side(manager)
    keep(engine, manager, "a", *range(1, 9))
    manager.take("next", list(range(1, 11)))
    assert not engine.turns.kept.frees()
    assert engine.take_metadata().withdrawals == []
    engine.turns.kept.clear()
    assert not engine.turns.kept.frees()  # given up, and nothing comes of it
    assert asked(engine, "a") is None


def test_emptying_the_cache_gives_all_up_once() -> None:
    manager = Manager(64)
    engine = side(manager)
    keep(engine, manager, "a", *range(1, 5))
    engine.turns.kept.clear()
    engine.turns.kept.clear()
    (withdrawn,) = engine.take_metadata().withdrawals
    engine.turns.kept.ended([(withdrawn, "withdrawn")])
    assert sorted(manager.freed) == [1, 2, 3, 4]


def test_a_name_that_is_used_again_is_of_the_later_turn() -> None:
    manager = Manager(64)
    engine = side(manager)
    keep(engine, manager, "a", *range(1, 5))
    (withdrawn,) = keep(engine, manager, "a", *range(5, 9))
    engine.turns.kept.ended([(withdrawn, "withdrawn")])
    assert asked(engine, "a") is not None
