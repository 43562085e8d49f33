"""What a prefill engine may pull of an earlier turn: the longest beginning that its prompt has, and never another's."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.client import Blocks
from kvd.client.events import spans
from kvd.engines.vllm.transfer_params import Prompt
from kvd.engines.vllm.turns import params as turn_params
from kvd.limits import MAX_REQUEST_ID_BYTES, MAX_TURN_PREFIXES
from kvd.protocol.ticket import Ticket, TicketRank

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def ticket(tokens: int) -> str:
    rank = TicketRank("d", "tcp://h:1", 7, "vllm-0", "o", 0, bytes(16))
    return Ticket(tokens, (rank,), (spans((Blocks(0, 0, [9]),)),)).encode()


def prompt(tokens: list[int], **more: Any) -> Prompt:
    return Prompt(length=len(tokens), tokens=tokens, **more)


def written(sequence: list[int], asked: int, kept: int | None = None) -> dict[str, Any]:
    """A turn whose prompt had `asked` tokens of `sequence`, of which all, or `kept`, are kept."""
    made = kept or len(sequence)
    return turn_params.write(ticket(made), made, replace(prompt(sequence), length=asked), 9.0)


def usable(params: dict[str, Any], tokens: list[int], *, whole: bool = False, **more: Any) -> int:
    return turn_params.read(params, prompt(tokens, **more), whole=whole).tokens


@given(TOKENS, TOKENS, st.data())
def test_what_is_pulled_is_a_beginning_of_both(sequence: list[int], other: list[int], data: st.DataObject) -> None:
    asked = data.draw(st.integers(1, len(sequence)))
    tokens = usable(written(sequence, asked), other)
    assert sequence[:tokens] == other[:tokens]


@given(TOKENS, TOKENS, st.data())
def test_a_prompt_that_goes_on_pulls_all_of_the_turn(sequence: list[int], more: list[int], data: st.DataObject) -> None:
    asked = data.draw(st.integers(1, len(sequence)))
    for whole in (False, True):
        assert usable(written(sequence, asked), sequence + more, whole=whole) == len(sequence)


def test_an_answer_that_comes_back_otherwise_is_pulled_up_to_there() -> None:
    sequence = list(range(1000))
    params = written(sequence, 300)
    assert len(params["kvd_prefixes"]) <= MAX_TURN_PREFIXES
    changed = [*sequence[:700], 5, *sequence[701:], 1, 2]
    assert 650 < usable(params, changed) <= 700
    assert usable(params, changed, whole=True) == 0
    assert usable(params, [*sequence[:300], 5]) == 300
    assert usable(params, [7, *sequence[1:], 1]) == 0


def test_other_media_adapters_and_embeddings_are_other_prompts() -> None:
    sequence = list(range(200))
    params = written(sequence, 100)
    assert usable(params, [*sequence, 1]) == 200
    assert usable(params, [*sequence, 1], media=(("image", 3),)) == 0
    assert usable(params, [*sequence, 1], media=(("image", 150),)) in range(100, 151)
    assert usable(params, [*sequence, 1], adapter=("a", "/a")) == 0
    assert usable(params, [*sequence, 1], embeddings=object()) == 0


def test_all_of_a_turn_needs_a_token_more_to_compute() -> None:
    sequence = list(range(50))
    assert usable(written(sequence, 20), sequence, whole=True) == 0
    assert usable(written(sequence, 20), sequence) == 50


def test_no_more_is_pulled_than_the_ticket_has() -> None:
    sequence = list(range(50))
    params = written(sequence, 20) | {"kvd_ticket": ticket(30)}
    assert usable(params, [*sequence, 1]) <= 30


@pytest.mark.parametrize(
    "broken",
    [
        {"kvd_ticket": "kvd0.x"},
        {"kvd_ticket": 7},
        {"kvd_prefixes": [[0, "x"]]},
        {"kvd_prefixes": [[1, "x"]] * (MAX_TURN_PREFIXES + 1)},
        {"kvd_prefixes": "x"},
        {"kvd_prefixes": [[2**80, "x"]]},
    ],
)
def test_what_cannot_be_read_is_computed(broken: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    offered = turn_params.read(written([1, 2, 3], 2) | broken, prompt([1, 2, 3, 4]), whole=False)
    assert (offered.tokens, offered.ticket, offered.refused) == (0, "", "")
    assert "computed" in caplog.text


def test_turns_have_names_of_a_bounded_length() -> None:
    assert turn_params.name_of({"kvd_turn": "x"}) == "x"
    for other in ({}, None, {"kvd_turn": ""}, {"kvd_turn": 7}, {"kvd_turn": "x" * (MAX_REQUEST_ID_BYTES + 1)}):
        assert turn_params.name_of(other) == ""
    assert turn_params.in_answer({"kvd_turn": True})
