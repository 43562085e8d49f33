"""Every layout against every other, for all sizes of tensor parallelism and ratios of block sizes."""

import itertools

import pytest

from kvd.layout import Full, State
from kvd.layout.models import LayerKind
from kvd.layout.presets import LAYOUTS, Attention, Indexer, Latent, Recurrent, Section
from tests.plan.layout_buffers import engine, model, move

SIZES = list(itertools.product((1, 2, 4, 8), repeat=2))
RATIOS = ((4, 4), (8, 4), (4, 8), (16, 4))
ATTENTION = model(LayerKind(Full(), (0, 1), (Attention(heads=4, head_bytes=2),)))
MLA = model(LayerKind(Full(), (0, 1, 2), (Latent(6), Indexer(key_bytes=4, scale_bytes=1))))
MAMBA2 = (Section("x", 8, 3), Section("B", 2, 2), Section("C", 2, 2))
GATED_DELTA_NET = (Section("q", 8, 2), Section("k", 8, 2), Section("v", 8, 3))
MAMBA1 = (Section("x", 16, 1),)


@pytest.mark.sample(13)
@pytest.mark.parametrize("consumer", LAYOUTS)
@pytest.mark.parametrize("producer", LAYOUTS)
def test_any_layout_fills_any_other_at_every_pair_of_sizes(producer: str, consumer: str) -> None:
    for turn, ((ours, theirs), (block, other)) in enumerate(itertools.product(SIZES, RATIOS)):
        sources = engine(ATTENTION, producer, tp=ours, block=block, blocks=8)
        destinations = engine(ATTENTION, consumer, tp=theirs, block=other, blocks=8)
        assert move(sources, destinations[turn * 3 % theirs], tokens=18).bytes > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("consumer", ["packed-nhd", "cross-layer-nhd"])
@pytest.mark.parametrize("producer", ["packed-nhd", "cross-layer-nhd"])
def test_latents_and_their_indexer_come_from_one_rank_at_every_pair_of_sizes(producer: str, consumer: str) -> None:
    for turn, ((ours, theirs), (block, other)) in enumerate(itertools.product(SIZES, RATIOS)):
        sources = engine(MLA, producer, tp=ours, block=block, blocks=8)
        destinations = engine(MLA, consumer, tp=theirs, block=other, blocks=8)
        assert len(move(sources, destinations[turn * 3 % theirs], tokens=18).plans) == 1


@pytest.mark.sample(7)
@pytest.mark.parametrize("sections", [MAMBA1, MAMBA2, GATED_DELTA_NET], ids=["mamba1", "mamba2", "gated-delta-net"])
@pytest.mark.parametrize(
    "layouts", list(itertools.product(["packed-nhd", "cross-layer-nhd"], repeat=2)), ids="-to-".join
)
@pytest.mark.parametrize("orders", list(itertools.product(["tap head", "head tap"], repeat=2)), ids="-to-".join)
def test_states_are_cut_by_section_at_every_pair_of_sizes(sections, layouts, orders) -> None:
    kinds = [model(LayerKind(State(), (0, 1), (Recurrent(sections, 3, 8, 5, conv_order=order),))) for order in orders]
    for turn, (ours, theirs) in enumerate(SIZES):
        sources = engine(kinds[0], layouts[0], tp=ours, blocks=4)
        destinations = engine(kinds[1], layouts[1], tp=theirs, blocks=4)
        assert move(sources, destinations[turn * 3 % theirs], tokens=18).bytes > 0
