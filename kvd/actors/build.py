"""Builds the six actors and routes the events of sockets and transport to them.

The daemon and the simulator use the same wiring; they differ in what they hand in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.completion.actor import CompletionActor
from kvd.actors.gateway.actor import GatewayActor
from kvd.actors.gateway.policy import Policy
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.introductions import SpeaksFor, anybody
from kvd.actors.handshake.peer_server import STAMPS, PeerServer, Rights, everything
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.background import Background
from kvd.actors.runtime.context import ActorContext
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.memory.interface import MemoryProvider, NoStore, PoolStore
from kvd.memory.stamps import StampMemory, Stamps
from kvd.net.interface import PeerEvent, PeerPort, WorkerEvent, WorkerPort
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The concrete parts of one daemon. `draw_session` gives 16 unguessable bytes, `describe` opens every status."""

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
    """Makes the actors, starts transport and ports. Sockets come last: whoever connects finds everything there."""
    transport, worker_port, peer_port = dependencies.transport, dependencies.worker_port, dependencies.peer_port
    context.pools = PoolsActor(context, dependencies.provider, transport, dependencies.background, dependencies.store)
    stamps = dependencies.stamps
    context.leases = LeasesActor(context, lambda: peer_port.address, transport.expect_readers, Stamps(stamps))
    context.scheduler = SchedulerActor(context, transport)
    context.completion = CompletionActor(context)
    peer_server = PeerServer(context, peer_port, transport, stamps.base, dependencies.rights)
    context.handshake = HandshakeActor(
        context,
        peer_port,
        transport,
        peer_server,
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

    def on_worker(event: WorkerEvent) -> None:
        context.gateway.tell(event)

    def on_peer(event: PeerEvent) -> None:
        context.handshake.tell(event)

    transport.start(_delivery(context, dependencies))
    transport.register(STAMPS, stamps.base, stamps.words.nbytes)
    peer_port.start(on_peer, context.dispatcher)
    worker_port.start(on_worker, context.dispatcher)


def _delivery(context: ActorContext, dependencies: Dependencies) -> Callable[[Event], None]:
    """Leads the transport's events to whom they concern."""

    def on_memory(event: Registered | RegisterFailed | Deregistered) -> None:
        if event.pool != STAMPS:
            context.pools.tell(event)
        elif isinstance(event, RegisterFailed):
            dependencies.transport_died(f"it cannot register the stamps of leases: {event.reason}")

    def on_transport(event: Event) -> None:
        match event:
            case Landed() | ReadFailed():
                context.scheduler.tell(event)
            case PeerAdded() | PeerFailed() | Described():
                context.handshake.tell(event)
            case Registered() | RegisterFailed() | Deregistered():
                on_memory(event)
            case Answered():
                dependencies.transport_answered(event.number)
            case TransportDied():
                dependencies.transport_died(event.reason)

    return on_transport
