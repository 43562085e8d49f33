"""Several transports as one: a long read is split between them, so that more than one core copies.

The kernel copies a same-host read inside the post, on the thread that posts, so one agent moves only what one core can
copy. Each transport here is a *stripe*. Peers see the first stripe's agent only; the other agents read, and nobody
reads from them. The first stripe also finds out the path to each peer, so the others add a peer after it.

Everything here runs on the daemon's loop. A command goes to every stripe and is answered once all have answered. A read
goes to as many stripes as it is worth and ends with its last part, so the rules of `kvd.transport.interface` hold as
they do for each stripe. If the kernel copies the bytes, each stripe takes the next slice of a read when it is free;
over a network, slices are posted ahead of their bytes, so there the read is cut into even stripes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

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
    ReadRequest,
    Registered,
    RegisterFailed,
    Transport,
    TransportDied,
)
from kvd.transport.nixl.queue import Slices
from kvd.transport.path import is_copied

_GRAIN = 4 * limits.KIB
"""Stripes begin at multiples of this from the first byte: whole pages, if the blocks are."""


class Stripe(Transport, Protocol):
    """A transport that can share a read with others."""

    def read_share(self, slices: Slices) -> None:
        """Reads as much as it gets of `slices`; if that is nothing, `Landed` says 0.0 seconds."""

    def add_peer(self, agent: str, metadata: bytes, path: str = "") -> None:
        """As `Transport.add_peer`; `path` is the path to the peer if another stripe has found it out."""


class _Read(Struct, eq=False):
    """A read: the bytes of each of its parts that has not ended, by stripe, and how the other parts ended."""

    parts: dict[int, int]
    ends: list[Landed | ReadFailed] = []


@dataclass(slots=True)
class _Peer:
    """A peer, and the stripes that have added it. No stripe may load its metadata until it is `examined`."""

    metadata: bytes
    examined: bool = False
    added: set[int] = field(default_factory=set)
    path: str = ""
    """As the first stripe found it out."""


Examine = Callable[[bytes, bytes, Callable[[str], None]], None]
"""Takes a peer's previous metadata (may be empty) and its new; reports later why the new is unusable, or ""."""


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
        """No stripe loads metadata that `examine` finds fault with."""
        self._examine = examine
        self._stripes = tuple(stripes)
        self._front = self._stripes[0]
        self._on_event: Callable[[Event], None]
        self._stopped = False
        self._registering: dict[int, dict[int, Registered | RegisterFailed]] = {}
        """The stripes' answers so far, by pool."""
        self._deregistering: dict[int, set[int]] = {}
        """The stripes that have not answered, by pool."""
        self._pings: dict[int, set[int]] = {}
        """The same, by number."""
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._load = [0] * len(self._stripes)
        """Bytes of open reads, by stripe."""

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
        self._registering[pool] = {}
        for stripe in self._stripes:
            stripe.register(pool, base, size)

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        self._deregistering[pool] = set(range(len(self._stripes)))
        for stripe in self._stripes:
            stripe.deregister(pool)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        self._front.describe(pools)

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Makes `agent` reachable and connects ahead of the first read; answered by `PeerAdded` or `PeerFailed`."""
        known, peer = self._peers.get(agent), _Peer(metadata)
        self._peers[agent] = peer
        if known is not None and known.examined and known.metadata == metadata:
            self._examined(agent, peer, "")
        else:
            self._examine(known.metadata if known else b"", metadata, partial(self._examined, agent, peer))

    def _examined(self, agent: str, peer: _Peer, fault: str) -> None:
        if self._peers.get(agent) is not peer or self._stopped:
            return
        if fault:
            self._peer_failed(None, PeerFailed(agent, fault))
        else:
            peer.examined = True
            self._front.add_peer(agent, peer.metadata)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._peers.pop(agent, None)
        for stripe in self._stripes:
            stripe.remove_peer(agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read.

        Each part reads the stamp after its own last byte; if all found the same, that is the stamp of the read.
        """
        if request.read in self._reads:
            raise InternalError(ErrorCode.INTERNAL, f"read {request.read} was asked for twice")
        peer, count = self._peers.get(request.agent), len(self._stripes)
        size = request.descriptors.bytes
        if peer is None or size <= limits.SLICE_BYTES or count == 1:
            # A read from an unknown agent fails on the first stripe, in its turn.
            stripe = self._load.index(min(self._load)) if peer else 0
            self._begin(request, {stripe: size})
            self._stripes[stripe].read(request)
        elif is_copied(peer.path):
            slices = Slices(request)
            self._begin(request, dict.fromkeys(range(count), size // count))
            for each in self._stripes:
                each.read_share(slices)
        else:
            parts = list(cut_in_stripes(request.descriptors, count))
            self._begin(request, {stripe: part.bytes for stripe, part in enumerate(parts)})
            for stripe, part in enumerate(parts):
                self._stripes[stripe].read(replace(request, descriptors=part))

    def _begin(self, request: ReadRequest, parts: dict[int, int]) -> None:
        self._reads[request.read] = _Read(parts)
        for stripe, share in parts.items():
            self._load[stripe] += share

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        opened = self._reads.get(read)
        for stripe in list(opened.parts) if opened else ():
            self._stripes[stripe].abort(read)

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""
        self._front.expect_connection()

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""
        self._front.expect_readers(expected)

    def ping(self, number: int) -> None:
        """Asks every stripe for a sign of life; answered by `Answered`."""
        self._pings[number] = set(range(len(self._stripes)))
        for stripe in self._stripes:
            stripe.ping(number)

    def stop(self) -> None:
        """Shuts down in order and waits for it. Open reads get no more events."""
        self._stopped = True
        for stripe in self._stripes:
            stripe.stop()

    # --- events of the stripes --------------------------------------------------------------------------------------

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
        """Passes on `event` once the last stripe has sent it; ignores answers to what the daemon did not ask for."""
        left = missing.get(key)
        if left is None:
            return
        left.discard(stripe)
        if not left:
            del missing[key]
            self._on_event(event)

    def _registered(self, stripe: int, event: Registered | RegisterFailed) -> None:
        answers = self._registering[event.pool]
        answers[stripe] = event
        if len(answers) < len(self._stripes):
            return
        del self._registering[event.pool]
        failures = [answer for answer in answers.values() if isinstance(answer, RegisterFailed)]
        if not failures:
            self._on_event(Registered(event.pool, self.metadata))
            return
        for number, answer in answers.items():
            if isinstance(answer, Registered):
                self._stripes[number].deregister(event.pool)
        self._on_event(failures[-1])

    def _peer_added(self, stripe: int, event: PeerAdded) -> None:
        peer = self._peers.get(event.agent)
        if peer is None or not peer.examined:
            return  # removed meanwhile, and perhaps added again: this is about what it was before
        peer.added.add(stripe)
        if stripe == 0:
            peer.path = event.path
            for other in self._stripes[1:]:
                other.add_peer(event.agent, peer.metadata, event.path)
        if len(peer.added) == len(self._stripes):
            self._on_event(PeerAdded(event.agent, peer.path))

    def _peer_failed(self, stripe: int | None, event: PeerFailed) -> None:
        """The first stripe that loses a peer loses it for all: the others forget it. None: its metadata is at fault."""
        if self._peers.pop(event.agent, None) is None:
            return
        for number, other in enumerate(self._stripes):
            if number != stripe:
                other.remove_peer(event.agent)
        self._on_event(event)

    def _part_ended(self, stripe: int, event: Landed | ReadFailed) -> None:
        read = self._reads[event.read]
        self._load[stripe] -= read.parts.pop(stripe)
        read.ends.append(event)
        if not read.parts:
            del self._reads[event.read]
            self._on_event(event if len(read.ends) == 1 else _together(event.read, read.ends))
        elif isinstance(event, ReadFailed):
            self.abort(event.read)  # the other parts are of no use


def _together(number: int, ends: Sequence[Landed | ReadFailed]) -> Landed | ReadFailed:
    """How a read ended, from how its parts did: the first failure, if there is one."""
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
