"""Builds the six actors and routes the events of sockets and transport to them.

The daemon and the simulator use the same wiring; they differ in what they hand in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.completion.actor import CompletionActor, Sessions
from kvd.actors.gateway.actor import GatewayActor, PeerFrames
from kvd.actors.gateway.admission import Policy
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.introductions import SpeaksFor, anybody
from kvd.actors.handshake.peer_server import PeerServer, Rights, everything
from kvd.actors.handshake.peers import PeerChannel, PeerListener, Peers
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.pools.requests import Workers
from kvd.actors.runtime.actor import Actor, Background, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.memory.interface import MemoryProvider, NoStore, PoolStore
from kvd.memory.stamps import StampMemory, Stamps
from kvd.net.interface import PeerPort, WorkerPort
from kvd.protocol.status import ProcessStatus
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    NetworkDown,
    NetworkUp,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    Registered,
    RegisterFailed,
    Transport,
    TransportDied,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The concrete parts of one daemon. `draw_session` draws 16 unguessable bytes; `describe` opens a status."""

    worker_port: WorkerPort
    peer_port: PeerPort
    transport: Transport
    provider: MemoryProvider
    background: Background
    pool_background: Background
    """For the memory of pools, which takes seconds: nothing else waits behind it."""
    draw_session: Callable[[], bytes]
    describe: Callable[[], ProcessStatus]
    transport_died: Callable[[str], None]
    policy: Policy
    stamps: StampMemory
    transport_answered: Callable[[int], None] = lambda _number: None
    rights: Rights = everything
    speaks_for: SpeaksFor = anybody
    store: PoolStore = field(default_factory=NoStore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The six actors of a daemon."""

    gateway: GatewayActor
    pools: PoolsActor
    handshake: HandshakeActor
    peer_server: PeerServer
    """The handshake's half for peers that connect to us."""
    leases: LeasesActor
    scheduler: SchedulerActor
    completion: CompletionActor
    channel: PeerChannel
    sessions: Sessions

    @property
    def all(self) -> tuple[Actor, ...]:
        """In the order in which requests pass them."""
        return (self.gateway, self.pools, self.handshake, self.leases, self.scheduler, self.completion)


def build_actors(context: ActorContext, dependencies: Dependencies) -> Actors:
    """Makes the actors, then starts the transport, then the sockets: whoever connects finds everything ready.

    An actor is given those below it, whom it calls by name, and callables for what it tells those above it: all of
    these are here.
    """
    transport, worker_port, peer_port = dependencies.transport, dependencies.worker_port, dependencies.peer_port
    background, rights, stamps, peers = dependencies.background, dependencies.rights, dependencies.stamps, Peers()
    # These are called only once all are made.
    gateway: GatewayActor
    leases: LeasesActor
    scheduler: SchedulerActor

    channel = PeerChannel(context, peer_port, peers)
    sessions = Sessions(context, worker_port, hang_up=lambda number: call(gateway.connections.hang_up, number))
    completion = CompletionActor(context, sessions)
    pools = PoolsActor(
        context,
        dependencies.provider,
        transport,
        dependencies.pool_background,
        dependencies.store,
        completion=completion,
        workers=Workers(
            lent=lambda lent: call(gateway.connections.pool_lent, lent),
            returned=lambda number: call(gateway.connections.pool_returned, number),
            refused=lambda number, error: call(gateway.connections.attach_refused, number, error),
            renewed=sessions.renew,
            released=lambda number: call(gateway.connections.process_released, number),
            discard=worker_port.discard,
        ),
        leased=lambda: leases.offers.leased_pools(),  # noqa: PLW0108 - made below
    )
    leases = LeasesActor(
        context,
        lambda: peer_port.address,
        transport.expect_readers,
        Stamps(stamps),
        completion=completion,
        sessions=sessions,
        pools=pools,
        reply=channel.answer,
    )
    handshake = HandshakeActor(
        context,
        peer_port,
        transport,
        peers,
        listener=PeerListener(
            up=lambda view: call(scheduler.unrouted.peer_up, view),
            down=lambda address, reason, *, restarted: call(scheduler.peer_down, address, reason, restarted=restarted),
            refused=lambda worker, reasons: call(scheduler.unrouted.peers_refused, worker, reasons),
            idle=lambda address, announced: call(scheduler.peer_idle, address, announced),
        ),
        background=background,
        speaks_for=dependencies.speaks_for,
        user_of=pools.user_of,
    )
    peer_server = PeerServer(handshake, context, peer_port, transport, pools=pools, stamps=stamps.base, rights=rights)
    scheduler = SchedulerActor(
        context,
        transport,
        background,
        sessions=sessions,
        completion=completion,
        pools=pools,
        leases=leases,
        handshake=handshake,
        channel=channel,
    )
    gateway = GatewayActor(
        context,
        worker_port,
        sessions=sessions,
        pools=pools,
        handshake=handshake,
        leases=leases,
        scheduler=scheduler,
        completion=completion,
        peer_address=lambda: peer_port.address,
        draw_session=dependencies.draw_session,
        describe=dependencies.describe,
        policy=dependencies.policy,
        background=background,
    )
    pools.watch(peer_server)
    pools.use(leases.offers)
    pools.use(scheduler)
    frames = PeerFrames(
        context,
        peers,
        channel,
        rights,
        server=peer_server,
        handshake=handshake,
        claims=leases.claims,
        transfers=scheduler.transfers,
    )
    actors = Actors(
        gateway=gateway,
        pools=pools,
        handshake=handshake,
        peer_server=peer_server,
        leases=leases,
        scheduler=scheduler,
        completion=completion,
        channel=channel,
        sessions=sessions,
    )
    transport.start(_delivery(actors, context, dependencies))
    peer_port.start(frames.received, context.dispatcher)
    worker_port.start(gateway.received, context.dispatcher)
    return actors


def _delivery(  # noqa: C901 - one of each kind
    actors: Actors, context: ActorContext, dependencies: Dependencies
) -> Callable[[Event], None]:
    """Where each event of the transport goes."""
    transfers, memory = actors.scheduler.transfers, actors.pools.memory
    metrics, condition = context.metrics, context.condition

    def on_transport(event: Event) -> None:  # noqa: C901 - the same
        match event:
            case Landed():
                call(transfers.landed, event)
            case ReadFailed():
                call(transfers.read_failed, event)
            case PeerAdded():
                call(actors.handshake.added, event)
            case PeerFailed():
                call(actors.handshake.failed, event)
            case Described():
                call(actors.peer_server.described, event)
            case Registered():
                call(memory.registered, event)
            case RegisterFailed():
                call(memory.register_failed, event)
            case Deregistered():
                call(memory.deregistered, event)
            case NetworkDown():
                metrics.transport_restarts.inc()
                condition("network", f"{event.reason}; it is being started again")
                call(actors.peer_server.network_down)
            case NetworkUp():
                condition("network", None)
                call(actors.peer_server.network_up)
            case Answered():
                dependencies.transport_answered(event.number)
            case TransportDied():
                dependencies.transport_died(event.reason)

    return on_transport
