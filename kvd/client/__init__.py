"""The worker's client: `Worker` (blocking) or `AsyncWorker` (asyncio), `Blocks`, and events."""

from kvd.client.aio import AsyncWorker
from kvd.client.blocking import Worker
from kvd.client.events import (
    Blocks,
    Cancelled,
    DaemonError,
    Disconnected,
    Done,
    Event,
    Failed,
    Freed,
    NotExtended,
    Offered,
    OfferRefused,
    Reattached,
    Released,
)

__all__ = [
    "AsyncWorker",
    "Blocks",
    "Cancelled",
    "DaemonError",
    "Disconnected",
    "Done",
    "Event",
    "Failed",
    "Freed",
    "NotExtended",
    "OfferRefused",
    "Offered",
    "Reattached",
    "Released",
    "Worker",
]
