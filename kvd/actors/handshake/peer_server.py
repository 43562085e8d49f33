"""The daemons that connect to us: who they hear that we are, what they may read, and whom their asks concern.

A peer is told of the pools that it may read, and gets metadata with their keys and no others. What it may read is
looked up for each ask again, by the public key that it proved; when a right is withdrawn, the pools that the peer was
told of get new keys.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from kvd import limits
from kvd.actors.handshake.messages import AnswerPeer, RightsChanged
from kvd.actors.leases.messages import PeerRequest
from kvd.actors.pools.messages import RenewPool
from kvd.actors.runtime.actor import Actor, Dispatcher, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.messages import LeaseRequest, Pool, PoolDown, PoolUp
from kvd.actors.runtime.token_bucket import RateLimit, TokenBuckets
from kvd.errors import ErrorCode, KvdError
from kvd.net.interface import EVERY_POOL, PeerAsked, PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import Claim, Fence, Hello, Ping, Pong, PoolInfo, Refuse, Settle, Welcome
from kvd.protocol.types import VERSION, Message
from kvd.transport.interface import Described, Transport

STAMPS: Final = 0
"""What the transport knows the stamps' memory as, which every peer may read: pools are numbered from 1."""

_HELLOS: Final = RateLimit(limits.MAX_HELLOS_PER_SECOND, limits.MAX_PEERS)

Rights = Callable[[str], tuple[str, ...]]
"""Patterns of the pools that a peer may read, by the public key that it proved (hexadecimal, empty without CURVE)."""


def everything(_key: str) -> tuple[str, ...]:
    """The rights of everybody where nobody proves a key."""
    return EVERY_POOL


class PeerServer:
    """See the module's text."""

    def __init__(
        self, context: ActorContext, port: PeerPort, transport: Transport, stamps: int, rights: Rights
    ) -> None:
        self._context = context
        self._port = port
        self._transport = transport
        self._rights = rights
        self._metadata = transport.metadata
        self._stamps = stamps.to_bytes(8, "little")
        self._pools: dict[str, Pool] = {}
        self._parts: dict[tuple[int, ...], bytes] = {}
        """Metadata of some of the pools, by what the transport knows them as."""
        self._welcomes: dict[tuple[int, ...], bytes] = {}
        """Frames, by the same: one for all who may read the same, so that it lies in memory once, unread or not."""
        self._waiting: dict[tuple[int, ...], dict[bytes, tuple[PeerAsked, Hello]]] = {}
        """Hellos by sender, that wait for such metadata."""
        self._hellos: TokenBuckets[str] = TokenBuckets(_HELLOS)
        """By peer."""
        self._told: set[tuple[str, str]] = set()
        """(key of a peer, pool): who has been told of what."""

    # --- own pools --------------------------------------------------------------------------------------------------

    def pool_up(self, pool: Pool, metadata: bytes) -> None:
        """Peers that say hello from now on hear of this pool."""
        self._pools[pool.worker] = pool
        self._metadata = metadata
        self._parts.clear()
        self._welcomes.clear()

    def pool_down(self, pool: Pool) -> None:
        """Peers that say hello from now on do not hear of this pool any more."""
        self._pools.pop(pool.worker, None)
        self._parts.clear()
        self._welcomes.clear()
        self._told = {(key, name) for key, name in self._told if name != pool.worker}

    def rights_changed(self) -> None:
        """Pools that somebody was told of who may not read them any more get new keys."""
        lost = {(key, pool) for key, pool in self._told if not _covers(self._rights(key), pool)}
        self._told -= lost
        for pool in sorted({pool for _, pool in lost}):
            self._context.pools.tell(RenewPool(pool))

    # --- asks -------------------------------------------------------------------------------------------------------

    def asked(self, event: PeerAsked) -> None:
        """One ask of a peer: answered here, or passed on to the leases; garbage gets a typed answer."""
        try:
            request = codec.peer_requests.decode(event.frame)
        except KvdError as error:
            self._context.metrics.refused.labels("peer", error.code).inc()
            self._answer(event.sender, Refuse(0, error.code, error.text[: limits.MAX_ERROR_TEXT]))
            return
        match request:
            case Hello() if self._hellos.take(_peer(event), self._context.loop.time()):
                self._greeted(event, request)
            case Hello():
                self._context.metrics.refused.labels("peer", ErrorCode.OVERLOADED).inc()
            case Ping():
                self._answer(event.sender, Pong(request.number, self._context.settings.incarnation))
            case _:
                self._pass_on(event, request)

    def _pass_on(self, event: PeerAsked, request: LeaseRequest) -> None:
        """To the leases, without what concerns pools that this peer may not read."""
        patterns = self._rights(event.key)
        named = () if patterns == EVERY_POOL else _pools_in(request)
        forbidden = {pool for pool in named if not _covers(patterns, pool)}
        if not forbidden:
            self._tell_leases(event, request)
            return
        self._context.metrics.refused.labels("peer", ErrorCode.NOT_PERMITTED).inc()
        if isinstance(request, Claim):
            text = f"this daemon may not read the pool {request.pool!r}; name it in its line of `curve_peers` there"
            self._answer(event.sender, Refuse(request.claim, ErrorCode.NOT_PERMITTED, text))
        elif isinstance(request, Fence):
            self._tell_leases(event, _unclaim(request, forbidden))
        elif isinstance(request, Settle):
            fences = tuple(_unclaim(fence, forbidden) for fence in request.fences)
            self._tell_leases(event, Settle(fences))

    def _tell_leases(self, event: PeerAsked, request: LeaseRequest) -> None:
        self._context.leases.tell(PeerRequest(event.sender, _peer(event), request))

    def _greeted(self, event: PeerAsked, request: Hello) -> None:
        settings = self._context.settings
        if request.version != VERSION:
            self._context.metrics.refused.labels("peer", ErrorCode.BAD_VERSION).inc()
            text = f"{settings.daemon} speaks version {VERSION} of the protocol, {request.daemon} {request.version}"
            self._answer(event.sender, Refuse(0, ErrorCode.BAD_VERSION, text))
            return
        patterns = self._rights(event.key)
        if patterns == EVERY_POOL:
            self._welcome(event, (), self._metadata, tuple(self._pools.values()))
            return
        pools = tuple(pool for pool in self._pools.values() if _covers(patterns, pool.worker))
        numbers = (STAMPS, *(pool.id for pool in pools))
        metadata = self._parts.get(numbers)
        if metadata is not None:
            self._welcome(event, numbers, metadata, pools)
            return
        if numbers not in self._waiting:
            self._waiting[numbers] = {}
            self._transport.describe(numbers)
        self._waiting[numbers][event.sender] = (event, request)

    def described(self, event: Described) -> None:
        """Metadata of some of the pools: for whoever waits for it, unless what it may read has changed meanwhile."""
        self._parts[event.pools] = event.metadata
        for asked, request in self._waiting.pop(event.pools, {}).values():
            self._greeted(asked, request)

    def _welcome(self, event: PeerAsked, numbers: tuple[int, ...], metadata: bytes, pools: tuple[Pool, ...]) -> None:
        """`numbers` are of the pools told of, empty for all."""
        self._told.update((event.key, pool.worker) for pool in pools)
        self._transport.expect_connection()
        if numbers not in self._welcomes:
            self._welcomes[numbers] = codec.encode(self._introduction(metadata, pools))
        self._port.answer(event.sender, self._welcomes[numbers])

    def _introduction(self, metadata: bytes, pools: tuple[Pool, ...]) -> Welcome:
        settings = self._context.settings
        return Welcome(
            settings.daemon,
            settings.incarnation,
            self._transport.agent,
            metadata,
            tuple(
                PoolInfo(pool.worker, pool.epoch, pool.base.to_bytes(8, "little"), pool.size, pool.raw_spec)
                for pool in pools
            ),
            host=settings.host,
            stamps=self._stamps,
        )

    def _answer(self, sender: bytes, message: Message) -> None:
        self._port.answer(sender, codec.encode(message))


class Receiving(Actor):
    """The half of the handshake that concerns peers which connect to us."""

    def __init__(self, dispatcher: Dispatcher, port: PeerPort, peer_server: PeerServer) -> None:
        super().__init__(dispatcher)
        self._port = port
        self._peer_server = peer_server

    @handles(PeerAsked)
    def asked(self, event: PeerAsked) -> None:
        """One ask of a peer."""
        self._peer_server.asked(event)

    @handles(AnswerPeer)
    def answer(self, message: AnswerPeer) -> None:
        """Passes an answer of the leases on."""
        self._port.answer(message.sender, codec.encode(message.message))

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Peers that say hello from now on hear of this pool."""
        self._peer_server.pool_up(message.pool, message.metadata)

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """Peers that say hello from now on do not hear of this pool any more."""
        self._peer_server.pool_down(message.pool)

    @handles(RightsChanged)
    def rights_changed(self, _message: RightsChanged) -> None:
        """Another allow-list holds."""
        self._peer_server.rights_changed()

    @handles(Described)
    def described(self, event: Described) -> None:
        """Metadata of some of the pools."""
        self._peer_server.described(event)


def _peer(event: PeerAsked) -> str:
    """Its key where it has proved one: a name is as its sender likes it, before the `#` of its run."""
    return event.key or event.sender.partition(b"#")[0].decode(errors="replace")


def _covers(patterns: tuple[str, ...], pool: str) -> bool:
    return patterns == EVERY_POOL or any(fnmatchcase(pool, pattern) for pattern in patterns)


def _pools_in(request: Message) -> Iterator[str]:
    """The pools that an ask names."""
    fences = request.fences if isinstance(request, Settle) else (request,) if isinstance(request, Fence) else ()
    if isinstance(request, Claim):
        yield request.pool
    for fence in fences:
        if fence.unclaimed is not None:
            yield fence.unclaimed.pool


def _unclaim(fence: Fence, forbidden: set[str]) -> Fence:
    """Without the claim, where that is of such a pool: it does not hold."""
    if fence.unclaimed is None or fence.unclaimed.pool not in forbidden:
        return fence
    return msgspec.structs.replace(fence, unclaimed=None)
