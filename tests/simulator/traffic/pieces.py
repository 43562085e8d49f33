"""The kinds of things that worlds are made of: which of them a run may generate, and which of those a world has.

Each is drawn for each world by dice of its own, so that worlds keep what else they have when a piece is switched on.
"""

import random
from enum import StrEnum
from typing import Final

_LIKELY: Final = 0.25
"""Of a piece to be part of a world."""


class Piece(StrEnum):
    """One kind, by the name that `kvd sim --with` takes."""

    BACKWARD_CLOCKS = "backward-clocks"
    """A daemon's run has a lower incarnation than the one before it."""
    BRIEF_OFFERS = "brief-offers"
    """Offers whose time is over before their reads are, which claims must keep alive."""
    CHANGING_PATHS = "changing-paths"
    """Some reads of one peer are made by the kernel, others by a network card, whose reads outlive the process."""
    HOSTILE_PEERS = "hostile-peers"
    """An admitted peer, and another user's process, send what they like."""
    OLD_TICKETS = "old-tickets"
    """A ticket is pulled again, long after."""
    REUSED_NAMES = "reused-names"
    """An offer has the name, the tokens and the blocks of one that has ended."""
    SEVERAL_CONSUMERS = "several-consumers"
    """A ticket is pulled by several engines."""
    SMALL_BOUNDS = "small-bounds"
    """Queues, tables and batches are short, and full now and then."""
    TWO_ADDRESSES = "two-addresses"
    """Tickets spell the address of one daemon in two ways."""
    VANISHING_WORKERS = "vanishing-workers"
    """A worker that dies and never comes back."""


WAITING: Final[frozenset[Piece]] = frozenset()
"""Those that daemons do not bear yet: generated only where they are asked for."""

ON: Final = frozenset(Piece) - WAITING


def draw(seed: int, among: frozenset[Piece]) -> frozenset[Piece]:
    """The pieces of the world of `seed`."""
    return frozenset(
        piece
        for piece in sorted(among)
        if random.Random(f"{seed}/{piece}").random() < _LIKELY  # noqa: S311 - dice, not secrets
    )
