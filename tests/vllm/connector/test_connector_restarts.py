"""Engines that come back as others, and engines of several models at one daemon."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from tests.vllm.connector.connector_engine import BLOCKS, Daemons, Engine
from tests.vllm.connector.test_connector_transfers import HYBRID_PROMPT, PROMPT, all_heads, hybrid_tables

pytestmark = pytest.mark.filterwarnings("default")

Start = Callable[..., Engine]


@pytest.fixture
def start(daemons: Daemons, configurations: Any) -> Iterator[Start]:
    """Starts an engine, at the daemons of a side, which begin with the first engine that asks for them."""
    with ExitStack() as stack:
        running: set[str] = set()

        def engine(side: str, kind: str, tp_size: int = 1, blocks: int = BLOCKS, **settings: Any) -> Engine:
            wanted = {f"{side}{rank}" for rank in range(tp_size)}
            daemons.start(*sorted(wanted - running))
            running.update(wanted)
            config = copy.deepcopy(configurations(kind))
            config.cache_config.num_gpu_blocks_override = blocks
            settings["socket"] = daemons.socket(side + "{rank}")
            return stack.enter_context(closing(Engine(config, kind, settings, tp_size)))

        yield engine


def moved(producer: Engine, consumer: Engine, name: str) -> None:
    """Fails the test unless a prompt's blocks come over."""
    source, destination = [3, 7, 1, 5], [2, 4, 6, 8]
    producer.fill(1)
    consumer.fill(2)
    params = producer.prefilled(name, PROMPT, [source])
    consumer.decode(name, PROMPT, params, [destination])
    consumer.run_until(lambda: name in consumer.received or producer.step() or False)
    assert not consumer.failed
    for layer, (there, here) in itertools.product(consumer.caches[0], zip(source, destination, strict=True)):
        assert torch.equal(all_heads(producer, layer, there), all_heads(consumer, layer, here))
    producer.run_until(lambda: name in producer.sent)


@pytest.mark.sample(8)
@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"tp_size": 1}, {"tp_size": 2}, id="more ranks"),
        pytest.param({"tp_size": 2}, {"tp_size": 1}, id="fewer ranks"),
        pytest.param({"blocks": BLOCKS}, {"blocks": 2 * BLOCKS}, id="more blocks"),
        pytest.param({"blocks": 2 * BLOCKS}, {"blocks": BLOCKS}, id="fewer blocks"),
    ],
)
def test_an_engine_that_comes_back_with_another_cache_works_with_one_that_stayed(
    start: Start, side: str, before: dict[str, int], after: dict[str, int]
) -> None:
    engines = {name: start(name, "llama", **(before if name == side else {})) for name in ("producer", "consumer")}
    moved(**engines, name="r1")
    engines[side].close()
    engines[side] = start(side, "llama", **after)
    moved(**engines, name="r2")


def test_two_models_share_the_daemons_of_a_host_and_neither_takes_the_others_blocks(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    sides = [[start(side, kind, worker=kind) for kind in ("llama", "gemma")] for side in ("p", "d")]
    (dense, hybrid), (dense_there, hybrid_there) = sides
    for seed, engine in enumerate((dense, hybrid, dense_there, hybrid_there)):
        engine.fill(seed)
    tables = hybrid_tables(hybrid)
    mirrored = [[15 - block if block else 0 for block in table] for table in tables]
    params = [
        dense.prefilled("dense", HYBRID_PROMPT, [[1, 2, 3, 4]]),
        hybrid.prefilled("hybrid", HYBRID_PROMPT, tables),
    ]
    dense_there.decode("dense", HYBRID_PROMPT, params[0], [[14, 13, 12, 11]])
    hybrid_there.decode("hybrid", HYBRID_PROMPT, params[1], mirrored)
    ended = {"dense": dense_there.received, "hybrid": hybrid_there.received}

    def both_ended() -> bool:
        hybrid_there.step()
        hybrid.step()
        dense.step()
        return all(name in received for name, received in ended.items())

    dense_there.run_until(both_ended)
    assert not dense_there.failed | hybrid_there.failed
    for layer in dense_there.caches[0]:
        assert torch.equal(dense.caches[0][layer][1:5], dense_there.caches[0][layer][[14, 13, 12, 11]])
    for group, table in zip(hybrid.cache_config.kv_cache_groups, tables, strict=True):
        for layer, block in itertools.product(group.layer_names, filter(None, table)):
            assert torch.equal(hybrid.caches[0][layer][block], hybrid_there.caches[0][layer][15 - block])
    mixed_up = dense.prefilled("mixed up", HYBRID_PROMPT, [[5, 6, 7, 8]])
    hybrid_there.decode("mixed up", HYBRID_PROMPT, mixed_up, mirrored)
    hybrid_there.run_until(lambda: "mixed up" in hybrid_there.received or dense.step() or False)
    assert hybrid_there.failed == {"mixed up"}
    assert "model: source has" in caplog.text
