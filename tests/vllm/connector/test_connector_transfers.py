"""Blocks between engines of connectors: the bytes that vLLM's kernels would read."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from kvd.layout import Full, Sliding
from tests.vllm.connector.connector_engine import HEADS, LAYERS, Daemons, Engine

pytestmark = pytest.mark.filterwarnings("default")
PROMPT = list(range(3, 53)) * 2  # 100 tokens: three blocks of 32 and a part of a fourth, or seven of 16


@pytest.fixture
def start(daemons: Daemons, configurations: Any) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with a daemon for each rank."""
    with ExitStack() as stack:

        def engine(name: str, kind: str, tp_size: int = 1, **settings: Any) -> Engine:
            daemons.start(*(f"{name}{rank}" for rank in range(tp_size)))
            settings["socket"] = daemons.socket(name + "{rank}")
            return stack.enter_context(closing(Engine(configurations(kind), kind, settings, tp_size)))

        yield engine


def heads(engine: Engine, name: str, block: int) -> torch.Tensor:
    """One block of a layer over all ranks: bfloat16 [heads, tokens, content]."""
    return torch.cat([caches[name][block] for caches in engine.caches])


@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_rank_gets_its_heads_from_every_rank_that_has_them(
    start: Callable[..., Engine], producers: int, consumers: int
) -> None:
    producer, consumer = start("p", "llama", producers), start("d", "llama", consumers)
    producer.fill(1)
    consumer.fill(2)
    before = {name: heads(consumer, name, 9).clone() for name in consumer.caches[0]}
    params = producer.prefilled("r", PROMPT, [[3, 7, 1, 5]])
    consumer.decode("r", PROMPT, params, [[2, 4, 6, 8]])
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    for name, untouched in before.items():
        assert heads(producer, name, 3).shape[0] == HEADS
        for source, destination in zip((3, 7, 1, 5), (2, 4, 6, 8), strict=True):
            assert torch.equal(heads(producer, name, source), heads(consumer, name, destination))
        assert torch.equal(heads(consumer, name, 9), untouched)
    producer.run_until(lambda: "r" in producer.sent)


def test_the_layers_of_a_drafter_move_with_the_models(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "drafted"), start("d", "drafted")
    producer.fill(1)
    consumer.fill(2)
    params = producer.prefilled("r", PROMPT, [[3, 7, 1, 5]])
    consumer.decode("r", PROMPT, params, [[2, 4, 6, 8]])
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    assert len(consumer.caches[0]) == LAYERS + 1
    for name in consumer.caches[0]:
        for source, destination in zip((3, 7, 1, 5), (2, 4, 6, 8), strict=True):
            assert torch.equal(heads(producer, name, source), heads(consumer, name, destination))


def test_a_hybrid_model_moves_each_groups_window_and_no_more(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "gemma"), start("d", "gemma")
    windows = [group.window for group in producer.workers[0]._cache.groups]
    assert sorted(map(str, windows)) == sorted(map(str, [Full(), Sliding(80), Sliding(80)]))
    producer.fill(1)
    consumer.fill(2)
    tables = [
        [1, 2, 3, 4] if isinstance(window, Full) else [0, 5 + i, 7 + i, 9 + i] for i, window in enumerate(windows)
    ]
    prompt = PROMPT + PROMPT[:28]  # 128 tokens: computing the last one needs tokens 48 to 127
    params = producer.prefilled("r", prompt, tables)
    before = [{name: cache.clone() for name, cache in caches.items()} for caches in consumer.caches]
    mirrored = [[15 - block if block else 0 for block in table] for table in tables]
    consumer.decode("r", prompt, params, mirrored)
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    for group, table in zip(producer.cache_config.kv_cache_groups, tables, strict=True):
        for name in group.layer_names:
            written = {15 - block for block in table if block}
            for block in table:
                if block:
                    assert torch.equal(producer.caches[0][name][block], consumer.caches[0][name][15 - block])
            others = {15 - block for other in tables for block in other if block} - written
            for block in set(range(16)) - written - others:
                assert torch.equal(consumer.caches[0][name][block], before[0][name][block])


@pytest.mark.parametrize(("producers", "consumers"), [(1, 2), (2, 1)])
def test_latents_are_the_same_on_every_rank(start: Callable[..., Engine], producers: int, consumers: int) -> None:
    producer, consumer = start("p", "deepseek", producers), start("d", "deepseek", consumers)
    producer.fill(1)
    if producers == 2:
        for name in producer.caches[0]:
            producer.caches[1][name].copy_(producer.caches[0][name])
    consumer.fill(2)
    source, destination = [3, 7, 1, 5, 9, 11, 13], [2, 4, 6, 8, 10, 12, 14]
    params = producer.prefilled("r", PROMPT, [source])
    consumer.decode("r", PROMPT, params, [destination])
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    for caches in consumer.caches:
        assert len(caches) == LAYERS
        for name in caches:
            for there, here in zip(source, destination, strict=True):
                assert torch.equal(producer.caches[0][name][there], caches[name][here])
    producer.run_until(lambda: "r" in producer.sent)
