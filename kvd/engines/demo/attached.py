"""An engine whose ranks' caches are in pools that kvd lends: a worker and a pool for each rank."""

import sys

from kvd.client import Blocks, DaemonError, Disconnected, Done, Event, Reattached, Worker
from kvd.engines.demo.engine import Engine
from kvd.engines.demo.host_copy import HostCopy
from kvd.engines.demo.messages import EngineConfig
from kvd.engines.demo.model import Model, ModelConfig
from kvd.engines.demo.paged import BlockManager, PagedCache
from kvd.engines.demo.spec import engine_specs
from kvd.protocol import ticket

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
                else:
                    self._ended(rank, event)
                    events.append(event)
        return events

    def _ended(self, rank: int, event: Event) -> None:
        if isinstance(event, Done):
            ids = self._pulling.pop((rank, event.request))
            if self._copies:
                self._copies[rank].from_gpu(ids)

    def detach(self) -> None:
        """Returns the pools of all ranks."""
        for worker in self._workers:
            worker.detach()


def _spans(ids: list[int]) -> list[Blocks]:
    return [Blocks(group=0, first=0, ids=ids)]
