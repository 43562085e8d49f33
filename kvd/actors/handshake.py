"""The handshake: the only actor that talks to other daemons. It learns who they are and whether they live.

For the peers that we connect to (we pull from them) it runs `kvd.state.peer`: hello, metadata into the transport, then
a ping every heartbeat. For the peers that connect to us (they pull from us) it answers hello and ping itself and
passes the rest to the leases.
"""

from itertools import chain, islice

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.actor import Actor, OnFailure, handles
from kvd.actors.expiry import Expiry
from kvd.actors.house import House
from kvd.actors.messages import (
    AnswerPeer,
    AskPeer,
    ExpectPeers,
    ForgetPeer,
    NeedPeer,
    PeerAnswers,
    PeerDown,
    PeerIdle,
    PeerUp,
    PoolDown,
    PoolUp,
    Report,
    Reported,
    RightsChanged,
)
from kvd.actors.peer import Peer
from kvd.actors.reception import Reception, Rights
from kvd.actors.turns import Turns
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.net.interface import PeerAnswered, PeerAsked, PeerPort
from kvd.protocol import codec
from kvd.protocol.peer import (
    Broken,
    Grant,
    Held,
    Hello,
    Ping,
    Pong,
    Settled,
    Welcome,
)
from kvd.protocol.types import VERSION
from kvd.state import peer as machine
from kvd.state.peer import Effect, Event, State
from kvd.transport.interface import Described, PeerAdded, PeerFailed, Transport

_log = structlog.get_logger("kvd.handshake")

_MISSED = 3
"""Heartbeats without an answer after which a peer is lost."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly however many there are: moments of heartbeats."""

_PATIENCE = 0.1
"""Heartbeats that a hello waits for its answer before another peer gets its turn. Dead peers keep those that live from
being met for so long; an answer that comes later counts all the same."""


class _Beat(Struct, frozen=True, gc=False):
    """The heartbeat of one peer: each has its own moments, so that a thousand do not come at one."""

    link: int


class _Unanswered(Struct, frozen=True, gc=False):
    """A hello got no answer while it was its peer's turn."""

    link: int


class HandshakeActor(Actor):
    """See the module's text. A failure concerns one message of one peer: it is reported, and the others go on."""

    name = "handshake"
    on_failure = OnFailure.RESUME

    def __init__(self, house: House, port: PeerPort, transport: Transport, stamps: int, rights: Rights) -> None:
        super().__init__(house.post)
        self._house = house
        self._port = port
        self._transport = transport
        self._reception = Reception(house, port, transport, stamps, rights)
        self._peers: dict[str, Peer] = {}
        self._by_link: dict[int, Peer] = {}
        self._turns: Turns[int] = Turns(limits.MAX_HANDSHAKES)
        """By link: who is being greeted or loaded, and who waits for that."""
        self._answers_due: Expiry[int] = Expiry(house.loop, lambda link: self.tell(_Unanswered(link)))
        self._troubled: dict[int, Peer] = {}
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
        if peer.state is State.GREETING and not peer.wanted:
            peer.heard = now  # nobody has waited for it since it was lost: who does now gets three heartbeats
        peer.asked, peer.wanted = now, True
        self._turns.hurry(peer.link)
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

    def _open(self, address: str, *, at_once: bool = True) -> Peer:
        """A new peer; where nobody waits for it, it is greeted at its first heartbeat."""
        if len(self._peers) >= limits.MAX_PEERS:
            raise BadRequest(ErrorCode.OVERLOADED, f"{limits.MAX_PEERS} peers are known, which is the bound")
        peer = Peer(address, self._port.connect(address), heard=self.loop.time(), wanted=at_once)
        self._peers[address] = peer
        self._by_link[peer.link] = self._troubled[peer.link] = peer
        self._house.metrics.peers.labels(peer.state).inc()
        if at_once:
            self._take_turn(peer)
        self.tell_later(self._house.settings.heartbeat * (peer.link * _GOLDEN % 1.0), _Beat(peer.link))
        return peer

    # --- whose turn it is -----------------------------------------------------------------------------------------

    def _take_turn(self, peer: Peer) -> None:
        """Goes on with a handshake, now or when it is its turn: those first that a pull waits for."""
        if self._turns.enter(peer.link, urgent=peer.wanted):
            self._go_on(peer)

    def _go_on(self, peer: Peer) -> None:
        """It is the turn of `peer`: what its state asks for."""
        settings = self._house.settings
        if peer.state is State.LOADING:
            assert peer.welcome is not None  # noqa: S101 - loading follows a welcome
            self._transport.add_peer(peer.welcome.agent, peer.welcome.metadata)
        else:
            self._answers_due.set(peer.link, self.loop.time() + _PATIENCE * settings.heartbeat)
            self._port.ask(peer.link, codec.encode(Hello(settings.daemon, settings.incarnation)))

    def _end_turn(self, peer: Peer) -> None:
        """The next ones, please."""
        self._answers_due.unset(peer.link)
        self._turns.leave(peer.link)
        while (link := self._turns.next()) is not None:
            self._go_on(self._by_link[link])

    @handles(_Unanswered)
    def unanswered(self, message: _Unanswered) -> None:
        """Others get their turn; this one is asked again by its next heartbeat."""
        peer = self._by_link.get(message.link)
        if peer is not None and peer.state is not State.LOADING:
            self._end_turn(peer)

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

    def _welcome(self, peer: Peer, reply: Welcome) -> None:
        if peer.state not in (State.GREETING, State.REFRESHING):
            return
        if reply.version != VERSION:
            self._lose(peer, Event.SILENT, f"it speaks version {reply.version} of the protocol, we {VERSION}")
            return
        if peer.state is State.REFRESHING and peer.welcome and reply.incarnation != peer.welcome.incarnation:
            self._lose(peer, Event.RESTARTED, "it was restarted")
            return
        try:
            peer.introduced(reply)
        except BadRequest as error:
            self._lose(peer, Event.SILENT, f"it described its pools wrongly: {error.text}")
            return
        self._answers_due.unset(peer.link)
        self._step(peer, Event.WELCOME)

    @handles(PeerAdded)
    def added(self, event: PeerAdded) -> None:
        """The transport can reach the memory of a peer."""
        for peer in self._with_agent(event.agent):
            peer.reached_by(event.path, self._house)
            self._step(peer, Event.LOADED)

    @handles(PeerFailed)
    def failed(self, event: PeerFailed) -> None:
        """The transport lost a peer, or never reached it."""
        for peer in self._with_agent(event.agent):
            self._lose(peer, Event.UNREACHABLE, f"the transport lost it: {event.reason}")

    def _with_agent(self, agent: str) -> list[Peer]:
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
            self._take_turn(peer)
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

    def _lose(self, peer: Peer, event: Event, reason: str) -> None:
        peer.loss = reason
        self._step(peer, event)

    def _step(self, peer: Peer, event: Event) -> None:
        step = machine.TABLE.step(peer.state, event)
        if step.state is not peer.state:
            self._house.metrics.peers.labels(peer.state).dec()
            self._house.metrics.peers.labels(step.state).inc()
        peer.state = step.state
        if peer.state is State.READY and not peer.slow:
            self._troubled.pop(peer.link, None)
        elif peer.state is not State.CLOSED:
            self._troubled[peer.link] = peer
        if event not in (Event.WELCOME, Event.REFRESH):
            self._end_turn(peer)
        for effect in step.effects:
            self._carry_out(effect, peer, event)

    def _carry_out(self, effect: Effect, peer: Peer, event: Event) -> None:
        match effect:
            case Effect.GREET | Effect.LOAD:
                self._take_turn(peer)
            case Effect.ANNOUNCE:
                self._announce(peer)
            case Effect.LOSE:
                peer.wanted = False
                self._house.metrics.peers_lost.inc()
                self._house.scheduler.tell(PeerDown(peer.address, peer.loss, event is Event.RESTARTED))
            case Effect.FORGET:
                assert peer.welcome is not None  # noqa: S101 - only a loaded peer is forgotten
                self._transport.remove_peer(peer.welcome.agent)
                peer.forgotten(self._house)
            case Effect.HANG_UP:
                self._port.disconnect(peer.link)
                del self._peers[peer.address], self._by_link[peer.link]
                self._troubled.pop(peer.link, None)
                self._turns.forget(peer.link)

    def _announce(self, peer: Peer) -> None:
        peer.wanted = False
        self._house.scheduler.tell(PeerUp(peer.view()))

    # --- peers that connect to us -----------------------------------------------------------------------------------

    @handles(PeerAsked)
    def asked(self, event: PeerAsked) -> None:
        """One ask of a peer."""
        self._reception.asked(event)

    @handles(AnswerPeer)
    def answer(self, message: AnswerPeer) -> None:
        """Passes an answer of the leases on."""
        self._port.answer(message.sender, codec.encode(message.message))

    # --- own pools, status ------------------------------------------------------------------------------------------

    @handles(PoolUp)
    def pool_up(self, message: PoolUp) -> None:
        """Peers that say hello from now on hear of this pool."""
        self._reception.pool_up(message.pool, message.metadata)

    @handles(PoolDown)
    def pool_down(self, message: PoolDown) -> None:
        """Peers that say hello from now on do not hear of this pool any more."""
        self._reception.pool_down(message.pool)

    @handles(RightsChanged)
    def rights_changed(self, _message: RightsChanged) -> None:
        """Another allow-list holds."""
        self._reception.rights_changed()

    @handles(Described)
    def described(self, event: Described) -> None:
        """Metadata of some of the pools."""
        self._reception.described(event)

    @handles(Report)
    def report(self, message: Report) -> None:
        """Peers that we connect to: so many at most, those in trouble first."""
        now, everybody = self.loop.time(), self._peers.values()
        well = (peer for peer in everybody if peer.link not in self._troubled)
        told = islice(chain(self._troubled.values(), well), limits.MAX_REPORTED_PEERS)
        content = [peer.report(now) for peer in told]
        self._house.gateway.tell(Reported(message.token, self.name, content))
