"""Offers live as long as a decode engine has the request, and end soon where none does any more."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from tests.vllm.connector.connector_engine import PATIENCE, Daemons, Engine
from tests.vllm.connector.test_connector_faults import DESTINATION, PROMPT, Pair

pytestmark = pytest.mark.filterwarnings("default")
TTL = 1.0
CLAIM_TTL = 5.0
"""Seconds that a silent daemon keeps its claims: the daemons' default."""


@pytest.fixture
def pair(daemons: Daemons, configurations: Any) -> Iterator[Pair]:
    """A pair whose offers live for a second by themselves."""
    with ExitStack() as stack:
        made = Pair(daemons, configurations("llama"), stack)
        made.producer.close()
        made.producer = made.engine("p", offer_ttl=TTL)
        made.producer.fill(1)
        yield made


def held(pair: Pair) -> Any:
    """A request that queues at the decode engine, which makes no step after its first; its offer's time is over."""
    params = pair.offered("r")
    request = pair.consumer.queue("r", PROMPT, params)
    pair.consumer.step()
    over = time.monotonic() + 3 * TTL
    pair.producer.run_until(lambda: time.monotonic() > over or "r" in pair.producer.sent)
    assert "r" not in pair.producer.sent
    return request


def freed_after(engine: Engine, happens: Callable[[], None]) -> float:
    """Seconds until the engine has its blocks back."""
    since = time.monotonic()
    happens()
    engine.run_until(lambda: "r" in engine.sent)
    return time.monotonic() - since


def test_a_request_that_queues_for_longer_than_its_offer_lives_still_gets_its_blocks(pair: Pair) -> None:
    request = held(pair)
    pair.consumer.fill(2)
    pair.consumer.allocate(request, [DESTINATION])
    pair.consumer.run_until(lambda: pair.producer.step() or "r" in pair.consumer.received)
    assert not pair.consumer.failed
    assert pair.same_bytes()
    pair.producer.run_until(lambda: "r" in pair.producer.sent)


def test_an_abort_of_a_request_that_queues_frees_the_producers_blocks(pair: Pair) -> None:
    request = held(pair)

    def abort() -> None:
        assert pair.consumer.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
        pair.consumer.step()

    assert freed_after(pair.producer, abort) < CLAIM_TTL


def test_an_engine_without_requests_makes_steps_until_its_daemon_knows_what_it_lets_go_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.engines.vllm.worker.PATIENCE_SECONDS", PATIENCE)
    request = held(pair)
    assert not pair.consumer.scheduler.has_pending_push_work()
    pair.daemons.kill("d")
    assert pair.consumer.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    pair.consumer.step()
    assert pair.consumer.scheduler.has_pending_push_work()
    pair.daemons.start("d")
    pair.consumer.run_until(lambda: not pair.consumer.scheduler.has_pending_push_work())
    pair.producer.run_until(lambda: "r" in pair.producer.sent)


def test_a_decode_engine_that_ends_holds_nothing_any_more(pair: Pair) -> None:
    held(pair)
    assert freed_after(pair.producer, pair.consumer.workers[0].shutdown) < CLAIM_TTL


def test_a_decode_daemon_that_dies_holds_nothing_for_longer_than_its_claims(pair: Pair) -> None:
    held(pair)
    assert freed_after(pair.producer, lambda: pair.daemons.kill("d")) < 2 * CLAIM_TTL


def test_a_decode_daemon_that_is_started_anew_holds_again_what_queues(pair: Pair) -> None:
    request = held(pair)
    pair.daemons.kill("d")
    pair.daemons.start("d")
    pair.consumer.run_until(lambda: pair.consumer.workers[0]._worker._client.connected)
    over = time.monotonic() + 2 * CLAIM_TTL
    pair.producer.run_until(lambda: time.monotonic() > over or pair.consumer.step() or "r" in pair.producer.sent)
    assert "r" not in pair.producer.sent
    pair.consumer.fill(2)
    pair.consumer.allocate(request, [DESTINATION])
    pair.consumer.run_until(lambda: pair.producer.step() or "r" in pair.consumer.received)
    assert not pair.consumer.failed
