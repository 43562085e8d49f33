"""Blocks that travel back: what a decode engine kept of a turn reaches the next turn's prefill engine, byte by byte."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM: make test-vllm")

import torch

from kvd.layout import Full, State
from tests.engines.vllm.blocks import Manager
from tests.vllm.connector.connector_engine import SECTIONS, Daemons, Engine
from tests.vllm.connector.test_connector_transfers import same

pytestmark = pytest.mark.filterwarnings("default")
SEQUENCE = list(range(3, 53)) * 2
"""A prompt and its answer: 100 tokens, of which 99 were computed, in three blocks of 32 and a part of a fourth."""
ASKED = 60


@pytest.fixture
def start(daemons: Daemons, configurations: Any) -> Iterator[Callable[..., Engine]]:
    """Starts an engine that computes what it cannot load, with a daemon for each rank."""
    with ExitStack() as stack:

        def engine(name: str, kind: str, tp_size: int = 1, copies: int = 1, **settings: Any) -> Engine:
            daemons.start(*(f"{name}{rank}" for rank in range(tp_size)))
            settings["socket"] = daemons.socket(name + "{rank}")
            made = Engine(configurations(kind), kind, settings, tp_size, copies=copies, policy="recompute")
            return stack.enter_context(closing(made))

        yield engine


def tables(engine: Engine) -> list[list[int]]:
    """A request's blocks in each group: of windows and states the last ones."""
    windows = [window for window, _ in engine.scheduler._scheduler._groups]
    kept = {Full: lambda _: [1, 2, 3, 4], State: lambda i: [0, 0, 0, 5 + i]}
    return [kept.get(type(window), lambda i: [0, 5 + i, 7 + i, 9 + i])(i) for i, window in enumerate(windows)]


def mirrored(found: list[list[int]]) -> list[list[int]]:
    return [[15 - block if block else 0 for block in table] for table in found]


def heads(engine: Engine, name: str, block: int) -> torch.Tensor:
    """One block of a layer over all ranks: bfloat16 [heads, tokens, content]."""
    return torch.cat([caches[name][block] for caches in engine.caches])


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["llama", "gemma", *SECTIONS])
@pytest.mark.parametrize(("decoders", "prefillers"), [(1, 1), (1, 2), (2, 1)])
def test_the_next_turns_prefill_gets_what_was_decoded(
    start: Callable[..., Engine], kind: str, decoders: int, prefillers: int
) -> None:
    decode, prefill = start("d", kind, decoders, turn_share=0.9), start("p", kind, prefillers)
    decode.fill(1)
    prefill.fill(2)
    manager, found = Manager(), tables(decode)
    decode.scheduler.bind_kv_cache_manager(manager)
    manager.take("turn", *found)
    params = decode.answered("turn", SEQUENCE, ASKED, manager)
    assert manager.freed == []
    prefill.decode("next", [*SEQUENCE, *range(10, 40)], params, mirrored(found))
    prefill.run_until(lambda: "next" in prefill.received or decode.step() or False)
    assert not prefill.failed
    assert prefill.scheduler.get_kv_connector_stats().data["turns"] == ["pulled"]
    for group, table in zip(decode.cache_config.kv_cache_groups, found, strict=True):
        for name in group.layer_names:
            for block in filter(None, table):
                if kind in SECTIONS and table[0] == 0:
                    assert same(decode.state(kind, name, block), prefill.state(kind, name, 15 - block))
                else:
                    assert torch.equal(heads(decode, name, block), heads(prefill, name, 15 - block))
    decode.run_until(lambda: bool(manager.freed))
    assert sorted(manager.freed) == sorted({block for table in found for block in table if block})
    assert decode.scheduler.get_kv_connector_stats().data["kept_turns"] == ["read"]


def test_a_turn_that_is_given_up_is_free_again_and_its_pull_fails(start: Callable[..., Engine]) -> None:
    decode, prefill = start("d", "llama", turn_share=0.9), start("p", "llama")
    manager = Manager()
    decode.scheduler.bind_kv_cache_manager(manager)
    manager.take("turn", [1, 2, 3, 4])
    params = decode.answered("turn", SEQUENCE, ASKED, manager)
    decode.step()
    decode.scheduler.reset_cache()
    assert decode.scheduler.has_pending_push_work()
    decode.run_until(lambda: bool(manager.freed))
    assert not decode.scheduler.has_pending_push_work()
    prefill.decode("next", [*SEQUENCE, 9], params, [[8, 7, 6, 5]])
    prefill.run_until(lambda: "next" in prefill.received)
    assert prefill.failed == {"next"}
    assert prefill.scheduler.get_kv_connector_stats().data["turns"] == ["gone"]


def test_a_turn_is_computed_where_workers_have_copies_of_others_caches(start: Callable[..., Engine]) -> None:
    decode, prefill = start("d", "llama", turn_share=0.9), start("p", "llama", copies=2)
    manager = Manager()
    decode.scheduler.bind_kv_cache_manager(manager)
    manager.take("turn", [1, 2, 3, 4])
    params = decode.answered("turn", SEQUENCE, ASKED, manager)
    prefill.decode("next", [*SEQUENCE, 9], params, [[8, 7, 6, 5]])
    decode.run_until(lambda: prefill.step() or bool(manager.freed))
    assert not prefill.failed | prefill.received
    assert prefill.scheduler.get_kv_connector_stats().data["turns"] == ["policy"]


def test_an_engine_that_was_killed_after_its_answer_loses_no_turn(start: Callable[..., Engine]) -> None:
    decode, prefill = start("d", "llama", turn_share=0.9), start("p", "llama")
    manager = Manager()
    decode.scheduler.bind_kv_cache_manager(manager)
    manager.take("turn", [1, 2, 3, 4])
    params = decode.answered("turn", SEQUENCE, ASKED, manager)
    decode.step()
    prefill.decode("next", [*SEQUENCE, 9], params, [[8, 7, 6, 5]])  # and the decode engine makes no steps any more
    prefill.run_until(lambda: "next" in prefill.received)
    assert not prefill.failed
