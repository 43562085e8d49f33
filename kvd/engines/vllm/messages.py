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
    """Workers to the scheduler, by rank, after steps in which one of these changed, or a turn's offer ended."""

    endpoints: dict[int, RankEndpoint] = field(default_factory=dict)
    unsent: dict[int, bool] = field(default_factory=dict)
    """Whether orders wait to be sent."""
    turn_ends: list[tuple[str, str]] = field(default_factory=list)
    """Offers of turns that have ended on a rank, and why: an entry for each rank."""

    def aggregate(self, other: Any) -> "KvdWorkerMeta":
        """What both workers say."""
        return KvdWorkerMeta(
            {**self.endpoints, **other.endpoints},
            {**self.unsent, **other.unsent},
            self.turn_ends + other.turn_ends,
        )
