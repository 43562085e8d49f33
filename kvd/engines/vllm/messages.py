"""Messages between the halves of the connector. vLLM carries them, pickled, between its own processes."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvd.engines.vllm.metadata import RankEndpoint, StepMetadata


@dataclass
class KvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to every worker, once a step."""

    metadata: StepMetadata


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker to the scheduler, once at start."""

    rank: int
    endpoint: RankEndpoint


@dataclass
class KvdWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to the scheduler, after steps in which an endpoint changed."""

    endpoints: dict[int, RankEndpoint] = field(default_factory=dict)

    def aggregate(self, other: Any) -> "KvdWorkerMeta":
        """Both workers' endpoints."""
        return KvdWorkerMeta({**self.endpoints, **other.endpoints})
