"""Whole engines of a few ranks, each a worker of a real daemon, and moves between two that are held to the reference.

What every byte means, and so what it must be, comes from `tests.plan.layout_reference`: nothing of the planner.
"""

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import numpy as np

from kvd.client import Blocks, Done, Failed, Released, Worker
from kvd.layout import CacheSpec, Shard
from kvd.layout.models import LayerKind, Model, even_stages, model_spec
from kvd.protocol import ticket
from tests.plan.layout_reference import Blocks as Table
from tests.plan.layout_reference import contents, positions_needed
from tests.support.fleet import Daemon
from tests.support.patience import PATIENCE
from tests.support.pools import content_of

NAMES = itertools.count(1)


def seeded(seed: int | str) -> Random:
    return Random(seed)  # noqa: S311 - a test that fails must fail again


def model(*kinds: LayerKind, dtype: str = "bfloat16") -> Model:
    return Model("test", kinds, dtype)


def specs(what: Model, layout: str, *, tp: int = 1, pp: int = 1, block: int = 4, blocks: int = 24, overlay=False):
    """The specs of all ranks of an engine."""
    shard = Shard(stages=even_stages(what.layers, pp), tp_size=tp)
    return [
        model_spec(what, layout, rank, num_blocks=blocks, block_tokens=block, overlay=overlay)
        for rank in shard.every_rank()
    ]


class Engine:
    """Rank r is a worker of daemon number r, modulo their number; `memory[r]` is its pool, uint8 [bytes]."""

    def __init__(self, daemons: Sequence[Daemon], ranks: list[CacheSpec]) -> None:
        self.specs = ranks
        self.workers: list[Worker] = []
        self.names: list[str] = []
        for spec, daemon in zip(ranks, itertools.cycle(daemons)):
            name = f"worker-{next(NAMES)}"
            self.names.append(name)
            self.workers.append(Worker.attach(str(daemon.socket), name=name, spec=spec, timeout=PATIENCE))
        self.memory = [content_of(worker, spec.pool_bytes) for worker, spec in zip(self.workers, ranks, strict=True)]

    def leave(self) -> None:
        self.memory.clear()
        for worker in self.workers:
            worker.detach(PATIENCE)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def tables(self, tokens: int, random: Random) -> list[Table]:
        """Scattered blocks for every position that each group needs, none twice in an arena."""
        free = {group.arena: random.sample(range(group.num_blocks), group.num_blocks) for group in self.specs[0].groups}
        found = []
        for group in self.specs[0].groups:
            positions = positions_needed(group, tokens)
            found.append(Table(positions[0] if positions else 0, [free[group.arena].pop() for _ in positions]))
        return found

    def offer(self, name: str, tokens: int, tables: list[Table]) -> str:
        """The ticket of all ranks."""
        blocks = as_blocks(tables)
        return ticket.join(
            [w.offer(name, tokens=tokens, blocks=blocks, ttl=60, timeout=PATIENCE) for w in self.workers]
        )

    def pull(self, name: str, text: str, tables: list[Table]) -> None:
        for worker in self.workers:
            worker.pull(name, text, blocks=as_blocks(tables), timeout=PATIENCE)


@contextmanager
def engines(producers: Sequence[Daemon], ours, consumers: Sequence[Daemon], theirs) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that give their pools back at the end, which they can only when nothing of them is in use."""
    both: list[Engine] = []
    try:
        both.append(Engine(producers, ours))
        both.append(Engine(consumers, theirs))
        yield both[0], both[1]
        for engine in both:
            engine.leave()
    finally:
        for engine in both:
            engine.close()


def as_blocks(tables: list[Table]) -> list[Blocks]:
    return [Blocks(group=index, first=table.first, ids=table.ids) for index, table in enumerate(tables)]


def move(producer: Engine, consumer: Engine, tokens: int, random: Random) -> None:
    """Moves a sequence and checks every byte of every rank of the consumer, and that every offer ends as read."""
    offered, wanted = producer.tables(tokens, random), consumer.tables(tokens, random)
    filled = fill(producer, offered, tokens)
    before = noise(consumer, random)
    name = f"request-{next(NAMES)}"
    consumer.pull(name, producer.offer(name, tokens, offered), wanted)
    assert {outcome(worker, name) for worker in consumer.workers} == {Done(name)}
    assert {outcome(worker, name) for worker in producer.workers} == {Released(name, "read")}
    for spec, memory, expected in zip(consumer.specs, consumer.memory, before, strict=True):
        for key, address in contents(spec, wanted, tokens).items():
            if key in filled:
                expected[address] = meaning(key)
        assert np.array_equal(memory, expected)


def fill(producer: Engine, offered: list[Table], tokens: int) -> set[tuple]:
    """Writes the blocks offered by what they mean; returns all that is offered by some rank."""
    filled = set()
    for spec, memory in zip(producer.specs, producer.memory, strict=True):
        held = contents(spec, offered, tokens)
        memory[:] = 0xAA
        for key, address in held.items():
            memory[address] = meaning(key)
        filled.update(held)
    return filled


def noise(engine: Engine, random: Random) -> list[np.ndarray]:
    """Fills the pools with random bytes, and returns copies."""
    for memory in engine.memory:
        memory[:] = np.frombuffer(random.randbytes(len(memory)), dtype=np.uint8)
    return [memory.copy() for memory in engine.memory]


def meaning(key: tuple) -> int:
    """The byte that this element of the sequence's cache is, on whatever rank it lies."""
    return zlib.crc32(repr(key).encode()) & 0xFF


def outcome(worker: Worker, name: str) -> Done | Failed | Released:
    """How the pull or the offer ended."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for event in worker.wait(until - time.monotonic()):
            if name in {getattr(event, "request", None), getattr(event, "offer", None)}:
                return event
    raise AssertionError(f"{name} had no outcome within {PATIENCE} s")
