"""Staged reads in random worlds: readers and owners whose processes end, peers that are removed and added, aborts.

On a virtual clock, by seed. Each read ends once; what landed is what the owner has; nothing writes to its destination
afterwards; and in the end nothing is taken.
"""

import itertools
import random

import numpy as np
import pytest

from kvd import limits
from kvd.plan import Descriptors
from kvd.transport.interface import Landed, PeerAdded, PeerFailed, ReadFailed, ReadRequest
from kvd.transport.staged import arena, reads, server
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
        "STAGING_WINDOWS": 3,
        "WINDOW_SECONDS": 0.01,
    }.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(arena, "ROWS", 4)
    monkeypatch.setattr(reads, "AGAIN_SECONDS", 0.005)
    monkeypatch.setattr(server._log, "warning", lambda *_args, **_more: None)


class Node:
    """An agent with a pool."""

    def __init__(self, world, name, *, on_gpu):
        self.name = name
        self.end = End(world.fabric, name, on_gpu=on_gpu)
        if self.end.gpu is not None:
            self.end.gpu.copy = world.copy
        self.network, self.transport = self.end.network, self.end.transport
        self.memory = np.full(BLOCKS * BLOCK, FREE, np.uint8)
        self.base = world.fabric.map(self.memory)
        self.transport.start(self.on_event)
        self.transport.register(1, self.end.region(self.base, len(self.memory)))

    def on_event(self, event):
        """Owners hear nothing that matters here."""


class Reader(Node):
    def __init__(self, world, name, *, on_gpu):
        self.world = world
        self.knows = set()
        self.open = {}
        """By number: whom it reads from, and (block there, block here) of each block."""
        self.free = set(range(BLOCKS))
        super().__init__(world, name, on_gpu=on_gpu)

    def on_event(self, event):
        match event:
            case PeerAdded():
                self.knows.add(event.agent)
            case PeerFailed():
                self.knows.discard(event.agent)
            case Landed() | ReadFailed():
                owner, pairs = self.open.pop(event.read)  # of which there is one, or it ends twice
                blocks = self.memory.reshape(BLOCKS, BLOCK)
                for there, here in pairs:
                    if isinstance(event, Landed):
                        assert np.array_equal(blocks[here], owner.memory.reshape(BLOCKS, BLOCK)[there]), event
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
        number = next(self.world.numbers)
        self.open[number] = owner, pairs
        src, dst = (np.array(column, np.uint64) * np.uint64(BLOCK) for column in zip(*pairs, strict=True))
        table = Descriptors(src, dst, np.full(count, BLOCK, np.uint64))
        self.transport.read(ReadRequest(number, owner.name, self.base, owner.base, table))

    def check_free(self):
        blocks = self.memory.reshape(BLOCKS, BLOCK)[sorted(self.free)]
        assert (blocks == FREE).all(), f"{self.name}: blocks were written to of which the reads had ended"


class World:
    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311 - dice, not secrets
        self.loop = VirtualLoop()
        self.faults = Faults(self.random, slow=0.1, fails=0.05, add_peer=0.05)
        self.fabric = FakeFabric(self.loop, self.random, self.faults, bytes_per_second=8e6)
        self.numbers = itertools.count(1)
        self.landed = 0
        chance = self.random.random
        self.owners = [Node(self, f"p{i}", on_gpu=chance() < 0.8) for i in range(self.random.randint(1, 2))]
        for owner in self.owners:
            owner.memory[:] = np.frombuffer(self.random.randbytes(len(owner.memory)), np.uint8)
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
        elif what < 0.8:
            reader.transport.remove_peer(owner.name)
            reader.knows.discard(owner.name)
        elif owner.name not in reader.knows and owner.transport.metadata:
            reader.transport.add_peer(owner.name, owner.transport.metadata)

    def run(self):
        for _ in range(self.random.randint(50, 200)):
            self.something()
            self.go_on(self.random.choice((0.0, 0.003)) * self.random.random())
            for reader in self.readers:
                reader.check_free()
        self.faults.slow = self.faults.fails = self.faults.add_peer = 0.0
        self.go_on(5.0)
        for reader in self.readers:
            reader.check_free()
            assert reader.open == {}
            staged, ours = reader.transport._reads, reader.end.arena
            assert (staged._reads, staged._handlers, staged._queue._queues) == ({}, {}, {})
            assert (len(ours.slots), len(ours.rows)) == (ours.windows, arena.ROWS)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reads_keep_their_promises(seed):
    World(seed).run()


def test_most_worlds_land_something():
    worlds = [World(seed) for seed in range(5)]
    for world in worlds:
        world.run()
    assert sum(world.landed > 0 for world in worlds) >= 4


def slices_end_while_the_network_writes(monkeypatch):
    monkeypatch.setattr(reads, "_AT_REST", (*reads._AT_REST, reads._Step.READ))


def slices_end_while_the_gpu_writes(monkeypatch):
    monkeypatch.setattr(reads, "_AT_REST", (*reads._AT_REST, reads._Step.COPIED))


def nobody_looks_again_after_the_last_byte(monkeypatch):
    def came(self, part, event):
        if isinstance(event, ReadFailed):
            self._part_ended(part, event.reason)
            return
        if part.read.staged is not None:
            self._finish(part)
        self._arrived(part)

    monkeypatch.setattr(reads.StagedReads, "_came", came)


def windows_are_free_while_they_are_copied(monkeypatch):
    finish = Windows.finish

    def finish_now(self, ended):
        if (use := self._uses.get((ended.secret, ended.number))) is not None:
            use.copying = False
        return finish(self, ended)

    monkeypatch.setattr(Windows, "finish", finish_now)
    monkeypatch.setattr(Windows, "copied", lambda self, use, now: not use.ended)


def a_reader_with_too_many_requests_is_not_heard(monkeypatch):
    ask = Windows.ask

    def ask_less(self, agent, asked):
        waiting = sum(name[1] == agent for name in self._queued.values())
        return waiting < limits.MAX_STAGED_SLICES and ask(self, agent, asked)

    monkeypatch.setattr(Windows, "ask", ask_less)
    monkeypatch.setattr(Windows, "end_oldest", lambda self, agent: None)
    monkeypatch.setattr(reads, "AGAIN_SECONDS", float("inf"))


MUTATIONS = (
    slices_end_while_the_network_writes,
    slices_end_while_the_gpu_writes,
    nobody_looks_again_after_the_last_byte,
    windows_are_free_while_they_are_copied,
    a_reader_with_too_many_requests_is_not_heard,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_world_finds_that(monkeypatch, mutation):
    mutation(monkeypatch)
    for seed in range(MOST):
        try:
            World(seed).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{MOST} worlds are as if nothing had changed")
