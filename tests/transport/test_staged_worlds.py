"""Staged reads in random worlds: readers and owners whose processes end, pools that are registered anew, aborts.

On a virtual clock, by seed. Each read ends once; what landed is what the owner has; nothing writes to its destination
afterwards; and in the end nothing is taken.
"""

import itertools
import random

import numpy as np
import pytest

from kvd import limits
from kvd.errors import InternalError
from kvd.plan import Descriptors
from kvd.transport.interface import Deregistered, Landed, PeerAdded, PeerFailed, ReadFailed, ReadRequest, Registered
from kvd.transport.staged import arena, messages, reads, server
from kvd.transport.staged.windows import Windows
from tests.simulator.virtual.loop import VirtualLoop
from tests.support.fake_fabric import FakeFabric, Faults
from tests.transport.staged_site import End

SEEDS = 40
MOST = 400
"""Worlds in which a mutation is looked for: it is in at least one of five."""
BLOCKS, BLOCK = 128, 512
FREE = 0x77
"""The byte in what no read is open for."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Reads take many slices, and readers wait for windows, slots and rows."""
    for name, value in {
        "SLICE_BYTES": 4096,
        "SLICE_DESCRIPTORS": 8,
        "STAGING_WINDOWS": 12,
        "STAGING_SLOTS": 3,
        "WINDOW_SECONDS": 0.01,
    }.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(arena, "ROWS", 4)
    monkeypatch.setattr(reads, "AGAIN_SECONDS", 0.005)
    monkeypatch.setattr(server._log, "warning", lambda *_args, **_more: None)


class Node:
    """An agent with pools of `BLOCKS` blocks."""

    def __init__(self, world, name, *, on_gpu, pools=1):
        self.name = name
        self.end = End(world.fabric, name, on_gpu=on_gpu)
        if self.end.gpu is not None:
            self.end.gpu.copy = world.copy
        self.network, self.transport = self.end.network, self.end.transport
        self.pools = [np.full(BLOCKS * BLOCK, FREE, np.uint8) for _ in range(pools)]
        self.bases = [world.fabric.map(pool) for pool in self.pools]
        self.transport.start(self.on_event)
        for pool in range(pools):
            self.register(pool)

    def register(self, pool):
        self.transport.register(pool, self.end.region(self.bases[pool], len(self.pools[pool])))

    def blocks(self, pool=0):
        return self.pools[pool].reshape(BLOCKS, BLOCK)


class Owner(Node):
    """Two pools, which are registered anew every now and then."""

    def __init__(self, world, name, *, on_gpu):
        self.registered = set()
        super().__init__(world, name, on_gpu=on_gpu, pools=2)
        for pool in self.pools:
            pool[:] = np.frombuffer(world.random.randbytes(len(pool)), np.uint8)

    def on_event(self, event):
        match event:
            case Registered():
                self.registered.add(event.pool)
            case Deregistered():
                self.register(event.pool)

    def renew(self, pool):
        if self.end.gpu is not None and pool in self.registered:
            self.registered.remove(pool)
            self.transport.deregister(pool)


class Reader(Node):
    def __init__(self, world, name, *, on_gpu):
        self.world = world
        self.knows = {}
        """By name: the metadata that a peer was added with."""
        self.open = {}
        """By number: whom it reads from, of which pool, and (block there, block here) of each block."""
        self.free = set(range(BLOCKS))
        super().__init__(world, name, on_gpu=on_gpu)

    def on_event(self, event):
        match event:
            case PeerAdded():
                self.knows[event.agent] = event.metadata
            case PeerFailed():
                self.knows.pop(event.agent, None)
            case Landed() | ReadFailed():
                owner, pool, pairs = self.open.pop(event.read)  # of which there is one, or it ends twice
                blocks = self.blocks()
                for there, here in pairs:
                    if isinstance(event, Landed):
                        assert np.array_equal(blocks[here], owner.blocks(pool)[there]), event
                    blocks[here] = FREE
                    self.free.add(here)
                self.world.landed += isinstance(event, Landed)

    def read(self, owner, count):
        random = self.world.random
        if len(self.free) < count:
            return
        here = random.sample(sorted(self.free), count)
        self.free -= set(here)
        pairs = [(random.randrange(BLOCKS), block) for block in here]
        number, pool = next(self.world.numbers), random.randrange(2)
        self.open[number] = owner, pool, pairs
        src, dst = (np.array(column, np.uint64) * np.uint64(BLOCK) for column in zip(*pairs, strict=True))
        table = Descriptors(src, dst, np.full(count, BLOCK, np.uint64))
        self.transport.read(ReadRequest(number, owner.name, self.bases[0], owner.bases[pool], table))

    def check_free(self):
        blocks = self.blocks()[sorted(self.free)]
        assert (blocks == FREE).all(), f"{self.name}: blocks were written to of which the reads had ended"


class World:
    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311 - dice, not secrets
        self.loop = VirtualLoop()
        blank = self.random.random() < 0.5
        self.faults = Faults(self.random, slow=0.1, fails=0.05, add_peer=0.05, blank=blank)
        self.fabric = FakeFabric(self.loop, self.random, self.faults, bytes_per_second=8e6)
        self.numbers = itertools.count(1)
        self.landed = 0
        chance = self.random.random
        self.owners = [Owner(self, f"p{i}", on_gpu=chance() < 0.8) for i in range(self.random.randint(1, 2))]
        self.readers = [Reader(self, f"r{i}", on_gpu=chance() < 0.5) for i in range(self.random.randint(1, 4))]
        self.go_on(0.01)

    def copy(self, targets, sources, lengths, done):
        """As a GPU's copy, which lands some time before it is told."""

        def land():
            for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
                self.fabric.view(target, length)[:] = self.fabric.view(source, length)

        seconds = self.random.random() * 0.001
        self.loop.call_later(seconds, land)
        self.loop.call_later(2 * seconds, done, None)

    def go_on(self, seconds):
        self.loop.run_until(self.loop.now + seconds)

    def something(self):
        reader, owner, what = self.random.choice(self.readers), self.random.choice(self.owners), self.random.random()
        if what < 0.6:
            reader.read(owner, self.random.choice((1, 3, 20, 60)))
        elif what < 0.7 and reader.open:
            reader.transport.abort(self.random.choice(sorted(reader.open)))
        elif what < 0.74:
            network = self.random.choice((*self.owners, *self.readers)).network
            if not network.down:
                network.lose_process()
                self.loop.call_later(self.random.random() * 0.01, network.gain_process)
        elif what < 0.78:
            reader.transport.remove_peer(owner.name)
            reader.knows.pop(owner.name, None)
        elif what < 0.82:
            owner.renew(self.random.randrange(2))
        elif owner.transport.metadata not in (b"", reader.knows.get(owner.name)):
            reader.transport.add_peer(owner.name, owner.transport.metadata)

    def run(self):
        for _ in range(self.random.randint(50, 200)):
            self.something()
            self.go_on(self.random.choice((0.0, 0.003)) * self.random.random())
            for reader in self.readers:
                reader.check_free()
        self.faults.slow = self.faults.fails = self.faults.add_peer = 0.0
        self.go_on(5.0)
        for owner in self.owners:
            assert owner.registered == {0, 1}
            assert owner.end.gpu is None or len(owner.end.gpu.arenas) == 2
        for reader in self.readers:
            reader.check_free()
            assert reader.open == {}
            staged, ours = reader.transport._reads, reader.end.buffers
            assert (staged._reads, staged._handlers, staged._queue._queues) == ({}, {}, {})
            slots = limits.STAGING_SLOTS if reader.end.gpu else 0
            assert (len(ours.slots), len(ours.rows)) == (slots, arena.ROWS)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reads_keep_their_promises(seed):
    World(seed).run()


def test_most_worlds_land_something():
    worlds = [World(seed) for seed in range(5)]
    for world in worlds:
        world.run()
    assert sum(world.landed > 0 for world in worlds) >= 4


def slices_end_while_the_network_writes(monkeypatch):
    monkeypatch.setattr(reads, "AT_REST", (*reads.AT_REST, reads.Step.READ))


def slices_end_while_the_gpu_writes(monkeypatch):
    monkeypatch.setattr(reads, "AT_REST", (*reads.AT_REST, reads.Step.COPIED))


def nobody_looks_again_after_the_last_byte(monkeypatch):
    def came(self, part, event):
        if isinstance(event, ReadFailed):
            self._part_ended(part, event.reason)
            return
        if part.read.board is not None:
            self._finish(part.read.board, part)
        self._arrived(part)

    monkeypatch.setattr(reads.StagedReads, "_came", came)


def windows_are_free_while_they_are_copied(monkeypatch):
    finish = Windows.finish

    def finish_now(self, key):
        if (use := self._uses.get(key)) is not None:
            use.copying = False
        return finish(self, key)

    monkeypatch.setattr(Windows, "finish", finish_now)
    monkeypatch.setattr(Windows, "copied", lambda self, use, now: not use.ended)


def a_reader_with_too_many_requests_is_not_heard(monkeypatch):
    ask = Windows.ask

    def ask_less(self, agent, asked):
        waiting = sum(secret == asked.secret for secret, _ in self._queued)
        return waiting < limits.MAX_STAGED_SLICES and ask(self, agent, asked)

    monkeypatch.setattr(Windows, "ask", ask_less)
    monkeypatch.setattr(Windows, "end_oldest", lambda self, secret: None)
    monkeypatch.setattr(reads, "AGAIN_SECONDS", float("inf"))


def arenas_are_freed_while_they_are_copied_to(monkeypatch):
    monkeypatch.setattr(server.Server, "close", lambda self, ended: ended())


def nobody_looks_whose_board_it_is(monkeypatch):
    for module in (reads, server):
        monkeypatch.setattr(module, "heading", lambda _token: bytes(messages.LINE_BYTES))


MUTATIONS = (
    slices_end_while_the_network_writes,
    slices_end_while_the_gpu_writes,
    nobody_looks_again_after_the_last_byte,
    windows_are_free_while_they_are_copied,
    a_reader_with_too_many_requests_is_not_heard,
    arenas_are_freed_while_they_are_copied_to,
    nobody_looks_whose_board_it_is,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_world_finds_that(monkeypatch, mutation):
    mutation(monkeypatch)
    for seed in range(MOST):
        try:
            World(seed).run()
        except (AssertionError, KeyError, InternalError):
            return
    pytest.fail(f"{MOST} worlds are as if nothing had changed")
