"""Features that a simulated world may have: which a run may generate, and which a world has.

Each is drawn for each world by dice of its own, so that worlds keep what else they have when a piece is switched on.
"""

import random
from enum import StrEnum
from typing import Final

_LIKELY: Final = 0.25
"""Probability that a world has a piece."""


class Piece(StrEnum):
    """One feature, by the name that `python -m tests.simulator --with` takes."""

    BACKWARD_CLOCKS = "backward-clocks"
    """A restarted daemon has a lower incarnation than before."""
    BRIEF_OFFERS = "brief-offers"
    """Offers that expire before their reads end, so that claims must keep them alive."""
    CHANGING_PATHS = "changing-paths"
    """Some reads of a peer are done by the kernel, others by a network card, whose reads outlive the process."""
    CROWDED_HOSTS = "crowded-hosts"
    """There is no memory for a pool while another one is kept whose worker is gone."""
    DYING_SUCCESSORS = "dying-successors"
    """A worker dies while it is read from, and its successor before it has the pool."""
    DYING_TRANSPORTS = "dying-transports"
    """The process ends in which a daemon reads from other hosts, and another one is started."""
    GROWING_OFFERS = "growing-offers"
    """Sequences are pulled while they are prefilled, chunk by chunk; some pulls begin before the prefill."""
    HOSTILE_PEERS = "hostile-peers"
    """An admitted peer and another user's process send what they like."""
    IDLE_PROCESSES = "idle-processes"
    """A worker loses its session and does not poll for longer than pools of dead processes are kept."""
    INVISIBLE_PROCESSES = "invisible-processes"
    """Processes of another PID namespace, whose end nothing tells: those end with their sessions."""
    LINGERING_PROCESSES = "lingering-processes"
    """A worker's process loses its session for good and writes on, beside its successor's."""
    OLD_TICKETS = "old-tickets"
    """A ticket is pulled again much later."""
    SEVERAL_HOSTS = "several-hosts"
    """Daemons of one host map each other's pools, slowly; those of others are read over a network."""
    REUSED_NAMES = "reused-names"
    """An offer has the name, the tokens and the blocks of one that has ended."""
    SEVERAL_CONSUMERS = "several-consumers"
    """A ticket is pulled by several engines."""
    SMALL_BOUNDS = "small-bounds"
    """Queues, tables and batches are short, and sometimes full."""
    STANDSTILLS = "standstills"
    """Now and then a daemon, or all of the world, gets no processor for seconds; then its timers run first."""
    STORED_POOLS = "stored-pools"
    """A service manager keeps the pools' descriptors; daemons restart together with their workers."""
    TWO_ADDRESSES = "two-addresses"
    """Tickets spell the address of one daemon in two ways."""
    VANISHING_WORKERS = "vanishing-workers"
    """A worker that dies and never comes back."""


WAITING: Final[frozenset[Piece]] = frozenset()
"""Those that daemons cannot handle yet: generated only on request."""

ON: Final = frozenset(Piece) - WAITING


def draw(seed: int, among: frozenset[Piece]) -> frozenset[Piece]:
    """The pieces of the world of `seed`."""
    return frozenset(
        piece
        for piece in sorted(among)
        if random.Random(f"{seed}/{piece}").random() < _LIKELY  # noqa: S311 - dice, not secrets
    )
