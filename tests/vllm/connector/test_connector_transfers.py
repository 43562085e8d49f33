"""Blocks between engines of connectors: the bytes that vLLM's kernels would read."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from kvd.layout import Full, Sliding
from tests.vllm.connector.connector_engine import HEADS, LAYERS, SECTIONS, Daemons, Engine, layer_specs

pytestmark = pytest.mark.filterwarnings("default")
PROMPT = list(range(3, 53)) * 2  # 100 tokens: three blocks of 32 and a part of a fourth, or seven of 16


@pytest.fixture
def start(daemons: Daemons, configurations: Any) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with a daemon for each rank."""
    with ExitStack() as stack:

        def engine(
            name: str, kind: str, tp_size: int = 1, stages: int = 1, cp_size: int = 1, copies: int = 1, **settings: Any
        ) -> Engine:
            daemons.start(*(f"{name}{rank}" for rank in range(tp_size * stages)))
            settings["socket"] = daemons.socket(name + "{rank}")
            made = Engine(configurations(kind), kind, settings, tp_size, stages=stages, cp_size=cp_size, copies=copies)
            return stack.enter_context(closing(made))

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


def layers(engine: Engine) -> set[str]:
    """Of all ranks."""
    return {name for caches in engine.caches for name in caches}


def all_heads(engine: Engine, name: str, block: int) -> torch.Tensor:
    """One block of a layer, over the ranks that have the layer."""
    return torch.cat([caches[name][block] for caches in engine.caches if name in caches])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "drafts"), [("drafted", 1), ("mtp", 1), ("own drafter", 2)])
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (2, 1)])
def test_the_layers_of_a_drafter_move_with_the_models(
    start: Callable[..., Engine], kind: str, drafts: int, producers: int, consumers: int
) -> None:
    """Numbered after the model's, or from 0 as MTP modules of some models and a drafter of its own are."""
    producer, consumer = start("p", kind, producers), start("d", kind, consumers)
    producer.fill(1)
    consumer.fill(2)
    params = producer.prefilled("r", PROMPT, [[3, 7, 1, 5]])
    consumer.decode("r", PROMPT, params, [[2, 4, 6, 8]])
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    assert len(layers(consumer)) == LAYERS + drafts
    for name in layers(consumer):
        for source, destination in zip((3, 7, 1, 5), (2, 4, 6, 8), strict=True):
            assert torch.equal(all_heads(producer, name, source), all_heads(consumer, name, destination))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "producers", "consumers"),
    [
        ("llama", (1, 2), (1, 1)),
        ("gemma", (1, 2), (1, 3)),
        ("halves", (1, 2), (1, 1)),
        ("halves", (1, 1), (1, 2)),
        ("mtp", (1, 2), (1, 1)),
        ("mtp", (1, 1), (1, 3)),
        ("own drafter", (2, 2), (1, 1)),
        ("drafted", (1, 3), (2, 1)),
    ],
)
def test_pipeline_stages_read_their_layers_from_the_stages_that_have_them(
    start: Callable[..., Engine], kind: str, producers: tuple[int, int], consumers: tuple[int, int]
) -> None:
    """Each side as ranks a stage and stages. Of "halves", a stage has layers of one of the two groups only."""
    producer, consumer = start("p", kind, *producers), start("d", kind, *consumers)
    producer.fill(1)
    consumer.fill(2)
    tables = hybrid_tables(producer)
    mirrored = [[15 - block if block else 0 for block in table] for table in tables]
    params = producer.prefilled("r", HYBRID_PROMPT, tables)
    consumer.decode("r", HYBRID_PROMPT, params, mirrored)
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    assert layers(producer) == layers(consumer) == set(layer_specs(kind, 1))
    for worker in producer.workers:
        for group, table in zip(worker._kv_cache_config.kv_cache_groups, tables, strict=True):
            for name, block in itertools.product(group.layer_names, filter(None, table)):
                assert torch.equal(all_heads(producer, name, block), all_heads(consumer, name, 15 - block))
    producer.run_until(lambda: "r" in producer.sent)


HYBRID_PROMPT = PROMPT + PROMPT[:28]
"""128 tokens: computing the last one needs, in a window, tokens 48 to 127."""


def hybrid_tables(engine: Engine) -> list[list[int]]:
    """The blocks of a prompt of 128 tokens in each group; those of 15 less this number are nobody's."""
    windows = [group.window for group in engine.workers[0]._cache.groups]
    return [[1, 2, 3, 4] if isinstance(window, Full) else [0, 5 + i, 7 + i, 9 + i] for i, window in enumerate(windows)]


def test_a_hybrid_model_moves_each_groups_window_and_no_more(start: Callable[..., Engine]) -> None:
    producer, consumer = start("p", "gemma"), start("d", "gemma")
    windows = [group.window for group in producer.workers[0]._cache.groups]
    assert sorted(map(str, windows)) == sorted(map(str, [Full(), Sliding(80), Sliding(80)]))
    producer.fill(1)
    consumer.fill(2)
    tables = hybrid_tables(producer)
    params = producer.prefilled("r", HYBRID_PROMPT, tables)
    before = [{name: cache.clone() for name, cache in caches.items()} for caches in consumer.caches]
    mirrored = [[15 - block if block else 0 for block in table] for table in tables]
    consumer.decode("r", HYBRID_PROMPT, params, mirrored)
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


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_every_rank_gets_its_channels_and_heads_of_a_recurrent_state(
    start: Callable[..., Engine], kind: str, producers: int, consumers: int
) -> None:
    """Of a prompt of 100 tokens: attention has four blocks, and of the blocks of a state the last alone matters."""
    producer, consumer = start("p", kind, producers), start("d", kind, consumers)
    producer.fill(1)
    consumer.fill(2)
    windows = [group.window for group in producer.workers[0]._cache.groups]
    tables = [[1, 2, 3, 4] if isinstance(window, Full) else [0, 0, 13, 5 + i] for i, window in enumerate(windows)]
    mirrored = [[15 - block if block else 0 for block in table] for table in tables]
    names = [name for name in consumer.caches[0] if consumer.caches[0][name].dtype is torch.int8]
    assert len(names) == 4
    before = {name: consumer.state(kind, name, 2) for name in names}
    params = producer.prefilled("r", PROMPT, tables)
    consumer.decode("r", PROMPT, params, mirrored)
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    for group, table in zip(producer.cache_config.kv_cache_groups, tables, strict=True):
        for name in group.layer_names:
            if name in names:
                assert same(producer.state(kind, name, table[-1]), consumer.state(kind, name, 15 - table[-1]))
                assert same(consumer.state(kind, name, 2), before[name])
            else:
                for block in table:
                    assert torch.equal(all_heads(producer, name, block), all_heads(consumer, name, 15 - block))
    producer.run_until(lambda: "r" in producer.sent)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Byte by byte: what was drawn at random may be no number."""
    pairs = zip(ours, theirs, strict=True)
    return all(
        torch.equal(one.contiguous().view(torch.int8), other.contiguous().view(torch.int8)) for one, other in pairs
    )


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


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("producers", "consumers"),
    [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 2), (2, 2)), ((4, 4), (2, 2)), ((2, 2), (4, 4)), ((4, 2), (2, 1))],
)
def test_ranks_that_deal_the_tokens_of_latents_out_get_theirs_from_those_that_have_them(
    start: Callable[..., Engine], producers: tuple[int, int], consumers: tuple[int, int]
) -> None:
    """Each side as ranks, and among how many of them a block's tokens are dealt out: 16 for each in turn."""
    sides = [start(name, "deepseek", tp, cp_size=cp) for name, (tp, cp) in (("p", producers), ("d", consumers))]
    for seed, engine in enumerate(sides):
        engine.fill(seed)
    producer, consumer = sides
    for rank in range(producers[1], producers[0]):  # replicas
        for name, cache in producer.caches[rank].items():
            cache.copy_(producer.caches[rank % producers[1]][name])
    for prompt in (PROMPT, PROMPT[:10]):  # of the short one, all ranks but the first have nothing
        runs = -(-len(prompt) // 16)
        source = [3, 7, 1, 5, 9, 11, 13][: -(-runs // producers[1])]
        destination = [2, 4, 6, 8, 10, 12, 14][: -(-runs // consumers[1])]
        request = f"of {len(prompt)} tokens"
        params = producer.prefilled(request, prompt, [source])
        consumer.decode(request, prompt, params, [destination])
        consumer.run_until(lambda request=request: request in consumer.received or producer.step() or False)
        assert not consumer.failed
        for run, rank in itertools.product(range(runs), range(consumers[0])):
            if run % consumers[1] == rank % consumers[1]:
                for name, cache in consumer.caches[rank].items():
                    theirs = producer.caches[run % producers[1]][name][source[run // producers[1]]]
                    assert torch.equal(theirs, cache[destination[run // consumers[1]]])
        producer.run_until(lambda request=request: request in producer.sent)
        consumer.fill(3)


@pytest.mark.parametrize(("kind", "producers"), [("deepseek", (1, 1)), ("llama", (2, 1)), ("llama", (1, 2))])
def test_of_copies_of_a_cache_one_is_read_and_none_is_pulled_into(
    start: Callable[..., Engine], kind: str, producers: tuple[int, int]
) -> None:
    """Prefill context parallelism: ranks and stages of each copy, of which there are two."""
    producer, consumer = start("p", kind, *producers, copies=2), start("d", kind)
    producer.fill(1)
    consumer.fill(2)
    source, destination = ([3, 7, 1, 5, 9, 11, 13], [2, 4, 6, 8, 10, 12, 14])
    blocks = 7 if kind == "deepseek" else 4
    params = producer.prefilled("r", PROMPT, [source[:blocks]])
    consumer.decode("r", PROMPT, params, [destination[:blocks]])
    consumer.run_until(lambda: "r" in consumer.received or producer.step() or False)
    assert not consumer.failed
    tp, stages = producers
    first = [caches for rank, caches in enumerate(producer.caches) if rank % (2 * tp) < tp]
    assert len(first) * 2 == len(producer.caches) == 2 * tp * stages
    for name, cache in consumer.caches[0].items():
        for there, here in zip(source[:blocks], destination[:blocks], strict=True):
            assert torch.equal(torch.cat([caches[name][there] for caches in first if name in caches]), cache[here])
    producer.run_until(lambda: "r" in producer.sent)
    producer.decode("back", PROMPT, consumer.prefilled("back", PROMPT, [source[:blocks]]), [destination[:blocks]])
    producer.run_until(lambda: consumer.step() or "back" in producer.received)
    assert producer.failed == {"back"}
