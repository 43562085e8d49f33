"""One engine: a model, and the paged cache of each of its tensor-parallel ranks.

The ranks of an engine share a process and its weights here. Each has its own pool, worker and KV heads, which only that
rank's attention reads.
"""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvd.client import Blocks, DaemonError, Disconnected, Done, Event, Reattached, Worker
from kvd.cuda.copies import copy
from kvd.cuda.device import Stream, device_of
from kvd.engines.demo.messages import Channel, EngineConfig, Message, Ready, Stop
from kvd.engines.demo.model import Model, ModelConfig, attention
from kvd.engines.demo.paged import BlockManager, PagedCache
from kvd.engines.demo.spec import engine_specs
from kvd.layout import CacheSpec
from kvd.plan import Planner, SpanPair, route
from kvd.protocol import ticket

U64 = NDArray[np.uint64]


class Engine:
    """Prefills and decodes, one sequence at a time, with KV in blocks that the caller allocates."""

    def __init__(self, model: Model, ranks: Sequence[PagedCache]) -> None:
        torch.set_num_threads(1)  # rounding depends on the threads of a product, and tokens are compared
        self._model = model
        self.ranks = ranks
        self._query_heads = model.config.query_heads // len(ranks)

    def prefill(self, prompt: Sequence[int], table: Sequence[int], first: int = 0) -> int:
        """Writes the KV of `prompt`, from position `first` on, into `table`'s blocks; returns the greedy next token."""
        stop = first + len(prompt)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended = []
            for rank, cache in enumerate(self.ranks):
                heads = slice(cache.heads.start, cache.heads.stop)
                cache.write(layer, table, first, k[:, heads], v[:, heads])
                queries = q[:, rank * self._query_heads : (rank + 1) * self._query_heads]
                attended.append(attention(queries, *cache.read(layer, table, stop)))
            return torch.cat(attended, dim=1)

        logits = self._model.forward(torch.tensor(prompt), torch.arange(first, stop), attend)
        return int(logits.argmax())

    def decode(self, token: int, position: int, table: Sequence[int]) -> int:
        """The greedy token after `token` at `position`; writes its KV and reads that of all before it."""
        return self.prefill([token], table, position)


class HostCopy:
    """A pool on a GPU for an engine that computes on the CPU: a copy of it in host memory, block by block.

    `content` is laid out as the pool of `worker`, whose spec is number `rank` of all its engine's `specs`.

    Raises:
        Unavailable: `NO_DEVICE`, this process does not see the pool's GPU.

    """

    def __init__(self, worker: Worker, specs: Sequence[CacheSpec], rank: int) -> None:
        spec = specs[rank]
        self._device = device_of(worker.device)
        self._pool = worker.device_pool
        self._bytes = np.zeros(spec.pool_bytes, np.uint8)
        [share] = route(specs, spec).shares
        self._planner = Planner(specs[share.source], spec, share)

    @property
    def content(self) -> memoryview:
        """The bytes, writable."""
        return self._bytes.data

    def to_gpu(self, blocks: Sequence[int]) -> None:
        """Copies blocks to the pool; they are there when it returns."""
        offsets, lengths = self._pieces(blocks)
        self._copy(offsets + np.uint64(self._pool.pointer), offsets + np.uint64(self._bytes.ctypes.data), lengths)

    def from_gpu(self, blocks: Sequence[int]) -> None:
        """Copies blocks out of the pool."""
        offsets, lengths = self._pieces(blocks)
        self._copy(offsets + np.uint64(self._bytes.ctypes.data), offsets + np.uint64(self._pool.pointer), lengths)

    def _pieces(self, blocks: Sequence[int]) -> tuple[U64, U64]:
        """Where these blocks lie in the pool, and how long each piece is."""
        ids = np.asarray(blocks, np.uint32)
        planned = self._planner.plan([SpanPair(0, ids, 0, ids)])
        return planned.dst, planned.length

    def _copy(self, targets: U64, sources: U64, lengths: U64) -> None:
        with self._device.current(), Stream(self._device) as stream:
            copy(stream, targets, sources, lengths)
            stream.synchronize()


ATTACH_TIMEOUT = 30.0
OFFER_TTL = 60.0
PULL_TIMEOUT = 30.0
"""Seconds. A prompt's KV waits a minute for its reader, which gives up after half a minute."""


class AttachedEngine:
    """The engine, its blocks, and the workers of its ranks. Every request to kvd is made for every rank."""

    def __init__(self, config: EngineConfig) -> None:
        model = Model(ModelConfig(seed=config.seed))
        self.blocks = BlockManager(config.num_blocks, config.block_tokens)
        self._workers: list[Worker] = []
        self._copies: list[HostCopy] = []
        """Of each rank's pool, if they are on a GPU."""
        self._pulling: dict[tuple[int, str], list[int]] = {}
        """The blocks that a rank pulls for a request."""
        ranks = []
        specs = engine_specs(model.config, config)
        for rank, spec in enumerate(specs):
            worker = Worker.attach(config.socket, name=f"{config.name}-{rank}", spec=spec, timeout=ATTACH_TIMEOUT)
            self._workers.append(worker)
            if worker.device:
                self._copies.append(HostCopy(worker, specs, rank))
            ranks.append(PagedCache(self._copies[rank].content if worker.device else worker.pool, spec))
        self.engine = Engine(model, ranks)

    @property
    def ranks(self) -> int:
        """The number of ranks, and so of outcomes to wait for."""
        return len(self._workers)

    def offer(self, request: str, tokens: int, table: list[int]) -> str:
        """Offers the blocks of a prompt of `tokens` tokens; the ticket names every rank's offer."""
        ids = table[: self.blocks.blocks_for(tokens)]
        for pool in self._copies:
            pool.to_gpu(ids)
        spans = _spans(ids)
        return ticket.join(
            worker.offer(request, tokens=tokens, blocks=spans, ttl=OFFER_TTL) for worker in self._workers
        )

    def open(self, request: str) -> str:
        """Opens an offer that grows while the prompt is prefilled; the ticket names every rank's offer."""
        return ticket.join(worker.open_offer(request, ttl=OFFER_TTL) for worker in self._workers)

    def extend(self, request: str, before: int, tokens: int, table: list[int], *, closes: bool) -> None:
        """Says that the first `tokens` tokens are complete, after `before`, and whether that `closes` the offer."""
        known, stop = (self.blocks.blocks_for(number) for number in (before, tokens))
        more = [Blocks(group=0, first=known, ids=table[known:stop])] if stop > known else []
        for worker in self._workers:
            tell = worker.close_offer if closes else worker.extend_offer
            tell(request, tokens=tokens, blocks=more)

    def pull(self, request: str, text: str, tokens: int, table: list[int]) -> None:
        """Pulls the KV of `tokens` tokens, each rank its own heads; each rank then has an outcome."""
        ids = table[: self.blocks.blocks_for(tokens)]
        for rank, worker in enumerate(self._workers):
            self._pulling[rank, request] = ids
            worker.pull(request, text, blocks=_spans(ids), timeout=PULL_TIMEOUT)

    def poll(self, timeout: float) -> list[Event]:
        """Events of all ranks; waits up to `timeout` seconds, shared among the ranks, for the first."""
        events: list[Event] = []
        for rank, worker in enumerate(self._workers):
            for event in worker.wait(timeout / self.ranks) if timeout and not events else worker.poll():
                if isinstance(event, Disconnected | Reattached | DaemonError):
                    sys.stderr.write(
                        f"rank {rank}: {event}\n"
                    )  # the log; outcomes of requests come as events of their own
                    continue
                if isinstance(event, Done):
                    ids = self._pulling.pop((rank, event.request))
                    if self._copies:
                        self._copies[rank].from_gpu(ids)
                events.append(event)
        return events

    def detach(self) -> None:
        """Returns the pools of all ranks."""
        for worker in self._workers:
            worker.detach()


def _spans(ids: list[int]) -> list[Blocks]:
    return [Blocks(group=0, first=0, ids=ids)]


Work = TypeVar("Work", bound=Message)


class Loop(ABC, Generic[Work]):
    """What the process of an engine does until the router says to stop, and for what is then under way."""

    def __init__(self, kv: AttachedEngine, channel: Channel[Work | Stop]) -> None:
        self._kv = kv
        self._channel = channel
        self._waiting: deque[Work] = deque()
        """Requests without blocks."""
        self._stopping = False

    @abstractmethod
    def run(self) -> None:
        """Serves until stopped."""

    def _receive(self, timeout: float) -> None:
        for message in self._channel.receive(timeout):
            if isinstance(message, Stop):
                self._stopping = True
            else:
                self._waiting.append(message)

    @classmethod
    def main(cls, kinds: Any) -> None:
        """Entry of the process, which gets messages of these `kinds`; its argument is an `EngineConfig` as JSON."""
        channel: Channel[Work | Stop] = Channel(kinds)
        kv = AttachedEngine(msgspec.json.decode(sys.argv[1], type=EngineConfig))
        channel.send(Ready())
        cls(kv, channel).run()
        kv.detach()
