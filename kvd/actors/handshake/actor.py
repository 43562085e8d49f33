"""The handshake: the only actor that talks to other daemons. It learns who they are and whether they live.

For the peers that we connect to (we pull from them) it runs `kvd.state.peer`: hello, metadata into the transport, then
a ping every heartbeat. For the peers that connect to us (they pull from us) it answers hello and ping itself and
passes the rest to the leases.
"""

import structlog
from msgspec import Struct

from kvd import limits
from kvd.actors.gateway.messages import Reported
from kvd.actors.handshake.introductions import Introductions, SpeaksFor, SpecRead, check_welcome
from kvd.actors.handshake.messages import AskPeer, ExpectPeers, ForgetPeer, NeedPeer
from kvd.actors.handshake.peer import Peer
from kvd.actors.handshake.peer_server import PeerServer, Receiving
from kvd.actors.handshake.peers import Peers
from kvd.actors.handshake.priority_slots import PrioritySlots
from kvd.actors.runtime.actor import OnFailure, handles
from kvd.actors.runtime.background import Background
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.runtime.messages import PeerPool, Report
from kvd.actors.scheduler.messages import PeerDown, PeerIdle, PeerReply, PeerUp
from kvd.errors import BadRequest, ErrorCode, KvdError
from kvd.net.interface import PeerAnswered, PeerPort
from kvd.protocol import codec
from kvd.protocol.address import key_of
from kvd.protocol.peer import (
    Broken,
    Grant,
    Held,
    Hello,
    Pong,
    Settled,
    Welcome,
)
from kvd.protocol.types import VERSION
from kvd.state import peer as machine
from kvd.state.peer import Effect, Event, State
from kvd.transport.interface import PeerAdded, PeerFailed, Transport

_log = structlog.get_logger("kvd.handshake")

_MISSED = 3
"""Heartbeats without an answer after which a peer is lost."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly however many there are: moments of heartbeats."""

_PATIENCE = 0.1
"""Heartbeats that a hello waits for its answer before another peer gets its turn. Dead peers keep those that live from
being met for so long; an answer that comes later counts all the same."""

_LOADING = 30.0
"""Seconds that the transport may take to reach a peer: milliseconds, or a second where it tries it out first."""


class _Beat(Struct, frozen=True, gc=False):
    """The heartbeat of one peer: each has its own moments, so that a thousand do not come at one."""

    link: int


class _Unanswered(Struct, frozen=True, gc=False):
    """A hello, or the transport's attempt to reach the peer, got no answer while it was its peer's turn."""

    link: int


class HandshakeActor(Receiving):
    """See the module's text. A failure concerns one message of one peer: it is reported, and the others go on."""

    name = "handshake"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: PeerPort,
        transport: Transport,
        peer_server: PeerServer,
        *,
        background: Background,
        speaks_for: SpeaksFor,
    ) -> None:
        super().__init__(context.dispatcher, port, peer_server)
        self._context = context
        self._transport = transport
        self._speaks_for = speaks_for
        self._introductions = Introductions(background, self.tell, self._introduced)
        self._known = Peers()
        self._peers, self._by_link = self._known.by_address, self._known.by_link
        self._slots: PrioritySlots[int] = PrioritySlots(limits.MAX_HANDSHAKES)
        """By link: who is being greeted or loaded, and who waits for that."""
        self._answers_due: Deadlines[int] = Deadlines(context.loop, lambda link: self.tell(_Unanswered(link)))
        self._expected: frozenset[str] = frozenset()

    # --- peers that we connect to -----------------------------------------------------------------------------------

    @handles(NeedPeer)
    def need(self, message: NeedPeer) -> None:
        """Makes a peer ready, or says at once that it is."""
        peer = self._peers.get(message.address)
        if peer is None:
            try:
                peer = self._open(message.address, message.worker)
            except KvdError as error:
                self._context.scheduler.tell(PeerDown(message.address, error.text))
                return
        now = self.loop.time()
        if peer.state is State.GREETING and not peer.wanted:
            peer.heard = now  # nobody has waited for it since it was lost: who does now gets three heartbeats
        peer.asked = now
        if peer.avoided(now):
            text = f"{peer.loss}; it is greeted again in {peer.greeted_from - now:.0f} s"
            self._context.scheduler.tell(PeerDown(peer.address, text))
            return
        peer.wanted = True
        self._slots.hurry(peer.link, peer.worker)
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
            except KvdError as error:
                _log.warning("expected peer cannot be met", address=address, reason=error.text)
                continue
            peer.asked = now
        for address in self._expected - message.addresses:
            if address in self._peers:
                self._peers[address].asked = now
        self._expected = message.addresses

    def _open(self, address: str, worker: str = "", *, at_once: bool = True) -> Peer:
        """A new peer; where nobody waits for it, it is greeted at its first heartbeat."""
        self._known.check_room(worker)
        peer = Peer(address, self._port.connect(address), heard=self.loop.time(), wanted=at_once, worker=worker)
        self._known.add(peer)
        self._context.metrics.peers.labels(peer.state).inc()
        if at_once:
            self._take_turn(peer)
        self.tell_later(self._context.settings.heartbeat * (peer.link * _GOLDEN % 1.0), _Beat(peer.link))
        return peer

    # --- whose turn it is -----------------------------------------------------------------------------------------

    def _take_turn(self, peer: Peer) -> None:
        """Goes on with a handshake, now or when it is its turn: those first that a pull waits for."""
        if peer.state is State.GREETING and self.loop.time() < peer.greeted_from:
            return  # by a later heartbeat
        if self._slots.enter(peer.link, urgent=peer.wanted, owner=peer.worker):
            self._go_on(peer)

    def _go_on(self, peer: Peer) -> None:
        """It is the turn of `peer`: what its state asks for."""
        settings = self._context.settings
        if peer.state is State.LOADING:
            assert peer.welcome is not None  # noqa: S101 - loading follows a welcome
            self._answers_due.set(peer.link, self.loop.time() + _LOADING)
            self._transport.add_peer(peer.welcome.agent, peer.welcome.metadata)
        else:
            self._answers_due.set(peer.link, self.loop.time() + _PATIENCE * settings.heartbeat)
            self._port.ask(peer.link, codec.encode(Hello(settings.daemon, settings.incarnation)))

    def _end_turn(self, peer: Peer) -> None:
        """The next ones, please."""
        self._answers_due.unset(peer.link)
        self._slots.leave(peer.link)
        while (link := self._slots.next()) is not None:
            self._go_on(self._by_link[link])

    @handles(_Unanswered)
    def unanswered(self, message: _Unanswered) -> None:
        """Others get their turn; this one is asked again by its next heartbeat, or greeted anew."""
        peer = self._by_link.get(message.link)
        if peer is not None and peer.state is State.LOADING:
            self._lose(peer, Event.SILENT, f"the transport has not reached it within {_LOADING:g} s")
        elif peer is not None:
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
            self._context.metrics.refused.labels("peer", error.code).inc()
            return
        peer.heard = self.loop.time()
        if isinstance(reply, Grant | Held | Broken | Settled):
            self._context.scheduler.tell(PeerReply(peer.address, reply))
        elif isinstance(reply, Pong):
            if peer.restarted(reply):
                self._lose(peer, Event.RESTARTED, "it was restarted")
        elif isinstance(reply, Welcome):
            self._welcome(peer, reply)
        elif reply.claim == 0:
            self._lose(peer, Event.SILENT, f"it refused the handshake: {reply.text}")
        else:
            self._context.scheduler.tell(PeerReply(peer.address, reply))

    def _welcome(self, peer: Peer, reply: Welcome) -> None:
        if peer.state not in (State.GREETING, State.REFRESHING) or peer.link in self._introductions:
            return
        if reply.version != VERSION:
            self._lose(peer, Event.SILENT, f"it speaks version {reply.version} of the protocol, we {VERSION}")
            return
        known = peer.welcome if peer.agent else None
        if known is not None and (reply.incarnation, reply.agent) != (known.incarnation, known.agent):
            self._lose(peer, Event.RESTARTED, "it was restarted")
            return
        try:
            check_welcome(reply, key_of(peer.address), self._speaks_for)
        except KvdError as error:
            self._misspoke(peer, error)
        else:
            self._introductions.read(peer.link, reply)

    @handles(SpecRead)
    def spec_read(self, message: SpecRead) -> None:
        """A part of a welcome is read."""
        self._introductions.take(message)

    def _introduced(self, link: int, welcome: Welcome, pools: dict[str, PeerPool] | KvdError) -> None:
        """All of a welcome is read, whose peer is still greeted or asked again."""
        peer = self._by_link[link]
        if isinstance(pools, KvdError):
            self._misspoke(peer, pools)
        elif self._agrees(peer, welcome):
            peer.welcome, peer.pools = welcome, pools
            self._answers_due.unset(link)
            self._step(peer, Event.WELCOME)
            self._greet_early(peer)

    def _misspoke(self, peer: Peer, error: KvdError) -> None:
        self._context.metrics.refused.labels("peer", error.code).inc()
        self._lose(peer, Event.SILENT, f"it described itself wrongly: {error.text}")

    def _agrees(self, peer: Peer, welcome: Welcome) -> bool:
        """Whether nobody who came before speaks otherwise of this agent.

        Two links may lead to one daemon, by two spellings of its address. The first one speaks for its agent: what is
        told over the other is the same, or comes too early (the first is asked again, then the other), or is another
        daemon's word.
        """
        first = min(self._known.using(welcome.agent), key=lambda user: user.link, default=peer)
        if first.link >= peer.link or first.welcome == welcome:
            return True
        if key_of(first.address) != key_of(peer.address):
            taken = f"the agent {welcome.agent!r} is that of {first.address}"
            self._misspoke(peer, BadRequest(ErrorCode.NOT_PERMITTED, taken))
        else:
            first.early.add(peer.link)
            self._step(first, Event.REFRESH)
        return False

    def _greet_early(self, first: Peer) -> None:
        """Asks those again, at once, that had been told more than the first link to their daemon."""
        links, first.early = first.early, set()
        for peer in map(self._by_link.get, links):
            if peer is not None and peer.state in (State.GREETING, State.REFRESHING):
                self._take_turn(peer)

    @handles(PeerAdded)
    def added(self, event: PeerAdded) -> None:
        """The transport can reach the memory of a peer."""
        for peer in self._known.using(event.agent):
            peer.reached_by(event.path, self._context)
            self._step(peer, Event.LOADED)

    @handles(PeerFailed)
    def failed(self, event: PeerFailed) -> None:
        """The transport lost a peer, or never reached it."""
        for peer in self._known.using(event.agent):
            peer.failed(self.loop.time(), self._context.settings.heartbeat)
            self._lose(peer, Event.UNREACHABLE, f"the transport lost it: {event.reason}")

    @handles(_Beat)
    def beat(self, message: _Beat) -> None:
        """Pings a peer, or asks again where it has not said welcome; gives up on a silent one, offers to forget it."""
        peer = self._by_link.get(message.link)
        if peer is None:
            return
        settings, now = self._context.settings, self.loop.time()
        if now - peer.asked > settings.peer_idle and peer.address not in self._expected:
            self._context.scheduler.tell(PeerIdle(peer.address))
        if now < peer.greeted_from:
            peer.heard = now  # it was not asked
        if now - peer.heard > _MISSED * settings.heartbeat:
            peer.heard = now
            self._lose(peer, Event.SILENT, f"no answer for {_MISSED} heartbeats of {settings.heartbeat:g} s")
            if not peer.met and peer.address not in self._expected:
                self._context.scheduler.tell(PeerIdle(peer.address))  # perhaps nobody has ever been there
        elif peer.state in (State.GREETING, State.REFRESHING):
            self._take_turn(peer)
        else:
            self._port.ask(peer.link, codec.encode(peer.ping()))
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
            self._context.metrics.peers.labels(peer.state).dec()
            self._context.metrics.peers.labels(step.state).inc()
        peer.state = step.state
        self._known.entered(peer)
        if event not in (Event.WELCOME, Event.REFRESH):
            self._introductions.forget(peer.link)
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
                self._context.metrics.peers_lost.inc()
                self._context.scheduler.tell(PeerDown(peer.address, peer.loss, event is Event.RESTARTED))
            case Effect.FORGET:
                assert peer.welcome is not None  # noqa: S101 - only a loaded peer is forgotten
                if not any(user is not peer for user in self._known.using(peer.welcome.agent)):
                    self._transport.remove_peer(peer.welcome.agent)
                peer.forgotten(self._context)
            case Effect.HANG_UP:
                self._port.disconnect(peer.link)
                self._known.remove(peer)
                self._slots.forget(peer.link)

    def _announce(self, peer: Peer) -> None:
        peer.wanted, peer.met = False, True
        self._context.scheduler.tell(PeerUp(peer.view()))

    # --- status -----------------------------------------------------------------------------------------------------

    @handles(Report)
    def report(self, message: Report) -> None:
        """Peers that we connect to: so many at most, those in trouble first."""
        content = self._known.reports(self.loop.time())
        self._context.gateway.tell(Reported(message.token, self.name, content))
