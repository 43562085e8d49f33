"""Offers that grow between engines of connectors: the bytes that vLLM's kernels would read, and who says what when."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from kvd.engines.vllm.cache.config import window_of
from kvd.engines.vllm.growing.params import producer as producer_of
from kvd.layout import Full
from tests.support.fleet import until
from tests.support.patience import PATIENCE
from tests.vllm.connector.connector_engine import BLOCK_TOKENS, Chunk, Daemons, Engine, Request

pytestmark = pytest.mark.filterwarnings("default")
PROMPT = list(range(3, 53)) * 2  # 100 tokens: three blocks of 32 and a part of a fourth, or seven of 16
OFFER = "kvdo1.chosen-by-the-router-for-this"
CHUNKS = (40, 24, 0, 36)


@pytest.fixture
def start(daemons: Daemons, configurations: Any) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with a daemon for each rank."""
    with ExitStack() as stack:

        def engine(name: str, kind: str, tp_size: int = 1, copies: int = 1, **settings: Any) -> Engine:
            daemons.start(*(f"{name}{rank}" for rank in range(tp_size)))
            settings["socket"] = daemons.socket(name + "{rank}")
            return stack.enter_context(closing(Engine(configurations(kind), kind, settings, tp_size, copies=copies)))

        yield engine


def decode_params(engine: Engine) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "kvd_offer": OFFER,
        "kvd_producer": producer_of([worker._worker.endpoint for worker in engine.workers]),
    }


def prefilling(engine: Engine, name: str = "r") -> Request:
    """A request whose offer the router chose, and none of whose chunks is computed."""
    request = Request(name, list(PROMPT), {"do_remote_decode": True, "kvd_offer": OFFER}, computed=0)
    engine.scheduler.on_new_request(request)
    return request


def rows(engine: Engine, name: str, blocks: list[int]) -> torch.Tensor:
    """The blocks of a layer over all ranks: [block, head, token, content]."""
    return torch.cat([caches[name][blocks] for caches in engine.caches], dim=1)


def full(engine: Engine) -> set[int]:
    """The groups that attend to every token."""
    groups = enumerate(engine.cache_config.kv_cache_groups)
    return {number for number, group in groups if isinstance(window_of(group.kv_cache_spec), Full)}


def layers(engine: Engine, group: int) -> list[str]:
    names: list[str] = engine.cache_config.kv_cache_groups[group].layer_names
    return names


def tables_of(engine: Engine, first: int, positions: int) -> list[list[int]]:
    """A table for each group, of different blocks."""
    starts = [first + positions * group for group in range(engine.groups)]
    return [list(range(start, start + positions)) for start in starts]


@pytest.mark.parametrize(
    ("kind", "producers", "consumers"),
    [("llama", 1, 1), ("llama", 2, 1), ("llama", 1, 2), ("gemma", 1, 1), ("deepseek", 1, 1), ("delta", 1, 1)],
)
def test_blocks_move_while_the_prefill_goes_on_and_are_right_when_the_request_is_scheduled(
    start: Callable[..., Engine], kind: str, producers: int, consumers: int
) -> None:
    producer, consumer = start("p", kind, producers), start("d", kind, consumers)
    producer.fill(1)
    consumer.fill(2)
    block = 16 if kind == "deepseek" else BLOCK_TOKENS
    positions = -(-len(PROMPT) // block)
    theirs, ours = tables_of(producer, 1, positions), tables_of(consumer, 2, positions)
    consumer.decode("r", PROMPT, decode_params(producer), ours)
    consumer.step()
    request = prefilling(producer)
    group = min(full(producer))
    layer = layers(producer, group)[0]
    for tokens in CHUNKS:
        producer.step(Chunk(request, min(tokens, request.num_prompt_tokens - request.num_computed_tokens), theirs))
        done = request.num_computed_tokens // block
        if done < positions:
            for _ in until("what is complete is there"):
                consumer.step()
                if torch.equal(rows(producer, layer, theirs[group][:done]), rows(consumer, layer, ours[group][:done])):
                    break
    assert "r" not in consumer.received
    keep, params = producer.scheduler.request_finished_all_groups(request, tuple(theirs))
    assert keep
    assert params["kvd_offer"] == OFFER
    producer.step()
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    for number in range(producer.groups):
        for name in layers(producer, number):
            if kind == "delta" and number not in full(producer):
                states = consumer.state(kind, name, ours[number][-1]), producer.state(kind, name, theirs[number][-1])
                assert all(torch.equal(got, want) for got, want in zip(*states, strict=True))
            else:
                assert torch.equal(rows(consumer, name, ours[number][:-1]), rows(producer, name, theirs[number][:-1]))
    producer.run_until(lambda: "r" in producer.sent)


def test_a_preempted_prefill_fails_the_pull_and_is_offered_with_a_ticket_in_the_end(
    start: Callable[..., Engine],
) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    producer.fill(1)
    told = decode_params(producer)
    consumer.decode("r", PROMPT, told, [[2, 4, 6, 8]])
    request = prefilling(producer)
    producer.step(Chunk(request, 64, [[3, 7]]))
    producer.step(preempted="r")
    producer.fill(3)  # others have the blocks
    consumer.run_until(lambda: "r" in consumer.failed or producer.step() or False)
    request.computed = 0
    producer.step(Chunk(request, 100, [[3, 7, 1, 5]]))
    keep, params = producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    assert keep
    assert "kvd_ticket" in params
    producer.step()
    consumer.decode("s", PROMPT, params, [[9, 10, 11, 12]])
    consumer.run_until(lambda: "s" in consumer.received or producer.step() or False)
    assert "s" not in consumer.failed


def test_a_prefill_of_workers_with_copies_of_others_caches_is_offered_with_a_ticket_in_the_end(
    start: Callable[..., Engine],
) -> None:
    """The copies hear of no offer that grows, and vLLM frees blocks only when all workers say that they are sent."""
    producer, consumer = start("p", "llama", copies=2), start("d", "llama")
    request = prefilling(producer)
    producer.step(Chunk(request, 100, [[3, 7, 1, 5]]))
    keep, params = producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    assert keep
    assert "kvd_ticket" in params
    assert "kvd_producer" not in params
    consumer.decode("r", PROMPT, params, [[2, 4, 6, 8]])
    producer.run_until(lambda: "r" in producer.sent or consumer.step() or False)


def test_an_aborted_prefill_fails_the_pull_and_holds_no_blocks(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    consumer.decode("r", PROMPT, decode_params(producer), [[2, 4, 6, 8]])
    request = prefilling(producer)
    producer.step(Chunk(request, 64, [[3, 7]]))
    request.status = type(request.status).FINISHED_ABORTED
    assert producer.scheduler.request_finished_all_groups(request, ([3, 7],)) == (False, None)
    consumer.run_until(lambda: "r" in consumer.failed or producer.step() or False)
    assert not producer.sent


def test_a_producer_that_dies_in_the_middle_fails_the_pull_at_once(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    consumer.decode("r", PROMPT, decode_params(producer), [[2, 4, 6, 8]])
    producer.step(Chunk(prefilling(producer), 64, [[3, 7]]))
    producer.close()
    consumer.run_until(lambda: "r" in consumer.failed)


def test_a_request_that_is_aborted_at_the_decode_engine_lets_the_prefill_go_on_for_nobody(
    start: Callable[..., Engine],
) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    asked = consumer.decode("r", PROMPT, decode_params(producer), [[2, 4, 6, 8]])
    request = prefilling(producer)
    producer.step(Chunk(request, 64, [[3, 7]]))
    consumer.step()
    asked.status = type(asked.status).FINISHED_ABORTED
    consumer.scheduler.request_finished_all_groups(asked, ([2, 4, 6, 8],))
    consumer.run_until(lambda: "r" in consumer.received)
    producer.step(Chunk(request, 36, [[3, 7, 1, 5]]))
    keep, _ = producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    assert keep
    producer.run_until(lambda: "r" in producer.sent)


def test_a_request_that_is_aborted_while_it_queues_holds_the_offer_no_more_while_the_prefill_goes_on(
    start: Callable[..., Engine],
) -> None:
    """VLLM makes one step for it at the decode engine."""
    producer, consumer = start("p", "llama"), start("d", "llama")
    asked = consumer.queue("r", PROMPT, decode_params(producer))
    consumer.step()
    request = prefilling(producer)
    producer.step(Chunk(request, 64, [[3, 7]]))
    client = producer.workers[0]._worker._client
    producer.run_until(lambda: client.status(PATIENCE)["leases"]["claims_held"] == 1)
    consumer.scheduler.request_finished_all_groups(asked, ([],))
    consumer.step()
    producer.run_until(lambda: client.status(PATIENCE)["leases"]["claims_held"] == 0)
    producer.step(Chunk(request, 36, [[3, 7, 1, 5]]))
    keep, _ = producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    assert keep
    producer.run_until(lambda: "r" in producer.sent)


def test_a_request_whose_prompt_is_cached_lets_the_offer_go(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    consumer.decode("r", PROMPT[:97], decode_params(producer), [[2, 4, 6, 8]], computed=96)
    request = Request("r", PROMPT[:97], {"do_remote_decode": True, "kvd_offer": OFFER}, computed=0)
    producer.scheduler.on_new_request(request)
    producer.step(Chunk(request, 97, [[3, 7, 1, 5]]))
    keep, _ = producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    assert keep
    producer.run_until(lambda: "r" in producer.sent or consumer.step() or False)


def test_another_prompt_than_the_prefills_is_refused(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    request = prefilling(producer)
    producer.step(Chunk(request, 100, [[3, 7, 1, 5]]))
    producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    consumer.decode("r", PROMPT[::-1], decode_params(producer), [[2, 4, 6, 8]])
    consumer.run_until(lambda: "r" in consumer.failed or producer.step() or False)


def test_an_offer_that_nobody_claims_while_its_request_queues_is_there_when_somebody_does(
    start: Callable[..., Engine],
) -> None:
    producer, consumer = start("p", "llama"), start("d", "llama")
    producer.fill(1)
    request = prefilling(producer)
    client, opened = producer.workers[0]._worker._client, []
    opens = client.open_offer_nowait

    def noted(name: str, *, ttl: float, **more: Any) -> None:
        opens(name, ttl=ttl if opened else 0.2, **more)
        opened.append(name)

    client.open_offer_nowait = noted
    for _ in until("the offer has ended and was opened again"):
        producer.step()
        if len(opened) > 1:
            break
    consumer.decode("r", PROMPT, decode_params(producer), [[2, 4, 6, 8]])
    consumer.step()
    producer.step(Chunk(request, 100, [[3, 7, 1, 5]]))
    producer.scheduler.request_finished_all_groups(request, ([3, 7, 1, 5],))
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
