"""Builds the six actors and routes the events of sockets and transport to them.

The daemon and the simulator use the same wiring; they differ in what they hand in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.completion.actor import CompletionActor
from kvd.actors.gateway.actor import GatewayActor
from kvd.actors.gateway.policy import Policy
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.channel import PeerChannel
from kvd.actors.handshake.introductions import SpeaksFor, anybody
from kvd.actors.handshake.peer_server import PeerServer, Rights, everything
from kvd.actors.handshake.peers import Peers
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.loop import Background
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.memory.interface import MemoryProvider, NoStore, PoolStore
from kvd.memory.stamps import StampMemory, Stamps
from kvd.net.interface import PeerPort, WorkerPort
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
    draw_session: Callable[[], bytes]
    describe: Callable[[], dict[str, object]]
    transport_died: Callable[[str], None]
    policy: Policy
    stamps: StampMemory
    transport_answered: Callable[[int], None] = lambda _number: None
    rights: Rights = everything
    speaks_for: SpeaksFor = anybody
    store: PoolStore = field(default_factory=NoStore)


def build_actors(context: ActorContext, dependencies: Dependencies) -> None:
    """Makes the actors, then starts the transport, then the sockets: whoever connects finds everything ready."""
    transport, worker_port, peer_port = dependencies.transport, dependencies.worker_port, dependencies.peer_port
    peers, stamps = Peers(), dependencies.stamps
    context.peers = channel = PeerChannel(context, peer_port, peers, dependencies.rights)
    context.pools = PoolsActor(context, dependencies.provider, transport, dependencies.background, dependencies.store)
    context.leases = LeasesActor(context, lambda: peer_port.address, transport.expect_readers, Stamps(stamps))
    context.scheduler = SchedulerActor(context, transport, dependencies.background)
    context.completion = CompletionActor(context)
    context.handshake = HandshakeActor(
        context,
        peer_port,
        transport,
        peers,
        PeerServer(context, peer_port, transport, stamps.base, dependencies.rights),
        background=dependencies.background,
        speaks_for=dependencies.speaks_for,
    )
    context.gateway = gateway = GatewayActor(
        context,
        worker_port,
        peer_address=lambda: peer_port.address,
        draw_session=dependencies.draw_session,
        describe=dependencies.describe,
        policy=dependencies.policy,
        background=dependencies.background,
    )
    context.replies = gateway.sessions

    transport.start(_delivery(context, dependencies))
    peer_port.start(channel.received, context.dispatcher)
    worker_port.start(context.gateway.tell, context.dispatcher)


def _delivery(context: ActorContext, dependencies: Dependencies) -> Callable[[Event], None]:
    """Where each event of the transport goes."""

    def on_transport(event: Event) -> None:
        match event:
            case Landed() | ReadFailed():
                context.scheduler.tell(event)
            case PeerAdded() | PeerFailed() | Described():
                context.handshake.tell(event)
            case Registered() | RegisterFailed() | Deregistered():
                context.pools.tell(event)
            case NetworkDown():
                context.metrics.transport_restarts.inc()
                context.condition("network", f"{event.reason}; it is being started again")
                context.handshake.tell(event)
            case NetworkUp():
                context.condition("network", None)
                context.handshake.tell(event)
            case Answered():
                dependencies.transport_answered(event.number)
            case TransportDied():
                dependencies.transport_died(event.reason)

    return on_transport
