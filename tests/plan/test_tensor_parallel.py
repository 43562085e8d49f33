"""Producers and consumers of different tensor-parallel sizes, both ways."""

import itertools
from collections import Counter

import pytest

from kvd.layout import Full
from kvd.layout.models import LayerKind
from kvd.layout.presets import Attention, Latent
from kvd.plan import route
from tests.plan.layout_buffers import engine, model, move

SIZES = list(itertools.product((1, 2, 4, 8), repeat=2))
HEADS, LAYERS, BLOCK, TOKENS = 8, 3, 4, 17
BLOCKS = -(-TOKENS // BLOCK)


def attention(heads: int):
    return model(LayerKind(Full(), tuple(range(LAYERS)), (Attention(heads, 4),)))


MLA = model(LayerKind(Full(), tuple(range(LAYERS)), (Latent(6),)))


def engines(what, ours: int, theirs: int, producer: str = "flash-hnd", consumer: str = "flash-hnd"):
    return engine(what, producer, tp=ours, block=BLOCK), engine(what, consumer, tp=theirs, block=BLOCK)


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_each_consumer_rank_reads_the_owners_of_its_heads(ours: int, theirs: int) -> None:
    sources, destinations = engines(attention(HEADS), ours, theirs)
    for rank, destination in enumerate(destinations):
        moved = move(sources, destination, TOKENS)
        expected = (
            {rank * ours // theirs}
            if theirs >= ours
            else set(range(rank * ours // theirs, (rank + 1) * ours // theirs))
        )
        assert moved.plans.keys() == expected
        assert moved.bytes == BLOCKS * destination.groups[0].block_bytes


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_heads_outside_tokens_never_split_the_heads_that_two_ranks_share(ours: int, theirs: int) -> None:
    sources, destinations = engines(attention(HEADS), ours, theirs)
    shared = HEADS // max(ours, theirs)
    assert move(sources, destinations[-1], TOKENS).lengths == {shared * BLOCK * 4}


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_tokens_outside_heads_are_right_though_finer(ours: int, theirs: int) -> None:
    sources, destinations = engines(attention(HEADS), ours, theirs, "flash-nhd", "flash-nhd")
    row = HEADS // max(ours, theirs) * 4
    assert move(sources, destinations[-1], TOKENS).lengths == {row * BLOCK if ours == theirs else row}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_replicated_heads_are_read_from_one_replica_each(heads: int, ours: int, theirs: int) -> None:
    sources, destinations = engines(attention(heads), ours, theirs)
    for destination in destinations:
        moved = move(sources, destination, TOKENS)
        assert moved.bytes == BLOCKS * destination.groups[0].block_bytes


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_choice_of_a_replica_spreads_the_load(heads: int) -> None:
    sources, destinations = engines(attention(heads), 8, 8)
    assert route(sources, destinations[0]).readers == (1,) * 8
    sources, destinations = engines(attention(heads), 8, 4)
    assert route(sources, destinations[0]).readers == (1, 0) * 4
    sources, destinations = engines(attention(heads), 4, 8)
    assert route(sources, destinations[0]).readers == (2,) * 4


def test_more_producer_ranks_than_heads_with_a_smaller_consumer() -> None:
    """Refused by vLLM's connector: 8 ranks share 4 heads, and 2 ranks read two heads each."""
    sources, destinations = engines(attention(4), 8, 2)
    assert [sorted(move(sources, destination, TOKENS).plans) for destination in destinations] == [[0, 2], [4, 6]]


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_latents_come_whole_from_one_rank(ours: int, theirs: int) -> None:
    sources, destinations = engines(MLA, ours, theirs)
    for rank, destination in enumerate(destinations):
        moved = move(sources, destination, TOKENS)
        assert list(moved.plans) == [rank * ours // theirs]
        assert moved.count == LAYERS * BLOCKS
        assert moved.lengths == {BLOCK * 6}


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_all_ranks_agree_on_who_reads_and_who_releases(heads: int, ours: int, theirs: int) -> None:
    sources, destinations = engines(attention(heads), ours, theirs)
    routes = [route(sources, destination) for destination in destinations]
    reads = Counter(share.source for found in routes for share in found.shares)
    for found in routes:
        assert found.readers == tuple(reads[source] for source in range(ours))
    released = Counter(source for found in routes for source in found.releases)
    assert released == Counter(source for source in range(ours) if not reads[source])
