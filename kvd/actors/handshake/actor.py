"""The handshake: finds out who other daemons are and whether they live.

For the peers that we connect to (we pull from them) it runs the table of `peer_table`: hello, metadata into the
transport, then a ping every heartbeat. Peers that connect to us (they pull from us) are answered by its `PeerServer`.
"""

from collections.abc import Callable

from kvd import limits
from kvd.actors.handshake.introductions import Introductions, SpeaksFor, check_welcome
from kvd.actors.handshake.peer import MISSED_BEATS, Peer
from kvd.actors.handshake.peer_table import TABLE, Effect, Event, State
from kvd.actors.handshake.peers import Connector, PeerListener, Peers
from kvd.actors.runtime.actor import Actor, Background, OnFailure
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Deadlines
from kvd.actors.runtime.pools import PeerPool
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.interface import PeerPort
from kvd.net.priority_slots import PrioritySlots
from kvd.protocol import codec
from kvd.protocol.address import key_of
from kvd.protocol.peer import Hello, Pong, Refuse, Welcome
from kvd.protocol.status import PeerStatus
from kvd.protocol.types import VERSION
from kvd.transport.interface import PeerAdded, PeerFailed, Transport
from kvd.units import printable

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly however many there are: it staggers the peers' heartbeats."""

_PATIENCE = 0.1
"""Heartbeats that a hello waits for its answer before the next peer gets the slot: dead peers must not keep live ones
waiting. An answer that comes later counts all the same."""

_LOADING = 30.0
"""Seconds that the transport may take to reach a peer. It takes milliseconds, or a second if it probes the peer."""


class HandshakeActor(Actor):
    """See the module's text. A failure concerns one message of one peer: it is reported, and the others go on."""

    name = "handshake"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: PeerPort,
        transport: Transport,
        peers: Peers,
        *,
        listener: PeerListener,
        background: Background,
        speaks_for: SpeaksFor,
        user_of: Callable[[str], int],
    ) -> None:
        super().__init__(context.dispatcher)
        self._context = context
        self._port = port
        self._transport = transport
        self._speaks_for = speaks_for
        self._introductions = Introductions(background, self, self._introduced)
        self._peers = peers
        self._listener = listener
        self._slots: PrioritySlots[int] = PrioritySlots(limits.MAX_HANDSHAKES, limits.MAX_HANDSHAKES_PER_KEY)
        """Links whose peer is being greeted or loaded, and those that wait for that."""
        self._answers_due: Deadlines[int] = Deadlines(
            context.loop, lambda link: self.call(self._unanswered, link), for_others=True
        )
        self.connector = Connector(
            self,
            context,
            port,
            peers,
            listener,
            opened=self._opened,
            met=lambda address, worker: self.need(address, worker=worker),
            user_of=user_of,
        )
        self._given: dict[str, tuple[Welcome, dict[str, PeerPool]]] = {}
        """What was last told of each agent whose metadata the transport was given."""

    # --- peers that we connect to -----------------------------------------------------------------------------------

    def need(self, address: str, *, worker: str, stale: bool = False) -> None:
        """Makes the peer ready that a pull of `worker` needs; says so at once if it is.

        The listener's `up`, `down` or `refused` follows. `stale` is set if its pools have changed.
        """
        peer = self._peers.by_address.get(address)
        if peer is None:
            self.connector.need(address, worker)
            return
        now = self.loop.time()
        if peer.state is State.GREETING and not peer.wanted_by:
            peer.missed = 0  # no pull has waited since it was lost; this one may wait three heartbeats
        peer.needed = now
        if peer.avoided(now, self._context.settings.heartbeat):
            text = f"{peer.loss}; it is greeted again in {peer.greeted_from - now:.0f} s"
            self._listener.down(peer.address, text, restarted=False)
            return
        peer.wanted_by[worker] = None
        self._slots.hurry(peer.link, worker)
        self._port.hurry(peer.link, worker)
        if stale:
            self._step(peer, Event.REFRESH)
        elif peer.state is State.READY:  # one that is being refreshed is announced with its new pools
            self._announce(peer)

    def worker_left(self, worker: str) -> None:
        """Its pool is gone, and its pulls: what they waited for is met in others' turns, or when there is time."""
        self.connector.worker_left(worker)
        for peer in self._peers.by_link.values():
            peer.wanted_by.pop(worker, None)
        self._slots.release(worker)

    def _opened(self, peer: Peer) -> None:
        """A new peer is greeted at once if a pull waits for it, else at its first heartbeat."""
        if peer.wanted_by:
            self._take_slot(peer)
        self.later(self._context.settings.heartbeat * (peer.link * _GOLDEN % 1.0), self._beat, peer.link)

    # --- slots: how many handshakes run at once ---------------------------------------------------------------------

    def _take_slot(self, peer: Peer) -> None:
        """Continues a handshake, now or when a slot is free: peers that pulls wait for first, workers in turn."""
        if peer.state is State.GREETING and self.loop.time() < peer.greeted_from:
            return  # a later heartbeat greets it
        if self._slots.enter(peer.link, peer.wanted_by, key_of(peer.address)):
            self._go_on(peer)

    def _go_on(self, peer: Peer) -> None:
        """Does what the state of `peer` asks for."""
        settings = self._context.settings
        if peer.state is State.LOADING:
            assert peer.welcome is not None  # noqa: S101 - loading follows a welcome
            self._given[peer.welcome.agent] = peer.welcome, peer.pools
            self._peers.given(peer.welcome)
            self._answers_due.set(peer.link, self.loop.time() + _LOADING)
            self._transport.add_peer(peer.welcome.agent, peer.welcome.metadata, peer.address)
        else:
            self._answers_due.set(peer.link, self.loop.time() + _PATIENCE * settings.heartbeat)
            hello = Hello(settings.daemon, settings.incarnation, host=settings.host)
            say = self._port.greet if peer.state is State.GREETING else self._port.ask
            say(peer.link, codec.encode(hello))
            peer.is_heeded = peer.is_greeted = True

    def _free_slot(self, peer: Peer) -> None:
        """Frees the slot of `peer` for the next ones."""
        self._answers_due.unset(peer.link)
        self._slots.leave(peer.link)
        while (link := self._slots.next()) is not None:
            self._go_on(self._peers.by_link[link])

    def _unanswered(self, link: int) -> None:
        """A slot has been held for too long: a hello is sent again by the next heartbeat, a load is given up."""
        if link in self._answers_due:
            return  # the answer came while this call waited, and the slot has a new deadline
        if (peer := self._peers.by_link.get(link)) is None:
            return
        if peer.state is State.LOADING:
            self._lose(peer, Event.SILENT, f"the transport has not reached it within {_LOADING:g} s")
        else:
            self._free_slot(peer)

    # --- what peers answer ------------------------------------------------------------------------------------------

    def replied(self, link: int, reply: Welcome | Pong | Refuse) -> None:
        """A peer that we connected to says who it is, that it lives, or that it refuses us."""
        peer = self._peers.by_link.get(link)
        if peer is None:
            return
        if isinstance(reply, Pong):
            self._ponged(peer, reply)
        elif peer.is_heeded:  # else it would have us work as fast as it sends
            peer.is_heeded = False
            if isinstance(reply, Welcome):
                self._welcome(peer, reply)
            else:
                text = f"it refused the handshake: {printable(reply.text)}"
                self._lose(peer, Event.SILENT, text, noted=reply.code == ErrorCode.TRANSPORT)

    def _ponged(self, peer: Peer, reply: Pong) -> None:
        event = peer.answered(reply, self.loop.time(), self._context.settings.heartbeat)
        if event is Event.RESTARTED:
            self._lose(peer, event, "it was restarted")
        elif event is not None:
            self.failed(PeerFailed(peer.agent, "its transport to other hosts was started again"))

    def _welcome(self, peer: Peer, reply: Welcome) -> None:
        if not peer.awaits(reply, self.loop.time()) or peer.link in self._introductions:
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
            self._introductions.read(peer.link, reply, key_of(peer.address) or peer.address)

    def _introduced(self, link: int, welcome: Welcome, pools: dict[str, PeerPool] | KvdError) -> None:
        """All specs of a welcome are read, or one is wrong; the peer is still being greeted or refreshed."""
        peer = self._peers.by_link[link]
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
        """Whether the first link to this agent was told the same.

        Two links may lead to one daemon, by two spellings of its address. The first one speaks for its agent: what the
        other is told is the same, or newer (then the first is refreshed, and after it the other), or another daemon's.
        """
        first = min(self._peers.using(welcome.agent), key=lambda user: user.link, default=peer)
        if first.link >= peer.link or first.welcome == welcome:
            return True
        if key_of(first.address) != key_of(peer.address):
            text = f"the agent {welcome.agent!r} is that of {first.address}"
            self._misspoke(peer, refusal(ErrorCode.NOT_PERMITTED, text))
        else:
            first.early.add(peer.link)
            self._step(first, Event.REFRESH)
        return False

    def _greet_early(self, first: Peer) -> None:
        """Greets at once the peers whose links had been told more than the first link to their daemon."""
        links, first.early = first.early, set()
        for peer in map(self._peers.by_link.get, links):
            if peer is not None and peer.state in (State.GREETING, State.REFRESHING):
                self._take_slot(peer)

    def added(self, event: PeerAdded) -> None:
        """The transport can reach the memory of a peer: that which `event.metadata` tells of, and no other.

        What another link to the same daemon was told before has been replaced in the transport.
        """
        welcome, pools = self._given.get(event.agent, (None, {}))
        if welcome is None or welcome.metadata != event.metadata:
            return  # it was removed meanwhile, or the answer to newer metadata is on its way
        for peer in [peer for peer in self._peers.using(event.agent) if not self._is_newer(peer, event)]:
            if peer.state is State.LOADING and peer.metadata != event.metadata:
                peer.welcome, peer.pools = welcome, pools
            peer.reached_by(event, self._context)
            self._step(peer, Event.LOADED)

    def _is_newer(self, peer: Peer, event: PeerAdded) -> bool:
        """Whether a peer waits to give the transport other metadata than this answer is about."""
        return peer.state is State.LOADING and peer.metadata != event.metadata and peer.link not in self._slots

    def failed(self, event: PeerFailed) -> None:
        """The transport lost a peer, or never reached it; it also forgets what it was given of it since."""
        for peer in self._peers.using(event.agent):
            peer.failed(self.loop.time(), self._context.settings.heartbeat)
            text = f"the transport lost it: {event.reason}"
            # once is no more than a daemon that was restarted
            self._lose(peer, Event.UNREACHABLE, text, noted=peer.failures > 1)
        self._given.pop(event.agent, None)
        self._transport.remove_peer(event.agent)

    def _beat(self, link: int) -> None:
        """A peer's heartbeat: pings or greets it, gives up on it if it is silent, offers to forget it if it is idle."""
        peer = self._peers.by_link.get(link)
        if peer is None:
            return
        settings, now = self._context.settings, self.loop.time()
        if now - peer.needed > settings.peer_idle and peer.address not in self.connector.expected:
            self._listener.idle(peer.address, peer.announced)
        waits = peer.state is State.GREETING and not peer.is_greeted and self._slots.waits(peer.link)
        if peer.beat(now, waits=waits):
            silent = f"no answer for {MISSED_BEATS} heartbeats of {settings.heartbeat:g} s"
            text = self._port.trouble(peer.link) or silent
            self._lose(peer, Event.SILENT, self._context.with_reason(text, MISSED_BEATS * settings.heartbeat))
            if not peer.announced and peer.address not in self.connector.expected:
                self._listener.idle(peer.address, peer.announced)  # perhaps no daemon was ever there
        elif peer.state in (State.GREETING, State.REFRESHING):
            self._take_slot(peer)
            if peer.state is State.REFRESHING and self._slots.waits(link):
                self._ping(peer)  # else it is taken for silent, and reads from it end, while it waits behind others
        else:
            self._ping(peer)
        self.later(settings.heartbeat, self._beat, link)

    def _ping(self, peer: Peer) -> None:
        self._port.ask(peer.link, codec.encode(peer.ping()))
        peer.is_heeded = True  # it refuses the requests, too, that it cannot read

    def forget(self, address: str, announced: int) -> None:
        """Hangs up on a peer that no pull needs; one that needs it later calls `need` first.

        `announced` is that of the listener's `idle`, which this answers: if the peer has been announced again
        meanwhile, the scheduler does not know that yet.
        """
        peer = self._peers.by_address.get(address)
        if peer is not None and peer.announced == announced:
            self._step(peer, Event.CLOSE)

    # --- the machine's effects --------------------------------------------------------------------------------------

    def _lose(self, peer: Peer, event: Event, reason: str, *, noted: bool = False) -> None:
        """`noted`: messages reach it, and its memory has not been reached for long enough to say so."""
        peer.loss = reason
        self._step(peer, event)
        if noted:
            peer.note_unreached(self.loop.time(), self._context)
        elif event is not Event.UNREACHABLE:
            peer.unnote(self._context)

    def _step(self, peer: Peer, event: Event) -> None:
        step = TABLE.step(peer.state, event)
        peer.enter(step.state, self._context)
        self._peers.entered(peer)
        if event not in (Event.WELCOME, Event.REFRESH):
            self._introductions.forget(peer.link)
            self._free_slot(peer)
        for effect in step.effects:
            self._carry_out(effect, peer, event)

    def _carry_out(self, effect: Effect, peer: Peer, event: Event) -> None:
        match effect:
            case Effect.GREET | Effect.LOAD:
                if event is not Event.REFRESH or peer.is_refreshed_at_once():
                    self._take_slot(peer)
            case Effect.ANNOUNCE:
                self._announce(peer)
            case Effect.LOSE:
                peer.wanted_by.clear()
                peer.is_greeted = False
                self._context.metrics.peers_lost.inc()
                self._listener.down(peer.address, peer.loss, restarted=event is Event.RESTARTED)
            case Effect.FORGET:
                assert peer.welcome is not None  # noqa: S101 - only a loaded peer is forgotten
                if not any(user is not peer for user in self._peers.using(peer.welcome.agent)):
                    self._transport.remove_peer(peer.welcome.agent)
                    self._given.pop(peer.welcome.agent, None)
                peer.forgotten()
            case Effect.HANG_UP:
                peer.unnote(self._context)
                self._port.disconnect(peer.link)
                self._peers.remove(peer)
                self._slots.forget(peer.link)

    def _announce(self, peer: Peer) -> None:
        peer.wanted_by.clear()
        peer.announced += 1
        self._listener.up(peer.view())

    # --- status -----------------------------------------------------------------------------------------------------

    def report(self) -> list[PeerStatus]:
        """The peers that we connect to, a bounded number, those in trouble first: its part of a status."""
        return self._peers.reports(self.loop.time())
