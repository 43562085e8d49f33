"""How the chaos judges a request."""

import asyncio

import pytest

from tests.vllm.chaos.clients import Clients, Outcome
from tests.vllm.testbed.client import Completion
from tests.vllm.testbed.http import HttpError

EXPECTED = Completion([5, 6], [-0.1, -0.2], [1.0, 1.0])
PROMPT = [1, 2, 3]


def clients(answer: Completion | Exception | None, deadline: float = 60.0) -> Clients:
    """A client whose servers answer so, or not at all."""

    async def ask(prompt: list[int], tokens: int, salt: str, mixed_up: bool) -> Completion:
        assert (prompt, tokens) == (PROMPT, 2)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    return Clients(ask, [(PROMPT, EXPECTED)], width=1, deadline=deadline, seed=1)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (EXPECTED, Outcome.RIGHT),
        (Completion([5, 7], [-0.1, -0.2], [1.0, 1.0]), Outcome.WRONG),
        (Completion([5, 6], [-0.1, -0.3], [1.0, 1.0]), Outcome.WRONG),
        (Completion([5], [-0.1], [1.0]), Outcome.WRONG),
        (HttpError(500, "no KV"), Outcome.FAILED),
    ],
)
async def test_a_request_ends_right_wrong_or_with_an_error(answer: Completion | Exception, outcome: Outcome) -> None:
    assert (await clients(answer).request()).outcome is outcome


async def test_an_error_is_what_a_request_is_to_get_that_was_mixed_up_unless_it_gets_its_tokens() -> None:
    assert (await clients(HttpError(500, "no KV")).request(mixed_up=True)).outcome is Outcome.REFUSED
    assert (await clients(EXPECTED).request(mixed_up=True)).outcome is Outcome.RIGHT


async def test_a_request_without_an_answer_is_late_after_its_deadline_unless_its_client_hung_up() -> None:
    asked = clients(None, deadline=0.01)
    assert (await asked.request()).outcome is Outcome.LATE
    assert (await asked.request(patience=0.01)).outcome is Outcome.HUNG_UP
    assert [request.outcome for request in asked.ended] == [Outcome.LATE, Outcome.HUNG_UP]
