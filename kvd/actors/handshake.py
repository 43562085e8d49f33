"""The handshake: the only actor that talks to other daemons. It learns who they are and whether they live.

For the peers that we connect to (we pull from them) it runs `kvd.state.peer`: hello, metadata into the transport, then
a ping every heartbeat. For the peers that connect to us (they pull from us) it answers hello and ping itself and
passes the rest to the leases.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.actor import Actor, OnFailure, handles
from kvd.actors.house import House
from kvd.actors.messages import (
    AnswerPeer,
    AskPeer,
    ExpectPeers,
    ForgetPeer,
    NeedPeer,
    PeerAnswers,
    PeerAsks,
    PeerDown,
    PeerIdle,
    PeerPool,
    PeerUp,
    PeerView,
    Pool,
    PoolDown,
    PoolUp,
    Report,
    Reported,
)
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.layout import CacheSpec
from kvd.net.interface import PeerAnswered, PeerAsked, PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import (
    Broken,
    Claim,
    Fence,
    Grant,
    Held,
    Hello,
    Ping,
    Pong,
    PoolInfo,
    Refuse,
    Release,
    Renew,
    Settle,
    Settled,
    Welcome,
)
from kvd.protocol.types import VERSION, Message
from kvd.state import peer as machine
from kvd.state.peer import Effect, Event, State
from kvd.transport.interface import PeerAdded, PeerFailed, Transport
from kvd.transport.path import Kind, kind_of, why_slow

_log = structlog.get_logger("kvd.handshake")

_MISSED = 3
"""Heartbeats without an answer after which a peer is lost."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly however many there are: moments of heartbeats."""

_decode_spec = lru_cache(maxsize=16)(CacheSpec.decode)
"""The ranks of an engine, and its replicas, describe their pools alike; reading a description takes a millisecond."""


@dataclass(slots=True)
class _Peer:
    address: str
    link: int
    state: State = machine.TABLE.initial
    welcome: Welcome | None = None
    pools: dict[str, PeerPool] = field(default_factory=dict)
    path: str = ""
    slow: str | None = None
    """Why its path is slower than it should be."""
    heard: float = 0.0
    asked: float = 0.0
    """When it was last needed."""
    loss: str = ""
    pings: int = 0
    counted: Kind | None = None
    """Under which path the metrics count it."""
    counted_slow: bool = False


class _Beat(Struct, frozen=True, gc=False):
    """The heartbeat of one peer: each has its own moments, so that a thousand do not come at one."""

    link: int


class HandshakeActor(Actor):
    """See the module's text. A failure concerns one message of one peer: it is reported, and the others go on."""

    name = "handshake"
    on_failure = OnFailure.RESUME

    def __init__(self, house: House, port: PeerPort, transport: Transport, stamps: int) -> None:
        super().__init__(house.post)
        self._house = house
        self._port = port
        self._transport = transport
        self._metadata = transport.metadata
        self._stamps = stamps.to_bytes(8, "little")
        self._pools: dict[str, Pool] = {}
        self._peers: dict[str, _Peer] = {}
        self._by_link: dict[int, _Peer] = {}
        self._troubled: dict[int, _Peer] = {}
        """By link: those that are not ready, or slow."""
        self._expected: frozenset[str] = frozenset()

    # --- peers that we connect to -----------------------------------------------------------------------------------

    @handles(NeedPeer)
    def need(self, message: NeedPeer) -> None:
        """Makes a peer ready, or says at once that it is."""
        peer = self._peers.get(message.address)
        if peer is None:
            try:
                peer = self._open(message.address)
            except BadRequest as error:
                self._house.scheduler.tell(PeerDown(message.address, error.text))
                return
        now = self.loop.time()
        if peer.state is State.GREETING and peer.asked < peer.heard:
            peer.heard = now  # nobody has waited for it since it was lost: who does now gets three heartbeats
        peer.asked = now
        if message.stale:
            self._step(peer, Event.REFRESH)
        elif peer.state in (State.READY, State.REFRESHING):
            self._announce(peer)

    @handles(ExpectPeers)
    def expect(self, message: ExpectPeers) -> None:
        """Connects to daemons ahead of the first pull; one that cannot be met is logged, and met when it is needed."""
        now = self.loop.time()
        for address in sorted(message.addresses - self._expected):
            try:
                peer = self._peers.get(address) or self._open(address, at_once=False)
            except BadRequest as error:
                _log.warning("expected peer cannot be met", address=address, reason=error.text)
                continue
            peer.asked = now
        for address in self._expected - message.addresses:
            if address in self._peers:
                self._peers[address].asked = now
        self._expected = message.addresses

    def _open(self, address: str, *, at_once: bool = True) -> _Peer:
        """A new peer; where nobody waits for it, it is greeted at its first heartbeat."""
        if len(self._peers) >= limits.MAX_PEERS:
            raise BadRequest(ErrorCode.OVERLOADED, f"{limits.MAX_PEERS} peers are known, which is the bound")
        peer = _Peer(address, self._port.connect(address), heard=self.loop.time())
        self._peers[address] = peer
        self._by_link[peer.link] = self._troubled[peer.link] = peer
        self._house.metrics.peers.labels(peer.state).inc()
        if at_once:
            self._greet(peer)
        self.tell_later(self._house.settings.heartbeat * (peer.link * _GOLDEN % 1.0), _Beat(peer.link))
        return peer

    def _greet(self, peer: _Peer) -> None:
        settings = self._house.settings
        self._port.ask(peer.link, codec.encode(Hello(settings.daemon, settings.incarnation)))

    @handles(AskPeer)
    def ask(self, message: AskPeer) -> None:
        """Passes an ask of the scheduler on."""
        peer = self._peers.get(message.address)
        if peer is not None and peer.state is not State.CLOSED:
            peer.asked = self.loop.time()
            self._port.ask(peer.link, codec.encode(message.message))

    @handles(PeerAnswered)
    def answered(self, event: PeerAnswered) -> None:
        """One answer of a peer; garbage is counted and dropped."""
        peer = self._by_link.get(event.link)
        if peer is None:
            return
        try:
            reply = codec.peer_replies.decode(event.frame)
        except KvdError as error:
            self._house.metrics.refused.labels("peer", error.code).inc()
            return
        peer.heard = self.loop.time()
        if isinstance(reply, Grant | Held | Broken | Settled):
            self._house.scheduler.tell(PeerAnswers(peer.address, reply))
        elif isinstance(reply, Pong):
            if peer.welcome is not None and reply.incarnation != peer.welcome.incarnation:
                self._lose(peer, Event.RESTARTED, "it was restarted")
        elif isinstance(reply, Welcome):
            self._welcome(peer, reply)
        elif reply.claim == 0:
            self._lose(peer, Event.SILENT, f"it refused the handshake: {reply.text}")
        else:
            self._house.scheduler.tell(PeerAnswers(peer.address, reply))

    def _welcome(self, peer: _Peer, reply: Welcome) -> None:
        if peer.state not in (State.GREETING, State.REFRESHING):
            return
        if reply.version != VERSION:
            self._lose(peer, Event.SILENT, f"it speaks version {reply.version} of the protocol, we {VERSION}")
            return
        if peer.state is State.REFRESHING and peer.welcome and reply.incarnation != peer.welcome.incarnation:
            self._lose(peer, Event.RESTARTED, "it was restarted")
            return
        try:
            pools = {info.pool: _peer_pool(info) for info in reply.pools}
        except BadRequest as error:
            self._lose(peer, Event.SILENT, f"it described its pools wrongly: {error.text}")
            return
        peer.welcome, peer.pools = reply, pools
        self._step(peer, Event.WELCOME)

    @handles(PeerAdded)
    def added(self, event: PeerAdded) -> None:
        """The transport can reach the memory of a peer."""
        for peer in self._with_agent(event.agent):
            self._judge(peer, event.path)
            self._step(peer, Event.LOADED)

    def _judge(self, peer: _Peer, path: str) -> None:
        """Notes the path to a peer, and warns of a slow one the first time."""
        settings, welcome = self._house.settings, peer.welcome
        same_host = welcome is not None and bool(settings.host) and welcome.host == settings.host
        slow = why_slow(path, same_host=same_host, rdma_here=settings.rdma)
        if slow and not peer.slow:
            self._house.metrics.slow_paths.labels(kind_of(path)).inc()
            _log.warning("slow path", peer=peer.address, path=path, reason=slow)
        peer.path, peer.slow = path, slow
        self._count_path(peer)

    def _count_path(self, peer: _Peer) -> None:
        """Counts a peer under the path that it has now."""
        metrics, reached = self._house.metrics, peer.welcome is not None
        kind, slow = (kind_of(peer.path), bool(peer.slow)) if reached else (None, False)
        for counted, change in ((peer.counted, -1), (kind, +1)):
            if counted is not None:
                metrics.peer_paths.labels(counted).inc(change)
        metrics.peers_slow.inc(slow - peer.counted_slow)
        peer.counted, peer.counted_slow = kind, slow

    @handles(PeerFailed)
    def failed(self, event: PeerFailed) -> None:
        """The transport lost a peer, or never reached it."""
        for peer in self._with_agent(event.agent):
            self._lose(peer, Event.UNREACHABLE, f"the transport lost it: {event.reason}")

    def _with_agent(self, agent: str) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.welcome is not None and peer.welcome.agent == agent]

    @handles(_Beat)
    def beat(self, message: _Beat) -> None:
        """Pings a peer, or asks again where it has not said welcome; gives up on a silent one, offers to forget it."""
        peer = self._by_link.get(message.link)
        if peer is None:
            return
        settings, now = self._house.settings, self.loop.time()
        if now - peer.asked > settings.peer_idle and peer.address not in self._expected:
            self._house.scheduler.tell(PeerIdle(peer.address))
        if now - peer.heard > _MISSED * settings.heartbeat:
            peer.heard = now
            self._lose(peer, Event.SILENT, f"no answer for {_MISSED} heartbeats of {settings.heartbeat:g} s")
        elif peer.state in (State.GREETING, State.REFRESHING):
            self._greet(peer)
        else:
            peer.pings += 1
            self._port.ask(peer.link, codec.encode(Ping(peer.pings)))
        self.tell_later(settings.heartbeat, message)

    @handles(ForgetPeer)
    def forget(self, message: ForgetPeer) -> None:
        """Hangs up on a peer that nobody needs."""
        peer = self._peers.get(message.address)
        if peer is not None:
            self._step(peer, Event.CLOSE)

    # --- the machine's effects --------------------------------------------------------------------------------------

    def _lose(self, peer: _Peer, event: Event, reason: str) -> None:
        peer.loss = reason
        self._step(peer, event)

    def _step(self, peer: _Peer, event: Event) -> None:
        step = machine.TABLE.step(peer.state, event)
        if step.state is not peer.state:
            self._house.metrics.peers.labels(peer.state).dec()
            self._house.metrics.peers.labels(step.state).inc()
        peer.state = step.state
        if peer.state is State.READY and not peer.slow:
            self._troubled.pop(peer.link, None)
        elif peer.state is not State.CLOSED:
            self._troubled[peer.link] = peer
        for effect in step.effects:
            self._carry_out(effect, peer, event)

    def _carry_out(self, effect: Effect, peer: _Peer, event: Event) -> None:
        match effect:
            case Effect.GREET:
                self._greet(peer)
            case Effect.LOAD:
                assert peer.welcome is not None  # noqa: S101 - loading follows a welcome
                self._transport.add_peer(peer.welcome.agent, peer.welcome.metadata)
            case Effect.ANNOUNCE:
                self._announce(peer)
            case Effect.LOSE:
                self._house.metrics.peers_lost.inc()
                self._house.scheduler.tell(PeerDown(peer.address, peer.loss, event is Event.RESTARTED))
            case Effect.FORGET:
                assert peer.welcome is not None  # noqa: S101 - only a loaded peer is forgotten
                self._transport.remove_peer(peer.welcome.agent)
                peer.welcome = None
                self._count_path(peer)
            case Effect.HANG_UP:
                self._port.disconnect(peer.link)
                del self._peers[peer.address], self._by_link[peer.link]
                self._troubled.pop(peer.link, None)

    def _announce(self, peer: _Peer) -> None:
        welcome = peer.welcome
        assert welcome is not None  # noqa: S101 - only a loaded peer is announced
        stamps = int.from_bytes(welcome.stamps, "little")
        view = PeerView(peer.address, welcome.daemon, welcome.incarnation, welcome.agent, peer.pools, stamps)
        self._house.scheduler.tell(PeerUp(view))

    # --- peers that connect to us -----------------------------------------------------------------------------------

    @handles(PeerAsked)
    def asked(self, event: PeerAsked) -> None:
        """One ask of a peer; garbage gets a typed answer."""
        try:
            request = codec.peer_requests.decode(event.frame)
        except KvdError as error:
            self._house.metrics.refused.labels("peer", error.code).inc()
            self._port.answer(event.sender, codec.encode(Refuse(0, error.code, error.text[: limits.MAX_ERROR_TEXT])))
            return
        if isinstance(request, Claim | Renew | Fence | Settle | Release):
            self._house.leases.tell(PeerAsks(event.sender, request))
        elif isinstance(request, Ping):
            self._port.answer(event.sender, codec.encode(Pong(request.number, self._house.settings.incarnation)))
        else:
            self._port.answer(event.sender, codec.encode(self._reply_to_hello(request)))

    def _reply_to_hello(self, request: Hello) -> Message:
        settings = self._house.settings
        if request.version != VERSION:
            self._house.metrics.refused.labels("peer", ErrorCode.BAD_VERSION).inc()
            text = f"{settings.daemon} speaks version {VERSION} of the protocol, {request.daemon} {request.version}"
            return Refuse(0, ErrorCode.BAD_VERSION, text)
        pools = tuple(
            PoolInfo(pool.worker, pool.epoch, pool.base.to_bytes(8, "little"), pool.size, pool.raw_spec)
            for pool in self._pools.values()
        )
        return Welcome(
            settings.daemon,
            settings.incarnation,
            self._transport.agent,
            self._metadata,
            pools,
            host=settings.host,
            stamps=self._stamps,
        )

    @handles(AnswerPeer)
    def answer(self, message: AnswerPeer) -> None:
        """Passes an answer of the leases on."""
        self._port.answer(message.sender, codec.encode(message.message))

    # --- own pools, status ------------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Peers that say hello from now on hear of this pool."""
        self._pools[message.pool.worker] = message.pool
        self._metadata = message.metadata

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """Peers that say hello from now on do not hear of this pool any more."""
        self._pools.pop(message.pool.worker, None)

    @handles(Report)
    def report(self, message: Report) -> None:
        """Peers that we connect to: so many at most, those in trouble first."""
        now, everybody = self.loop.time(), self._peers.values()
        well = (peer for peer in everybody if peer.link not in self._troubled)
        content = [
            {
                "address": peer.address,
                "daemon": peer.welcome.daemon if peer.welcome else None,
                "incarnation": peer.welcome.incarnation if peer.welcome else None,
                "state": peer.state,
                "path": peer.path,
                "slow": peer.slow,
                "silent_seconds": round(now - peer.heard, 3),
                "last_loss": peer.loss,
            }
            for peer in islice(chain(self._troubled.values(), well), limits.MAX_REPORTED_PEERS)
        ]
        self._house.gateway.tell(Reported(message.token, self.name, content))


def _peer_pool(info: PoolInfo) -> PeerPool:
    spec = _decode_spec(info.spec)
    if spec.pool_bytes > info.size:
        text = f"pool {info.pool!r} has {info.size} bytes, its spec speaks of {spec.pool_bytes}"
        raise BadRequest(ErrorCode.BAD_SPEC, text)
    return PeerPool(info.epoch, int.from_bytes(info.base, "little"), info.size, spec)
