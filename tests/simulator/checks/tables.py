"""Finds every table of an actor by walking its attributes: they must be empty in an idle world."""

from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np

_OTHERS = (
    "ActorContext",
    "Dispatcher",
    "GatewayActor",
    "PoolsActor",
    "HandshakeActor",
    "LeasesActor",
    "SchedulerActor",
    "CompletionActor",
    "PeerChannel",
    "PeerServer",
    "Sessions",
    "SimFabric",
    "SimTransport",
    "SimPeerPort",
    "SimWorkerPort",
    "Network",
    "Settings",
)
"""Classes whose objects do not belong to the object that refers to them."""
_SKIPPED = ("_heap", "_watchers", "_users")
"""Deadlines that were unset stay in their heap until they come up, which is bounded; who is told of pools is fixed."""
_TABLES = (dict, set, list, deque)
_MODULES = ("kvd.actors", "kvd.transport")


def tables(name: str, thing: object) -> Iterator[tuple[str, Sized]]:
    """Yields (path, table) of each table of `thing` and its parts."""
    seen: set[int] = set()
    pending = deque([(name, thing)])  # the shortest path to each names it
    while pending:
        path, each = pending.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for attribute, value in _attributes(each):
            inner = f"{path}.{attribute}"
            if isinstance(value, _TABLES):
                if attribute not in _SKIPPED:
                    yield inner, value
            elif type(value).__module__.startswith(_MODULES) and type(value).__name__ not in _OTHERS:
                pending.append((inner, value))


def _attributes(thing: object) -> list[tuple[str, object]]:
    if is_dataclass(thing):
        return [(field.name, getattr(thing, field.name)) for field in fields(thing)]
    if isinstance(thing, msgspec.Struct | np.ndarray):
        return []
    return list(getattr(thing, "__dict__", {}).items())
