"""Offers live as long as a decode engine has the request, and end soon where none does any more."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

from tests.support.fleet import until
from tests.support.patience import PATIENCE
from tests.vllm.connector.connector_engine import Daemons, Engine
from tests.vllm.connector.test_connector_faults import DESTINATION, PROMPT, Pair

pytestmark = pytest.mark.filterwarnings("default")
TTL = 2.0
"""Seconds that an offer lives by itself."""


@pytest.fixture
def endless_claims(daemons: Daemons) -> None:
    """Claims that end before their ttl, if at all: it is longer than any wait here."""
    daemons.settings["claim_ttl"] = "600"


@pytest.fixture
def short_claims(daemons: Daemons) -> None:
    """Claims that end while a test waits, and not before a daemon could be started anew."""
    daemons.settings["claim_ttl"] = "10"


@pytest.fixture
def pair(daemons: Daemons, configurations: Any) -> Iterator[Pair]:
    """A pair whose offers live for two seconds by themselves."""
    with ExitStack() as stack:
        made = Pair(daemons, configurations("llama"), stack)
        made.producer.close()
        made.producer = made.engine("p", offer_ttl=TTL)
        made.producer.fill(1)
        yield made


def claims(pair: Pair) -> int:
    """Claims that the prefill daemon holds."""
    held: int = pair.producer.workers[0]._worker._client.status(PATIENCE)["leases"]["claims_held"]
    return held


def held(pair: Pair, consumers: int = 1) -> Any:
    """A request that queues at the decode engine, which makes no step after its first; its offer's time is over.

    A machine that is too slow to hold an offer before its time is over gets another one; the daemons have met by then.
    """
    for number, _ in enumerate(until("an offer is held in time")):
        params = pair.offered(name := f"r{number}", consumers)
        request = pair.consumer.queue(name, PROMPT, params)
        pair.consumer.step()
        pair.producer.run_until(lambda name=name: claims(pair) or name in pair.producer.sent)
        if name not in pair.producer.sent:
            break
    pair.offered("later")
    pair.producer.run_until(lambda: "later" in pair.producer.sent)
    assert request.request_id not in pair.producer.sent
    return request


def freed(engine: Engine, request: Any, happens: Callable[[], Any]) -> None:
    """Has something happen, and returns when the engine has the blocks of the request back."""
    assert request.request_id not in engine.sent
    happens()
    engine.run_until(lambda: request.request_id in engine.sent)


def test_a_request_that_queues_for_longer_than_its_offer_lives_still_gets_its_blocks(pair: Pair) -> None:
    request = held(pair)
    read(pair, request)
    pair.producer.run_until(lambda: request.request_id in pair.producer.sent)


def read(pair: Pair, request: Any) -> None:
    """The request gets blocks of the decode engine, and the producer's bytes in them."""
    pair.consumer.fill(2)
    pair.consumer.allocate(request, [DESTINATION])
    pair.consumer.run_until(lambda: pair.producer.step() or request.request_id in pair.consumer.received)
    assert not pair.consumer.failed
    assert pair.same_bytes()


@pytest.mark.usefixtures("endless_claims")
@pytest.mark.parametrize("consumers", [1, 2, 0])
def test_an_abort_of_a_request_that_queues_frees_the_producers_blocks(pair: Pair, consumers: int) -> None:
    """VLLM makes one step for it. Others that the offer is for do not come, and its time is over."""
    request = held(pair, consumers)

    def abort() -> None:
        assert pair.consumer.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
        pair.consumer.step()

    freed(pair.producer, request, abort)


@pytest.mark.usefixtures("endless_claims")
def test_an_abort_of_a_request_that_queues_frees_the_producers_blocks_before_the_offers_time(pair: Pair) -> None:
    pair.producer.close()
    pair.producer = pair.engine("p", offer_ttl=600.0)
    request = pair.consumer.queue("r", PROMPT, pair.offered("r"))
    pair.consumer.step()
    pair.producer.run_until(lambda: claims(pair) == 1)

    def abort() -> None:
        assert pair.consumer.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
        pair.consumer.step()

    freed(pair.producer, request, abort)


@pytest.mark.usefixtures("patient", "short_claims")
def test_an_engine_without_requests_makes_steps_until_its_daemon_knows_what_it_lets_go_of(pair: Pair) -> None:
    request = held(pair)
    assert not pair.consumer.scheduler.has_pending_push_work()
    pair.daemons.kill("d")
    assert pair.consumer.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    pair.consumer.step()
    assert pair.consumer.scheduler.has_pending_push_work()
    pair.daemons.start("d")
    pair.consumer.run_until(lambda: not pair.consumer.scheduler.has_pending_push_work())
    pair.producer.run_until(lambda: request.request_id in pair.producer.sent)


@pytest.mark.usefixtures("endless_claims")
def test_a_decode_engine_that_ends_holds_nothing_any_more(pair: Pair) -> None:
    freed(pair.producer, held(pair), pair.consumer.workers[0].shutdown)


@pytest.mark.usefixtures("short_claims")
def test_a_decode_daemon_that_dies_holds_nothing_for_longer_than_its_claims(pair: Pair) -> None:
    freed(pair.producer, held(pair), lambda: pair.daemons.kill("d"))


@pytest.mark.usefixtures("patient", "short_claims")
def test_a_decode_daemon_that_is_started_anew_holds_again_what_queues(pair: Pair) -> None:
    request = held(pair)
    pair.daemons.kill("d")
    pair.daemons.start("d")
    pair.consumer.run_until(lambda: pair.producer.step() or claims(pair) == 2)
    pair.producer.run_until(lambda: pair.consumer.step() or claims(pair) == 1)
    assert request.request_id not in pair.producer.sent
    read(pair, request)
