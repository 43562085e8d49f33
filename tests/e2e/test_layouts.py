"""Layouts, tensor-parallel sizes, pipeline stages and block sizes against each other, over real daemons and NIXL."""

import itertools

import pytest

from kvd.client import Blocks, Done, Failed
from kvd.layout import Chunked, Full, Sliding, State
from kvd.layout.models import LayerKind
from kvd.layout.presets import LAYOUTS, Attention, Indexer, Latent, Recurrent, Section
from tests.e2e.engines import as_blocks, engines, fill, model, move, noise, outcome, seeded, specs
from tests.support.fleet import until, without_lease
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

TOKENS = 18
ATTENTION = model(LayerKind(Full(), (0, 1, 2), (Attention(heads=4, head_bytes=2),)))
MLA = model(LayerKind(Full(), (0, 1, 2), (Latent(6), Indexer(key_bytes=4, scale_bytes=1))))
HYBRID = model(
    LayerKind(Full(), (0, 3), (Attention(heads=4, head_bytes=2),)),
    LayerKind(Sliding(7), (1, 2), (Attention(heads=4, head_bytes=2),)),
)
LOCAL = model(
    LayerKind(Full(), (3,), (Attention(heads=2, head_bytes=4),)),
    LayerKind(Chunked(8), (0, 1, 2), (Attention(heads=2, head_bytes=4),)),
)
MAMBA2 = (Section("x", 8, 3), Section("B", 2, 2), Section("C", 2, 2))
RECURRENT = model(
    LayerKind(Full(), (1,), (Attention(heads=2, head_bytes=4),)),
    LayerKind(State(), (0, 2), (Recurrent(MAMBA2, 3, 8, 5),)),
)


@pytest.fixture
def daemons(fleet):
    """Two for the producer, so that its ranks lie apart, and one for the consumer."""
    started = [fleet.daemon(name) for name in ("p0", "p1", "d")]
    for daemon in started:
        daemon.serving()
    return started[:2], started[2:]


def sample():
    """36 of the 9,216 combinations: each layout three times on either side, each pair of sizes and each ratio."""
    random = seeded(3)
    shuffled = [random.sample(list(LAYOUTS), len(LAYOUTS)) for _ in range(6)]
    sizes = itertools.cycle(random.sample(list(itertools.product((1, 2, 4, 8), repeat=2)), 16))
    blocks = itertools.cycle(random.sample([(4, 4), (8, 4), (4, 8), (16, 4), (4, 16)], 5))
    stages = itertools.cycle([(1, 1), (1, 2), (2, 1), (1, 1), (3, 2), (1, 1), (1, 1)])
    pairs = zip(itertools.chain(*shuffled[:3]), itertools.chain(*shuffled[3:]), strict=True)
    return [(*pair, next(sizes), next(blocks), next(stages)) for pair in pairs]


PAIRS = sample()
FAMILIES = {pair[0].removesuffix("-hnd").removesuffix("-nhd"): pair for pair in reversed(PAIRS)}
"""Of layouts that differ in more than the order of heads and tokens, each with its first pair as the producer's."""


@pytest.mark.sample(of=lambda **pair: tuple(pair.values()) in FAMILIES.values())
@pytest.mark.parametrize(("ours", "theirs", "tp", "block", "pp"), PAIRS, ids=str)
def test_any_layout_fills_any_other(daemons, ours, theirs, tp, block, pp):
    producer = specs(ATTENTION, ours, tp=tp[0], pp=pp[0], block=block[0])
    consumer = specs(ATTENTION, theirs, tp=tp[1], pp=pp[1], block=block[1])
    with engines(daemons[0], producer, daemons[1], consumer) as both:
        move(*both, TOKENS, seeded(str((ours, theirs))))


@pytest.mark.sample(4)
@pytest.mark.parametrize("tp", [(1, 2), (4, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("what", [MLA, HYBRID, LOCAL, RECURRENT], ids=["mla", "sliding", "chunked", "mamba2"])
def test_any_kind_of_cache_is_moved_from_ranks_to_ranks(daemons, what, tp):
    producer, consumer = (specs(what, "cross-layer-nhd", tp=size) for size in tp)
    with engines(daemons[0], producer, daemons[1], consumer) as both:
        for tokens in (TOKENS, 24):
            move(*both, tokens, seeded(tokens))


REFUSED_ELSEWHERE = {
    "more producer ranks than KV heads with a smaller consumer": ({"tp": 8}, {"tp": 2}),
    "producer blocks larger than the consumer's": ({"block": 16}, {"block": 4}),
    "pipeline ranks with pull": ({"pp": 3, "tp": 2}, {"pp": 2}),
    "NHD against HND": ({"layout": "flash-nhd"}, {"layout": "flash-hnd"}),
    "HND against NHD of another size": ({"tp": 2, "block": 8}, {"layout": "flashinfer-nhd", "tp": 4}),
}


@pytest.mark.parametrize("what", REFUSED_ELSEWHERE)
def test_what_the_in_process_connector_of_vllm_refuses_works(daemons, what):
    producer, consumer = (specs(ATTENTION, **{"layout": "flash-hnd", **side}) for side in REFUSED_ELSEWHERE[what])
    with engines(daemons[0], producer, daemons[1], consumer) as both:
        for turn in range(2):
            move(*both, TOKENS, seeded(turn))


def test_a_pull_is_done_only_when_every_rank_has_contributed(daemons):
    (first, second), consumers = daemons
    with engines((first, second), specs(ATTENTION, "flash-hnd", tp=2), consumers, specs(ATTENTION, "flash-hnd")) as (
        producer,
        consumer,
    ):
        move(producer, consumer, TOKENS, seeded(0))
        offered, wanted = producer.tables(TOKENS, seeded(1)), consumer.tables(TOKENS, seeded(2))
        fill(producer, offered, TOKENS)
        text = without_lease(producer.offer("slow", TOKENS, offered))
        (worker,) = consumer.workers
        with second.paused():
            consumer.pull("slow", text, wanted)
            for _ in until("only the second rank is waited for"):
                if worker.status(PATIENCE)["scheduler"]["transfers"] == {"claiming": 1}:
                    break
            assert worker.poll() == []
        assert outcome(worker, "slow") == Done("slow")


def attention(*layers, heads=4, head_bytes=2):
    return LayerKind(Full(), layers, (Attention(heads, head_bytes),))


INCOMPATIBLE = {
    "dtype": (
        specs(model(attention(0, 1), dtype="fp8"), "flash-hnd"),
        specs(model(attention(0, 1)), "flash-hnd"),
        "groups[0].kv.dtype: source has fp8, destination has bfloat16",
    ),
    "head size": (
        specs(model(attention(0, 1, head_bytes=4)), "flash-hnd"),
        specs(model(attention(0, 1)), "flash-nhd"),
        "(head size): source has 4, destination has 2",
    ),
    "layer sets": (
        specs(model(attention(0, 1), attention(2)), "flash-hnd"),
        specs(model(attention(0), attention(1, 2)), "flash-hnd"),
        "groups[0].kv.layers: source has [0, 1], destination has [0]",
    ),
    "a ratio that is not whole": (
        specs(model(attention(0, 1)), "flash-hnd", block=6),
        specs(model(attention(0, 1)), "flash-hnd", block=4),
        "groups[0].block_tokens (one must divide the other): source has 6, destination has 4",
    ),
}


@pytest.mark.parametrize("field", INCOMPATIBLE)
def test_what_cannot_be_mapped_fails_with_both_values_and_leaves_nothing_behind(daemons, field):
    ours, theirs, text = INCOMPATIBLE[field]
    with engines(daemons[0], ours, daemons[1], theirs) as (producer, consumer):
        offered, wanted = producer.tables(TOKENS, seeded(0)), consumer.tables(TOKENS, seeded(0))
        (memory,) = noise(consumer, seeded(0))
        consumer.pull("r", producer.offer("r", TOKENS, offered), wanted)
        (worker,), (owner,) = consumer.workers, producer.workers
        failed = outcome(worker, "r")
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined) == ("incompatible", False)
        assert text in failed.text
        assert [(part.group, list(part.ids)) for part in failed.blocks] == [
            (index, table.ids) for index, table in enumerate(wanted)
        ]
        assert (consumer.memory[0] == memory).all()
        scheduler = worker.status(PATIENCE)["scheduler"]
        assert (scheduler["pulls"], scheduler["transfers"], sum(scheduler["busy_blocks"].values())) == (0, {}, 0)
        owner.cancel("r")
        assert outcome(owner, "r").reason == "withdrawn"
        assert owner.status(PATIENCE)["leases"]["active"] == 0


@pytest.mark.slow
def test_a_failure_names_the_blocks_of_every_group_and_frees_them_for_any_group(daemons):
    shared = specs(HYBRID, "packed-hnd", overlay=True)
    with engines(daemons[0], shared, daemons[1], shared) as (producer, consumer):
        offered, wanted = producer.tables(TOKENS, seeded(0)), consumer.tables(TOKENS, seeded(1))
        text = producer.offer("r", TOKENS, offered)
        (owner,), (worker,) = producer.workers, consumer.workers
        owner.cancel("r")
        assert outcome(owner, "r").reason == "withdrawn"
        consumer.pull("r", text, wanted)
        failed = outcome(worker, "r")
        assert (failed.code, failed.quarantined) == ("offer_gone", False)
        assert {part.group: list(part.ids) for part in failed.blocks} == {
            index: table.ids for index, table in enumerate(wanted)
        }
        assert sum(worker.status(PATIENCE)["scheduler"]["busy_blocks"].values()) == 0
        move(producer, consumer, TOKENS, seeded(1))


@pytest.mark.slow
def test_a_block_of_an_arena_is_written_to_by_one_group_of_one_pull_at_a_time(daemons):
    (first, _), consumers = daemons
    shared = specs(HYBRID, "packed-hnd", overlay=True)
    with engines((first,), shared, consumers, shared) as (producer, consumer):
        offered, wanted = producer.tables(TOKENS, seeded(0)), consumer.tables(TOKENS, seeded(1))
        (worker,) = consumer.workers
        fill(producer, offered, TOKENS)
        text = producer.offer("r", TOKENS, offered)
        twice = as_blocks(wanted)
        twice[1] = Blocks(group=1, first=wanted[1].first, ids=wanted[0].ids[:2])
        worker.pull("twice", text, blocks=twice, timeout=PATIENCE)
        failed = outcome(worker, "twice")
        assert failed.code == "bad_blocks"
        assert "named twice, the second time by group 1" in failed.text
        with first.paused():
            consumer.pull("r", text, wanted)
            worker.pull("other", text, blocks=twice[1:], timeout=PATIENCE)
            failed = outcome(worker, "other")
        assert failed.code == "blocks_busy"
        assert [(part.group, list(part.ids)) for part in failed.blocks] == [(1, wanted[0].ids[:2])]
        assert outcome(worker, "r") == Done("r")
