"""What the two halves of the connector tell each other. vLLM carries these, pickled, between its own processes."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvd.engines.vllm.metadata import Orders, RankPlace


@dataclass
class KvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to every worker, once a step."""

    orders: Orders


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker to the scheduler, once at start."""

    rank: int
    place: RankPlace


@dataclass
class KvdWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to the scheduler, in steps after which something has changed: the places of these ranks."""

    places: dict[int, RankPlace] = field(default_factory=dict)

    def aggregate(self, other: Any) -> "KvdWorkerMeta":
        """Those of both."""
        return KvdWorkerMeta({**self.places, **other.places})
