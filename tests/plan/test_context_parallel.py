"""Producers and consumers whose ranks deal the tokens of a block out among them."""

import itertools
from collections import Counter

import numpy as np
import pytest

from kvd.layout import Full
from kvd.layout.models import LayerKind
from kvd.layout.presets import Attention, Latent
from kvd.plan import Planner, SpanPair, route
from kvd.plan.explain import explain
from kvd.plan.planner import FEW
from tests.plan.layout_buffers import engine, model, move
from tests.support.steps import steps

RUN, LAYERS = 4, 3
MLA = model(LayerKind(Full(), tuple(range(LAYERS)), (Latent(6),)))
GQA = model(LayerKind(Full(), tuple(range(LAYERS)), (Attention(2, 8),)))

SIDES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)]
"""Ranks, and among how many of them tokens are dealt out."""
PAIRS = [pair for pair in itertools.product(SIDES, repeat=2) if pair[0][1] > 1 or pair[1][1] > 1]


def engines(what, ours: tuple[int, int], theirs: tuple[int, int]):
    sides = [engine(what, "flash-hnd", tp=tp, cp=cp, block=RUN) for tp, cp in (ours, theirs)]
    return sides[0], sides[1]


@pytest.mark.parametrize("tokens", [1, RUN, 2 * RUN + 1, 61])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_rank_gets_its_runs_of_tokens(ours: tuple[int, int], theirs: tuple[int, int], tokens: int) -> None:
    sources, destinations = engines(MLA, ours, theirs)
    for destination in destinations:
        move(sources, destination, tokens)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_what_a_prefix_cache_has_is_left_alone(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    sources, destinations = engines(MLA, ours, theirs)
    for destination in destinations:
        move(sources, destination, 61, hits=[1])


def test_heads_on_fewer_ranks_than_deal_their_tokens_out_are_right_too() -> None:
    for ours, theirs in itertools.product([(4, 2), (8, 4), (2, 1)], repeat=2):
        sources, destinations = engines(GQA, ours, theirs)
        for destination in destinations:
            move(sources, destination, 61)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_all_ranks_agree_on_who_reads_and_who_releases(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    sources, destinations = engines(MLA, ours, theirs)
    routes = [route(sources, destination) for destination in destinations]
    reads = Counter(share.source for found in routes for share in found.shares)
    for found in routes:
        assert found.readers == tuple(reads[source] for source in range(ours[0]))
    released = Counter(source for found in routes for source in found.releases)
    assert released == Counter(source for source in range(ours[0]) if not reads[source])


@pytest.mark.parametrize(
    ("ours", "theirs", "sources"),
    [
        ((4, 4), (4, 4), [{0}, {1}, {2}, {3}]),
        ((4, 4), (1, 1), [{0, 1, 2, 3}]),
        ((1, 1), (4, 4), [{0}, {0}, {0}, {0}]),
        ((4, 4), (2, 2), [{0, 2}, {1, 3}]),
        ((2, 2), (4, 4), [{0}, {1}, {0}, {1}]),
        ((4, 2), (2, 2), [{0}, {1}]),
        ((4, 2), (4, 2), [{0}, {1}, {2}, {3}]),
        ((4, 2), (2, 1), [{0, 1}, {2, 3}]),
    ],
)
def test_a_rank_reads_those_with_its_tokens_and_replicas_are_shared_out(
    ours: tuple[int, int], theirs: tuple[int, int], sources: list[set[int]]
) -> None:
    producers, consumers = engines(MLA, ours, theirs)
    assert [{share.source for share in route(producers, consumer).shares} for consumer in consumers] == sources


def test_heads_that_another_stage_holds_once_are_no_matter_of_ours() -> None:
    """A worker could declare them: what it says of its own stage is all that is checked."""
    many = engine(model(LayerKind(Full(), (0, 1), (Attention(8, 8),))), "flash-hnd", tp=2, pp=2)
    latent = engine(model(LayerKind(Full(), (0, 1), (Latent(6),))), "flash-hnd", tp=2, pp=2, cp=2)
    for destination in latent:
        assert len(route(many, destination).readers) == len(many)


def test_an_explanation_counts_what_a_rank_gets() -> None:
    sources, destinations = engines(MLA, (4, 4), (2, 2))
    figures = [explain(sources, destination, 64) for destination in destinations]
    assert [figure.bytes for figure in figures] == [64 // 2 * LAYERS * 6] * 2
    assert [figure.sources for figure in figures] == [(0, 2), (1, 3)]


def test_a_small_plan_takes_no_steps_for_the_tokens_of_other_ranks() -> None:
    ranks, blocks = 1024, FEW // LAYERS
    (source,), destinations = engines(MLA, (1, 1), (ranks, ranks))
    destination = destinations[5]
    planner = Planner(source, destination, route([source], destination).shares[0])
    theirs, ours = np.arange(blocks * ranks, dtype=np.uint32), np.arange(blocks, dtype=np.uint32)
    assert planner.plan([SpanPair(0, theirs, 0, ours)]).bytes == blocks * destination.groups[0].block_bytes
    assert steps(lambda: planner.plan([SpanPair(0, theirs, 0, ours)])) < blocks * ranks / 10
