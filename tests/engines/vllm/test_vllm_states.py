"""Recurrent states: the bytes of a layer's state on ranks of one engine, read by ranks of another."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.engines.vllm.cache.spec import CacheGroup, States, WorkerCache, cache_spec
from kvd.engines.vllm.cache.states import recurrent
from kvd.errors import BadRequest
from kvd.layout import CacheSpec, Shard, State
from kvd.plan import Planner, SpanPair, check_compatible, route

BLOCKS, LAYERS = 5, 3


class Dtype(int):
    """A torch dtype, as far as it is read."""

    @property
    def itemsize(self) -> int:
        return int(self)


BF16, F32 = Dtype(2), Dtype(4)


@dataclass(frozen=True)
class Kind:
    """A model's states: parts of its convolution as (number, channels each), and the state as heads of a shape."""

    name: str
    sections: tuple[tuple[int, int], ...]
    heads: int
    inner: tuple[int, ...]
    groups: int = 0

    def spec(self, ranks: int, *, channels_first: bool, taps: int = 3) -> Any:
        channels = sum(max(1, parts // ranks) * width for parts, width in self.sections)
        conv = (channels, taps) if channels_first else (taps, channels)
        return SimpleNamespace(
            mamba_type=SimpleNamespace(name=self.name),
            shapes=(conv, (self.heads // ranks, *self.inner)),
            dtypes=(BF16, F32),
            tp_replicated=False,
            num_speculative_blocks=0,
        )


KINDS = {
    "mamba1": Kind("MAMBA1", ((16, 1),), 16, (8,)),
    "mamba2": Kind("MAMBA2", ((8, 4), (4, 6), (4, 6)), 8, (4, 6), groups=4),
    "mamba2 of one group": Kind("MAMBA2", ((8, 4), (1, 6), (1, 6)), 8, (4, 6), groups=1),
    "gated delta net": Kind("GDN_ATTN", ((4, 6), (4, 6), (8, 3)), 8, (3, 6)),
    "KDA": Kind("GDN_ATTN", ((4, 5), (4, 5), (4, 5)), 4, (5, 5)),
}


def held(total: int, ranks: int, rank: int) -> slice:
    """Which of `total` a rank holds; more ranks than there are hold copies."""
    each = max(1, total // ranks)
    return slice(rank * total // ranks, rank * total // ranks + each)


class Engine:
    """Pools of the ranks of an engine, with the bytes that vLLM's kernels would write of one state."""

    def __init__(
        self,
        kind: Kind,
        ranks: int,
        *,
        channels_first: bool,
        padding: int = 7,
        block_tokens: int = 64,
        taps: int = 3,
    ) -> None:
        self.kind, self.ranks, self.channels_first = kind, ranks, channels_first
        spec = kind.spec(ranks, channels_first=channels_first, taps=taps)
        conv, state = (int(np.prod(shape)) * size for shape, size in zip(spec.shapes, spec.dtypes, strict=True))
        self.conv_bytes, self.nbytes = conv, conv + state
        self.page = self.nbytes + padding
        self.pools = [np.zeros(LAYERS * BLOCKS * self.page, np.uint8) for _ in range(ranks)]
        self.specs = [self._spec(spec, rank, block_tokens) for rank in range(ranks)]

    def _spec(self, spec: Any, rank: int, block_tokens: int) -> CacheSpec:
        states = States(
            component="model.layers.*.mixer",
            layers=tuple(range(LAYERS)),
            offset=0,
            layer_stride=BLOCKS * self.page,
            block_stride=self.page,
            state=recurrent(spec, self.ranks, self.kind.groups, channels_first=self.channels_first),
            nbytes=self.nbytes,
            dtype="bfloat16+float32/cpu",
        )
        shard = Shard(stages=((0, LAYERS),), tp_rank=rank, tp_size=self.ranks)
        group = CacheGroup(window=State(), block_tokens=block_tokens, pages=(states,))
        nbytes = LAYERS * BLOCKS * self.page
        return cache_spec(WorkerCache(nbytes=nbytes, num_blocks=BLOCKS, groups=(group,), shard=shard))

    def block(self, rank: int, layer: int, block: int) -> np.ndarray:
        return self.pools[rank][(layer * BLOCKS + block) * self.page :][: self.page]

    def write(self, layer: int, block: int, sections: list[np.ndarray], state: np.ndarray) -> None:
        """A layer's state: sections uint16 [parts, channels, taps], and uint32 [heads, ...]."""
        for rank in range(self.ranks):
            self.block(rank, layer, block)[: self.nbytes] = self.bytes_of(rank, sections, state)

    def bytes_of(self, rank: int, sections: list[np.ndarray], state: np.ndarray) -> np.ndarray:
        """What this rank holds of the state of a layer, as vLLM lays it out."""
        parts = [part[held(len(part), self.ranks, rank)].reshape(-1, part.shape[-1]) for part in sections]
        conv = np.concatenate(parts)
        conv = conv if self.channels_first else conv.T
        mine = state[held(len(state), self.ranks, rank)]
        return np.concatenate([np.ascontiguousarray(half).view(np.uint8).ravel() for half in (conv, mine)])


def states_of(kind: Kind, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Random bytes for a state over all ranks."""
    source = np.random.default_rng(seed)
    sections = [source.integers(1, 1 << 16, (*shape, 3), np.uint16) for shape in kind.sections]
    return sections, source.integers(1, 1 << 32, (kind.heads, *kind.inner), np.uint32)


def move(producer: Engine, consumer: Engine, spans: list[SpanPair], tokens: int) -> None:
    """Every rank of the consumer pulls."""
    for rank, spec in enumerate(consumer.specs):
        for source in producer.specs:
            check_compatible(source, spec)
        for share in route(producer.specs, spec).shares:
            plan = Planner(producer.specs[share.source], spec, share).plan(spans, tokens)
            for src, dst, length in zip(plan.src.tolist(), plan.dst.tolist(), plan.length.tolist(), strict=True):
                consumer.pools[rank][dst : dst + length] = producer.pools[share.source][src : src + length]


def ids(*blocks: int) -> Any:
    return np.array(blocks, np.uint32)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("ranks", "readers"), [(1, 1), (1, 2), (2, 1), (4, 2), (1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("orders", [(False, False), (True, True), (True, False), (False, True)])
def test_each_rank_gets_its_channels_and_heads_of_a_state_and_nothing_else_changes(
    kind: Kind, ranks: int, readers: int, orders: tuple[bool, bool]
) -> None:
    producer = Engine(kind, ranks, channels_first=orders[0])
    consumer = Engine(kind, readers, channels_first=orders[1], padding=0)
    expected = {layer: states_of(kind, layer) for layer in range(LAYERS)}
    for layer, (sections, state) in expected.items():
        producer.write(layer, 2, sections, state)
    move(producer, consumer, [SpanPair(3, ids(2), 3, ids(4))], tokens=4 * 64 - 5)
    for rank in range(readers):
        for layer, (sections, state) in expected.items():
            assert np.array_equal(consumer.block(rank, layer, 4), consumer.bytes_of(rank, sections, state))
            assert not any(consumer.block(rank, layer, block).any() for block in range(4))


def test_a_state_goes_from_an_engine_that_keeps_one_at_each_block_to_one_that_keeps_one_in_all() -> None:
    kind = KINDS["gated delta net"]
    producer = Engine(kind, 1, channels_first=False, block_tokens=64)
    consumer = Engine(kind, 1, channels_first=False, block_tokens=2048)
    sections, state = states_of(kind, 1)
    producer.write(0, 1, *states_of(kind, 2))
    producer.write(0, 2, sections, state)
    move(producer, consumer, [SpanPair(2, ids(1, 2), 0, ids(4))], tokens=3 * 64 + 1)
    assert np.array_equal(consumer.block(0, 0, 4)[: consumer.nbytes], consumer.bytes_of(0, sections, state))


def test_a_state_of_fewer_tokens_than_the_ticket_names_is_refused() -> None:
    kind = KINDS["gated delta net"]
    producer, consumer = (Engine(kind, 1, channels_first=False, block_tokens=size) for size in (64, 2048))
    with pytest.raises(BadRequest, match="are asked for"):
        move(producer, consumer, [SpanPair(2, ids(1, 2), 0, ids(4))], tokens=4 * 64 + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mamba_type": SimpleNamespace(name="SHORT_CONV")}, "SHORT_CONV"),
        ({"shapes": ((3, 8), (8, 1), (8, 2), (1, 2))}, "4 parts"),
        ({"tp_replicated": True}, "every rank holds the whole"),
        ({"num_speculative_blocks": 2}, "2 drafted tokens a step"),
        ({"shapes": ((3, 61), (4, 3, 6))}, "61 channels"),
    ],
)
def test_states_of_an_unknown_shape_are_refused(change: dict[str, Any], said: str) -> None:
    spec = KINDS["gated delta net"].spec(1, channels_first=False)
    spec.__dict__.update(change)
    with pytest.raises(BadRequest, match=said):
        recurrent(spec, 1, 0, channels_first=False)


def test_a_state_with_more_bytes_than_are_known_is_refused() -> None:
    spec = KINDS["mamba1"].spec(1, channels_first=False)
    states = States(
        component="c",
        layers=(0,),
        offset=0,
        layer_stride=1024,
        block_stride=1024,
        state=recurrent(spec, 1, 0, channels_first=False),
        nbytes=999,
        dtype="x",
    )
    group = CacheGroup(window=State(), block_tokens=1, pages=(states,))
    cache = WorkerCache(nbytes=1024, num_blocks=1, groups=(group,), shard=Shard(stages=((0, 1),)))
    with pytest.raises(BadRequest, match="a state of 999 bytes"):
        cache_spec(cache)


def test_sides_whose_convolutions_have_other_numbers_of_taps_are_refused_with_both() -> None:
    kind = KINDS["mamba1"]
    producer, consumer = (Engine(kind, 1, channels_first=False, taps=taps) for taps in (3, 5))
    with pytest.raises(BadRequest, match="taps: source has 3, destination has 5"):
        check_compatible(producer.specs[0], consumer.specs[0])
