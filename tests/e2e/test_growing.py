"""Offers that grow, over real daemons: read while they are prefilled, held to the reference byte by byte."""

import contextlib
import secrets

import numpy as np
import pytest

from kvd.client import Blocks, Done, Failed, Freed, Released
from kvd.errors import BadRequest, ErrorCode
from kvd.layout import Full
from kvd.limits import SECRET_BYTES
from kvd.protocol import ticket
from tests.e2e.engines import contents, engines, meaning, noise, outcome, seeded, specs
from tests.e2e.test_layouts import ATTENTION, HYBRID, MLA, RECURRENT
from tests.support.fleet import Fleet, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real

TOKENS = 30
CHUNKS = (5, 16, 16, 23)
"""Some end inside of a block; one brings nothing new."""
JUNK = 0xAA


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    """Two for the producer, and one for the consumer."""
    with Fleet(tmp_path_factory.mktemp("growing")) as fleet:
        started = [fleet.daemon(name) for name in ("p0", "p1", "d")]
        for daemon in started:
            daemon.serving()
        yield started[:2], started[2:]


def early_ticket(producer, name, keys):
    """As a router makes it, before any engine knows of the request."""
    return ticket.join(
        [
            ticket.growing(daemon=worker.daemon, address=worker.address, pool=pool, offer=name, secret=key)
            for worker, pool, key in zip(producer.workers, producer.names, keys, strict=True)
        ]
    )


def compute(producer, tables, tokens, *, closes):
    """Writes the cache of the first `tokens` tokens, and junk behind it and where a prefill frees blocks."""
    for spec, memory in zip(producer.specs, producer.memory, strict=True):
        for key, address in contents(spec, tables, TOKENS).items():
            ready = closes or (isinstance(spec.groups[key[0]].window, Full) and key[5] < tokens)
            memory[address] = meaning(key) if ready else JUNK


def extend(producer, name, tables, named, tokens, *, closes):
    """Tells the daemons of all ranks what is complete; `named` has how many blocks of each group they know."""
    more = []
    for number, (group, table) in enumerate(zip(producer.specs[0].groups, tables, strict=True)):
        full = isinstance(group.window, Full)
        stop = len(table.ids) if closes else -(-tokens // group.block_tokens) if full else 0
        more.append(Blocks(number, table.first + named[number], table.ids[named[number] : stop]))
        named[number] = stop
    more = [part for part in more if part.ids]
    for worker in producer.workers:
        if closes:
            worker.close_offer(name, tokens=tokens, blocks=more)
        else:
            worker.extend_offer(name, tokens=tokens, blocks=more)


def expected_after(consumer, wanted, before, filled):
    for spec, expected in zip(consumer.specs, before, strict=True):
        for key, address in contents(spec, wanted, TOKENS).items():
            if key in filled:
                expected[address] = meaning(key)
    return before


def first_block(consumer, wanted, tokens):
    """The bytes of the first tokens on each rank: what is there, and what is to be."""
    for spec, memory in zip(consumer.specs, consumer.memory, strict=True):
        for key, address in contents(spec, wanted, TOKENS).items():
            if isinstance(spec.groups[key[0]].window, Full) and key[5] < tokens:
                yield int(memory[address]), meaning(key)


VARIANTS = {
    "same": (ATTENTION, {}, {}),
    "latent": (MLA, {}, {}),
    "block-sizes": (ATTENTION, {"block": 8}, {"block": 4}),
    "block-sizes-back": (ATTENTION, {"block": 4, "tp": 2}, {"block": 16}),
    "window": (HYBRID, {"tp": 2}, {"tp": 1}),
    "state": (RECURRENT, {"tp": 1}, {"tp": 2}),
}


@pytest.mark.sample(of=lambda variant: variant in {"same", "block-sizes-back", "window"})
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prefill_is_read_while_it_goes_on_and_every_byte_is_right_in_the_end(daemons, variant):
    what, ours, theirs = VARIANTS[variant]
    random, name = seeded(variant), f"growing-{variant}"
    with engines(daemons[0], specs(what, "flash-nhd", **ours), daemons[1], specs(what, "flash-hnd", **theirs)) as (
        p,
        d,
    ):
        offered, wanted = p.tables(TOKENS, random), d.tables(TOKENS, random)
        filled = {key for spec in p.specs for key in contents(spec, offered, TOKENS)}
        before = noise(d, random)
        keys = [secrets.token_bytes(SECRET_BYTES) for _ in p.workers]
        d.pull(name, early_ticket(p, name, keys), wanted)
        for worker, key in zip(p.workers, keys, strict=True):
            worker.open_offer_nowait(name, ttl=60, secret=key)
        named = [0] * len(offered)
        for tokens in CHUNKS:
            compute(p, offered, tokens, closes=False)
            extend(p, name, offered, named, tokens, closes=False)
        for _ in until("the first block is read, while the offer is open"):
            if all(found == right for found, right in first_block(d, wanted, 16)):
                break
        assert [event for worker in d.workers for event in worker.poll()] == []
        compute(p, offered, TOKENS, closes=True)
        extend(p, name, offered, named, TOKENS, closes=True)
        assert {outcome(worker, name) for worker in d.workers} == {Done(name)}
        for memory, expected in zip(d.memory, expected_after(d, wanted, before, filled), strict=True):
            assert np.array_equal(memory, expected)
        for worker in p.workers:
            assert Released(name, "read") in ended(worker, name)


def ended(worker, name):
    """The last event of an offer; its answer comes first."""
    events = []
    for _ in until("the offer ends"):
        events += [event for event in worker.wait(PATIENCE) if getattr(event, "offer", None) == name]
        if any(isinstance(event, Released) for event in events):
            return events
    raise AssertionError("unreachable")


OVERWRITTEN = 40
"""Offers whose blocks are overwritten at a time that is drawn, from before the first read to after the last."""


def test_a_producer_that_overwrites_any_block_at_any_time_is_never_read_to_the_end(daemons):
    """An offer that is open need only be withdrawn at that moment, one that is closed has to be released before."""
    random, cache = seeded("overwriting"), specs(ATTENTION, "flash-nhd")
    done = 0
    with engines(daemons[0], cache, daemons[1], cache) as (p, d):
        offered, wanted = p.tables(TOKENS, random), d.tables(TOKENS, random)
        before = [memory.copy() for memory in d.memory]
        filled = {key for spec in p.specs for key in contents(spec, offered, TOKENS)}
        right = expected_after(d, wanted, before, filled)
        for number in range(OVERWRITTEN):
            name, key, named = f"over-{number}", secrets.token_bytes(SECRET_BYTES), [0]
            p.workers[0].open_offer_nowait(name, ttl=60, secret=key)
            d.pull(name, early_ticket(p, name, [key]), wanted)
            last, heard = random.choice([*CHUNKS, TOKENS]), []
            for tokens in [*(tokens for tokens in CHUNKS if tokens <= last), *[TOKENS] * (last == TOKENS)]:
                compute(p, offered, tokens, closes=tokens == TOKENS)
                extend(p, name, offered, named, tokens, closes=tokens == TOKENS)
                heard += d.workers[0].wait(random.choice([0.0, 0.0, 0.001, 0.01]))
            if last == TOKENS:
                with contextlib.suppress(BadRequest):  # it has been read
                    p.workers[0].cancel(name)
                ended(p.workers[0], name)
            else:
                p.workers[0].cancel(name)
            address = random.sample(range(len(p.memory[0])), len(p.memory[0]) // 2)
            p.memory[0][address] = JUNK
            for _ in until("nothing writes for the pull any more"):
                heard += d.workers[0].wait(PATIENCE if not heard else 0.01)
                if isinstance(heard[0], Done) or not heard[0].quarantined or isinstance(heard[-1], Freed):
                    break
            if isinstance(heard[0], Done):
                assert last == TOKENS
                assert np.array_equal(d.memory[0], right[0])
                done += 1
    assert 0 < done < OVERWRITTEN


def test_a_producer_that_goes_in_the_middle_of_a_prefill_fails_the_pull_at_once_and_the_blocks_are_free(daemons):
    random, name = seeded(1), "dying"
    cache = specs(ATTENTION, "flash-nhd")
    with engines(daemons[0], cache, daemons[1], cache) as (p, d):
        offered, wanted = p.tables(TOKENS, random), d.tables(TOKENS, random)
        text = p.workers[0].open_offer(name, ttl=60, timeout=PATIENCE)
        d.pull(name, text, wanted)
        compute(p, offered, 16, closes=False)
        extend(p, name, offered, [0], 16, closes=False)
        for _ in until("the first chunk is read"):
            if all(found == right for found, right in first_block(d, wanted, 16)):
                break
        p.close()
        failed = outcome(d.workers[0], name)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined) == (ErrorCode.LEASE_BROKEN, False)
        assert "withdrawn" in failed.text
        d.pull("again", text, wanted)
        assert outcome(d.workers[0], "again").code == ErrorCode.OFFER_GONE
        p.workers.clear()
