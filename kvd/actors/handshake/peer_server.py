"""Answers the daemons that connect to us: who we are, which pools they may read, and that we live.

A peer is told of the pools that it may read, and gets metadata with their keys and no others. When a right is
withdrawn, the pools that the peer was told of get new keys. A daemon of this host that has such a pool mapped can go on
reading it until it ends: nothing takes a mapping away from another process.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, Component, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pace import RateLimit, TokenBuckets
from kvd.actors.runtime.pools import Pool
from kvd.errors import ErrorCode
from kvd.net.interface import EVERY_POOL, PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import Hello, Ping, Pong, PoolInfo, Refuse, Welcome
from kvd.protocol.types import VERSION
from kvd.transport.interface import Described, Transport

_log = structlog.get_logger("kvd.handshake")
_HELLOS: Final = RateLimit(limits.MAX_HELLOS_PER_SECOND, limits.MAX_PEERS)

_KEPT_MAPPING: Final = "a daemon of this host may have it mapped, and reads it until it ends: detach its worker"

_RETURN_SECONDS: Final = 30.0
"""What the transport to other hosts may take to start again before peers that need it are refused: usually 1 s."""

Rights = Callable[[str], tuple[str, ...]]
"""Patterns of the pools that a peer may read, by the public key that it proved (hexadecimal, empty without CURVE)."""


def everything(_key: str) -> tuple[str, ...]:
    """The rights of every peer if none proves a key."""
    return EVERY_POOL


def covers(patterns: tuple[str, ...], pool: str) -> bool:
    """Whether one of `patterns` matches the name of a pool."""
    return patterns == EVERY_POOL or any(fnmatchcase(pool, pattern) for pattern in patterns)


class Greeting(Struct, frozen=True, gc=False):
    """A hello of a peer that connected to us.

    `sender` is its routing id, `key` the public key that it proved (hexadecimal, empty without CURVE). `peer` is who it
    is, whatever its run and its connection.
    """

    sender: bytes
    key: str
    peer: str
    hello: Hello


class PeerServer(Component):
    """Handles the handshake's half of what peers ask; `kvd.actors.gateway.actor` has the leases do the rest."""

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        port: PeerPort,
        transport: Transport,
        *,
        pools: PoolsActor,
        stamps: int,
        rights: Rights,
    ) -> None:
        self.actor = actor
        self._context = context
        self._pools_actor = pools
        self._port = port
        self._transport = transport
        self._rights = rights
        self._stamps = stamps.to_bytes(8, "little")
        self._pools: dict[str, Pool] = {}
        self._parts: dict[tuple[int, ...], bytes] = {}
        """Metadata of some of the pools, by the numbers that the transport knows them as."""
        self._welcomes: dict[tuple[int, ...] | None, bytes] = {}
        """Encoded frames, by the same numbers, or None for all pools: peers with equal rights share one."""
        self._waiting: dict[tuple[int, ...], dict[bytes, Greeting]] = {}
        """Hellos by sender, that wait for such metadata."""
        self._hellos: TokenBuckets[str] = TokenBuckets(_HELLOS)
        """By peer."""
        self._network_lost: float | None = None
        """When the transport to other hosts ended, while it is being started again."""
        self._starts = 0
        """How often it was."""
        self._told: set[tuple[str, str]] = set()
        """(key of a peer, pool whose keys it got)."""

    # --- our pools --------------------------------------------------------------------------------------------------

    def pool_up(self, pool: Pool) -> None:
        """Tells peers that say hello from now on of this pool."""
        self._pools[pool.name] = pool
        self._keys_changed()

    def pool_down(self, pool: Pool, *, keys_end: bool) -> None:
        """Tells peers no more of this pool."""
        worker = pool.name
        self._pools.pop(worker, None)
        self._keys_changed()
        if keys_end:
            self._told = {(key, name) for key, name in self._told if name != worker}

    def rights_changed(self) -> None:
        """Another allow-list holds.

        Has pools registered anew if a peer was told of them that may not read them any more.
        """
        lost = {(key, pool) for key, pool in self._told if not covers(self._rights(key), pool)}
        self._told -= lost
        for key, pool in sorted(lost):
            _log.warning("right withdrawn", key=key, pool=pool, hint=_KEPT_MAPPING)
        for pool in sorted({pool for _, pool in lost}):
            call(self._pools_actor.renew, pool)

    def network_down(self) -> None:
        """Has peers of other hosts wait for its new keys; daemons of this host need none."""
        self._keys_changed()
        if self._network_lost is None:
            self._network_lost = self._context.loop.time()

    def network_up(self) -> None:
        """Tells peers that say hello from now on what they need."""
        self._starts += 1
        self._keys_changed()
        self._network_lost = None

    def _keys_changed(self) -> None:
        self._parts.clear()
        self._welcomes.clear()

    # --- hello and ping ---------------------------------------------------------------------------------------------

    def pinged(self, sender: bytes, ping: Ping) -> None:
        """Answers a ping."""
        self._answer(sender, Pong(ping.number, self._context.settings.incarnation, self._starts))

    def greeted(self, greeting: Greeting) -> None:
        """Answers a hello; those beyond a peer's rate get no answer."""
        daemon, hello = self._context.settings.daemon, greeting.hello
        if not self._hellos.take(greeting.peer, self._context.loop.time()):
            self._context.metrics.refused.labels("peer", ErrorCode.OVERLOADED).inc()
        elif hello.version != VERSION:
            self._context.metrics.refused.labels("peer", ErrorCode.BAD_VERSION).inc()
            text = f"{daemon} speaks version {VERSION} of the protocol, {hello.daemon} {hello.version}"
            self._answer(greeting.sender, Refuse(0, ErrorCode.BAD_VERSION, text))
        else:
            self._introduce(greeting)

    def _not_yet(self, seconds: float) -> Pong | Refuse:
        """What a peer hears that cannot read here until the transport to other hosts is back."""
        if seconds < _RETURN_SECONDS:
            return Pong(0, self._context.settings.incarnation, self._starts)
        which = f"the transport of {self._context.settings.daemon} to other hosts"
        text = f"{which} ended {seconds:.0f} s ago and has not come back; its log says why"
        return Refuse(0, ErrorCode.TRANSPORT, text)

    def _introduce(self, greeting: Greeting) -> None:
        """Answers a hello, also one that waited: by what holds now."""
        if self._network_lost is not None and greeting.hello.host != self._context.settings.host:
            self._answer(greeting.sender, self._not_yet(self._context.loop.time() - self._network_lost))
            return
        patterns = self._rights(greeting.key)
        if patterns == EVERY_POOL:
            self._welcome(greeting, None, self._transport.metadata, tuple(self._pools.values()))
            return
        pools = tuple(pool for pool in self._pools.values() if covers(patterns, pool.name))
        numbers = tuple(pool.id for pool in pools)
        metadata = self._parts.get(numbers)
        if metadata is not None:
            self._welcome(greeting, numbers, metadata, pools)
            return
        if numbers not in self._waiting:
            self._waiting[numbers] = {}
            self._transport.describe(numbers)
        self._waiting[numbers][greeting.sender] = greeting

    def described(self, event: Described) -> None:
        """Answers the hellos that waited for this metadata; it may be empty, if its process has ended meanwhile."""
        self._parts[event.pools] = event.metadata
        for greeting in self._waiting.pop(event.pools, {}).values():
            self._introduce(greeting)

    def _welcome(
        self, greeting: Greeting, numbers: tuple[int, ...] | None, metadata: bytes, pools: tuple[Pool, ...]
    ) -> None:
        self._told.update((greeting.key, pool.name) for pool in pools)
        self._transport.expect_connection()
        if numbers not in self._welcomes:
            self._welcomes[numbers] = codec.encode(self._introduction(metadata, pools))
        self._port.answer(greeting.sender, self._welcomes[numbers])

    def _answer(self, sender: bytes, reply: Pong | Refuse) -> None:
        self._port.answer(sender, codec.encode(reply))

    def _introduction(self, metadata: bytes, pools: tuple[Pool, ...]) -> Welcome:
        settings = self._context.settings
        return Welcome(
            settings.daemon,
            settings.incarnation,
            self._transport.agent,
            metadata,
            tuple(
                PoolInfo(pool.name, pool.epoch, pool.base.to_bytes(8, "little"), pool.size, pool.raw_spec)
                for pool in pools
            ),
            host=settings.host,
            stamps=self._stamps,
            starts=self._starts,
        )
