"""Small bounds for a world, so that it reaches them, and a check that they are kept.

`SMALL` says what a bound of `kvd.limits` is in a world that has small ones. `over` counts what each bounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvd import limits
from kvd.actors.build import Actors

SMALL: Final = {
    "BATCH_BLOCKS": 1,
    "MAX_CLAIMS_PER_OFFER": 3,
    "MAX_CLAIMS_WAITING": 2,
    "MAX_HANDSHAKES": 1,
    "MAX_LEAVING": 1,
    "MAX_PLANNED": 4,
    "MAX_PLANNED_AT_ONCE": 2,
    "MAX_PLANS": 1,
    "MAX_RENEWALS": 1,
    "MAX_REQUESTS_PER_WORKER": 3,
    "MAX_SETTLED": 1,
    "MAX_TOMBSTONES": 4,
    "PLANNED_PART": 2,
    "MESSAGES_PER_TURN": 3,
    "NOTIFICATIONS_PER_BATCH": 1,
    "SLICE_BYTES": 64,
    "SLICE_DESCRIPTORS": 4,
    "MAX_BYTES_IN_FLIGHT": 128,
}

SEEN = dict(SMALL)
"""The bounds that kvd is made to see."""
COUNTED: Final = (
    "MAX_CLAIMS_PER_OFFER",
    "MAX_CLAIMS_WAITING",
    "MAX_HANDSHAKES",
    "MAX_REQUESTS_PER_WORKER",
    "MAX_TOMBSTONES",
)
"""Those that show in the tables of a daemon."""


@contextmanager
def small_bounds(*, wanted: bool) -> Iterator[None]:
    """Makes all of kvd see small bounds if `wanted`."""
    before = {name: getattr(limits, name) for name in SMALL}
    try:
        for name, value in SEEN.items() if wanted else ():
            setattr(limits, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(limits, name, value)


def over(actors: Actors) -> list[str]:
    """The bounds that a daemon currently exceeds."""
    return [f"{name} is {SMALL[name]}, there are {count}" for name, count in _counts(actors) if count > SMALL[name]]


def _counts(actors: Actors) -> Iterator[tuple[str, int]]:
    leases, scheduler, handshake = actors.leases, actors.scheduler, actors.handshake
    yield "MAX_TOMBSTONES", len(leases._tombstones)
    yield "MAX_CLAIMS_WAITING", len(leases.claims._waiting)
    yield "MAX_HANDSHAKES", len(handshake._slots._in)
    yield "MAX_REQUESTS_PER_WORKER", max(leases.offers.bounds.standing.values(), default=0)
    yield "MAX_REQUESTS_PER_WORKER", max((pulls for pulls, _, _ in scheduler._targets._open.values()), default=0)
    yield "MAX_CLAIMS_PER_OFFER", max((len(lease.claims) for lease in leases.offers._leases.values()), default=0)
