"""What a pull moves, from the plan that the daemons make of the same layouts and block ids."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvd.layout import CacheSpec
from kvd.plan import Planner, Span, check_compatible, route
from kvd.protocol import ticket


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes, and the descriptors that name them."""

    bytes: int = 0
    descriptors: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.descriptors + other.descriptors)


class Traffic:
    """Plans between every rank of a producer and every rank of a consumer."""

    def __init__(self, producers: Sequence[CacheSpec], consumers: Sequence[CacheSpec]) -> None:
        """Raises `BadRequest` (`INCOMPATIBLE`), naming both sides, for caches that kvd cannot map onto each other."""
        for producer, consumer in itertools.product(producers, consumers):
            check_compatible(producer, consumer)
        self._plans = [
            Planner(producers[share.source], consumer, share)
            for consumer in consumers
            for share in route(producers, consumer).shares
        ]

    def of(self, text: str, blocks: Sequence[int]) -> Amount:
        """What the ticket `text` moves into the consumer's `blocks`, over all ranks, which share block ids."""
        pulled = ticket.decode(text)
        offered = np.frombuffer(pulled.blocks[0][0].ids, dtype="<u4")
        spans = [Span(0, offered, 0, np.array(blocks, dtype=np.uint32))]
        plans = [plan.plan(spans, pulled.tokens) for plan in self._plans]
        return Amount(sum(plan.bytes for plan in plans), sum(plan.count for plan in plans))
