"""Several transports as one: a long read is cut into stripes, so that more than one core copies.

A read on the same host is a copy by the kernel, made inside of the post on the thread that posts; one agent therefore
moves what one core can copy, whatever the memory could give. Peers see the first agent only: the others read, and
nobody reads from them. The first also finds out by which path a peer is reached: the others add the peer after it.

Everything here runs on the daemon's loop. A command goes to every stripe, and is answered when all of them have; a
read goes to as many stripes as it is worth and ends when its last part has, so the rules of `kvd.transport.interface`
hold as they hold for each stripe. A stripe that copies while it posts takes the next slice of a read when it is free;
over a network slices are posted ahead of their bytes, so there the read is cut into even stripes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import Struct

from kvd import limits
from kvd.errors import ErrorCode, InternalError
from kvd.plan import Descriptors
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    Registered,
    RegisterFailed,
    Transport,
    TransportDied,
)
from kvd.transport.nixl.queue import Slices

_GRAIN = 4 * limits.KIB
"""Stripes begin at multiples of this from the first byte: whole pages where the blocks are."""


class Stripe(Transport, Protocol):
    """A transport that can share a read with others."""

    def read_share(self, agent: str, local_base: int, remote_base: int, slices: Slices, *, stamp: int = 0) -> None:
        """As `read`, of what it gets of `slices`; where it gets none, `Landed` says 0.0 seconds."""

    def add_peer_by(self, path: str, agent: str, metadata: bytes) -> None:
        """As `add_peer`, of one that another stripe reaches by `path`."""


class _Read(Struct, eq=False):
    """A read: `parts` are the bytes of those of its stripes that have not ended, `ends` what the others said."""

    agent: str
    parts: dict[int, int]
    ends: list[Landed | ReadFailed] = []


@dataclass(slots=True)
class _Registration:
    """A pool whose stripes have not all answered: the answers so far."""

    done: list[int] = field(default_factory=list)
    failure: RegisterFailed | None = None
    failures: int = 0


@dataclass(slots=True)
class _Peer:
    """A peer: its metadata, the stripes that have added it, and the path that the first of them found.

    Where the metadata is not `sound`, no fault has been found with it yet: no stripe may load it.
    """

    metadata: bytes
    sound: bool = False
    added: set[int] = field(default_factory=set)
    path: str = ""


Examine = Callable[[bytes, bytes, Callable[[str], None]], None]
"""Takes a peer's metadata of before (may be empty) and of now; says later why that of now is of no use, or nothing."""


def accept(_known: bytes, _metadata: bytes, done: Callable[[str], None]) -> None:
    """Finds no fault with any metadata."""
    done("")


def cut_in_stripes(descriptors: Descriptors, count: int) -> Iterator[Descriptors]:
    """At most `count` parts of about as many bytes each, in order; a descriptor may be cut in the middle."""
    ends = np.cumsum(descriptors.length)
    size = int(ends[-1])
    bounds = sorted({size * part // count // _GRAIN * _GRAIN for part in range(count)} | {size})
    for low, high in itertools.pairwise(bounds):
        first, last = int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(ends, high, side="left"))
        src, dst, length = (
            column[first : last + 1].copy() for column in (descriptors.src, descriptors.dst, descriptors.length)
        )
        length[-1] -= ends[last] - np.uint64(high)
        skipped = np.uint64(low) - (ends[first] - descriptors.length[first])
        src[0], dst[0], length[0] = src[0] + skipped, dst[0] + skipped, length[0] - skipped
        yield Descriptors(src, dst, length)


class StripedTransport:
    """`kvd.transport.interface.Transport` over `stripes`, one or more transports of different agents, none started."""

    def __init__(self, stripes: Sequence[Stripe], examine: Examine = accept) -> None:
        """What `examine` finds fault with is loaded by no stripe."""
        self._examine = examine
        self._stripes = tuple(stripes)
        self._front = self._stripes[0]
        self._on_event: Callable[[Event], None]
        self._stopped = False
        self._registering: dict[int, _Registration] = {}
        self._deregistering: dict[int, set[int]] = {}
        self._peers: dict[str, _Peer] = {}
        self._direct: set[str] = set()
        """Peers whose last read was copied while it was posted."""
        self._reads: dict[int, _Read] = {}
        self._load = [0] * len(self._stripes)
        """Bytes of open reads, a stripe each."""
        self._pings: dict[int, set[int]] = {}

    @property
    def agent(self) -> str:
        """The name under which peers add this agent."""
        return self._front.agent

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event that changed it."""
        return self._front.metadata

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts all stripes; `on_event` is called on the loop."""
        self._on_event = on_event
        for number, stripe in enumerate(self._stripes):
            stripe.start(partial(self._heard, number))

    def register(self, pool: int, base: int, size: int) -> None:
        """Registers `size` bytes at address `base`; answered by `Registered` or `RegisterFailed`."""
        self._registering[pool] = _Registration()
        for stripe in self._stripes:
            stripe.register(pool, base, size)

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        self._deregistering[pool] = set(range(len(self._stripes)))
        for stripe in self._stripes:
            stripe.deregister(pool)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that leads to the registrations of `pools` and to no others; answered by `Described`."""
        self._front.describe(pools)

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Makes `agent` reachable and connects ahead of the first read; answered by `PeerAdded` or `PeerFailed`."""
        known, peer = self._peers.get(agent), _Peer(metadata)
        self._peers[agent] = peer
        if known is not None and known.sound and known.metadata == metadata:
            self._examined(agent, peer, "")
        else:
            self._examine(known.metadata if known else b"", metadata, partial(self._examined, agent, peer))

    def _examined(self, agent: str, peer: _Peer, fault: str) -> None:
        if self._peers.get(agent) is not peer or self._stopped:
            return
        if fault:
            self._peer_failed(None, PeerFailed(agent, fault))
        else:
            peer.sound = True
            self._front.add_peer(agent, peer.metadata)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._peers.pop(agent, None)
        self._direct.discard(agent)
        for stripe in self._stripes:
            stripe.remove_peer(agent)

    def read(
        self, read: int, agent: str, local_base: int, remote_base: int, descriptors: Descriptors, *, stamp: int = 0
    ) -> None:
        """Reads `descriptors.length[i]` bytes at `remote_base + src[i]` of `agent` into `local_base + dst[i]`.

        Each part reads the stamp after its own last byte; where all found the same, it is the stamp of the read.
        """
        if read in self._reads:
            raise InternalError(ErrorCode.INTERNAL, f"read {read} was asked for twice")
        size, count = descriptors.bytes, len(self._stripes)
        if agent not in self._peers or size <= limits.SLICE_BYTES or count == 1:
            # An agent that is not known fails on the first stripe, in its turn.
            stripe = self._load.index(min(self._load)) if agent in self._peers else 0
            self._begin(read, agent, {stripe: size})
            self._stripes[stripe].read(read, agent, local_base, remote_base, descriptors, stamp=stamp)
        elif agent in self._direct:
            slices = Slices(read, descriptors)
            self._begin(read, agent, dict.fromkeys(range(count), size // count))
            for each in self._stripes:
                each.read_share(agent, local_base, remote_base, slices, stamp=stamp)
        else:
            parts = list(cut_in_stripes(descriptors, count))
            self._begin(read, agent, {stripe: part.bytes for stripe, part in enumerate(parts)})
            for stripe, part in enumerate(parts):
                self._stripes[stripe].read(read, agent, local_base, remote_base, part, stamp=stamp)

    def _begin(self, read: int, agent: str, parts: dict[int, int]) -> None:
        self._reads[read] = _Read(agent, parts)
        for stripe, share in parts.items():
            self._load[stripe] += share

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        opened = self._reads.get(read)
        for stripe in list(opened.parts) if opened else ():
            self._stripes[stripe].abort(read)

    def expect_connection(self) -> None:
        """A peer has been given this agent's metadata and will connect: it is answered promptly for a while."""
        self._front.expect_connection()

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, it answers them promptly."""
        self._front.expect_readers(expected)

    def ping(self, number: int) -> None:
        """Asks whether every stripe turns; answered by `Answered`."""
        self._pings[number] = set(range(len(self._stripes)))
        for stripe in self._stripes:
            stripe.ping(number)

    def stop(self) -> None:
        """Ends everything in order, waiting for it. Reads that are open get no event any more."""
        self._stopped = True
        for stripe in self._stripes:
            stripe.stop()

    # --- what a stripe says -----------------------------------------------------------------------------------------

    def _heard(self, stripe: int, event: Event) -> None:
        if self._stopped:
            return
        match event:
            case Landed() | ReadFailed():
                self._part_ended(stripe, event)
            case Registered() | RegisterFailed():
                self._registered(stripe, event)
            case Deregistered():
                self._all_said(self._deregistering, event.pool, stripe, Deregistered(event.pool, self.metadata))
            case PeerAdded():
                self._peer_added(stripe, event)
            case PeerFailed():
                self._peer_failed(stripe, event)
            case Answered():
                self._all_said(self._pings, event.number, stripe, event)
            case TransportDied() | Described():
                self._on_event(event)

    def _all_said(self, missing: dict[int, set[int]], key: int, stripe: int, event: Event) -> None:
        """Tells `event` when the last of the stripes has said it; what was not asked for is not told."""
        left = missing.get(key)
        if left is None:
            return
        left.discard(stripe)
        if not left:
            del missing[key]
            self._on_event(event)

    def _registered(self, stripe: int, event: Registered | RegisterFailed) -> None:
        registration = self._registering[event.pool]
        if isinstance(event, Registered):
            registration.done.append(stripe)
        else:
            registration.failure = event
            registration.failures += 1
        if len(registration.done) + registration.failures < len(self._stripes):
            return
        del self._registering[event.pool]
        if registration.failure is None:
            self._on_event(Registered(event.pool, self.metadata))
            return
        for done in registration.done:
            self._stripes[done].deregister(event.pool)
        self._on_event(registration.failure)

    def _peer_added(self, stripe: int, event: PeerAdded) -> None:
        peer = self._peers.get(event.agent)
        if peer is None or not peer.sound:
            return  # removed meanwhile, and perhaps added again: this is about what it was before
        peer.added.add(stripe)
        if stripe == 0:
            peer.path = event.path
            for other in self._stripes[1:]:
                other.add_peer_by(event.path, event.agent, peer.metadata)
        if len(peer.added) == len(self._stripes):
            self._on_event(PeerAdded(event.agent, peer.path))

    def _peer_failed(self, stripe: int | None, event: PeerFailed) -> None:
        """The first stripe that loses a peer loses it for all: the others forget it, too. None: no stripe has."""
        if self._peers.pop(event.agent, None) is None:
            return
        self._direct.discard(event.agent)
        for number, other in enumerate(self._stripes):
            if number != stripe:
                other.remove_peer(event.agent)
        self._on_event(event)

    def _part_ended(self, stripe: int, event: Landed | ReadFailed) -> None:
        read = self._reads[event.read]
        self._load[stripe] -= read.parts.pop(stripe)
        read.ends.append(event)
        if not read.parts:
            self._ended(event.read, read)
        elif isinstance(event, ReadFailed):
            self.abort(event.read)  # the other parts are of no use

    def _ended(self, number: int, read: _Read) -> None:
        del self._reads[number]
        event = read.ends[0] if len(read.ends) == 1 else _together(number, read.ends)
        if isinstance(event, Landed) and read.agent in self._peers:
            (self._direct.add if event.in_post else self._direct.discard)(read.agent)
        self._on_event(event)


def _together(number: int, ends: Sequence[Landed | ReadFailed]) -> Landed | ReadFailed:
    """The end of a read, of those of its parts: the first failure where there is one."""
    for end in ends:
        if isinstance(end, ReadFailed):
            return end
    landed = [end for end in ends if isinstance(end, Landed) and end.seconds]  # the others got none of it
    stamps = {part.stamp for part in landed}
    return Landed(
        number,
        max((part.seconds for part in landed), default=0.0),
        in_post=all(part.in_post for part in landed),
        stamp=stamps.pop() if len(stamps) == 1 else 0,
    )
