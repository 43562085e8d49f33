"""Furnishes a house: makes the six actors and leads the events of sockets and transport to whom they concern.

The daemon and the simulator use the same wiring; they differ in what they hand in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.actors.background import Background
from kvd.actors.completion import CompletionActor
from kvd.actors.gateway import GatewayActor
from kvd.actors.handshake import HandshakeActor
from kvd.actors.house import House
from kvd.actors.introductions import SpeaksFor, anybody
from kvd.actors.leases import LeasesActor
from kvd.actors.policy import Policy
from kvd.actors.pools import PoolsActor
from kvd.actors.reception import STAMPS, Reception, Rights, everything
from kvd.actors.scheduler import SchedulerActor
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
class Fittings:
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


def furnish(house: House, fittings: Fittings) -> None:
    """Makes the actors, starts transport and ports. Sockets come last: whoever connects finds everything there."""
    transport, worker_port, peer_port = fittings.transport, fittings.worker_port, fittings.peer_port
    house.pools = PoolsActor(house, fittings.provider, transport, fittings.background, fittings.store)
    stamps = fittings.stamps
    house.leases = LeasesActor(house, lambda: peer_port.address, transport.expect_readers, Stamps(stamps))
    house.scheduler = SchedulerActor(house, transport)
    house.completion = CompletionActor(house)
    reception = Reception(house, peer_port, transport, stamps.base, fittings.rights)
    house.handshake = HandshakeActor(
        house, peer_port, transport, reception, background=fittings.background, speaks_for=fittings.speaks_for
    )
    house.gateway = GatewayActor(
        house,
        worker_port,
        peer_address=lambda: peer_port.address,
        draw_session=fittings.draw_session,
        describe=fittings.describe,
        policy=fittings.policy,
        background=fittings.background,
    )

    def on_worker(event: WorkerEvent) -> None:
        house.gateway.tell(event)

    def on_peer(event: PeerEvent) -> None:
        house.handshake.tell(event)

    transport.start(_delivery(house, fittings))
    transport.register(STAMPS, stamps.base, stamps.words.nbytes)
    peer_port.start(on_peer, house.post)
    worker_port.start(on_worker, house.post)


def _delivery(house: House, fittings: Fittings) -> Callable[[Event], None]:
    """Leads the transport's events to whom they concern."""

    def on_memory(event: Registered | RegisterFailed | Deregistered) -> None:
        if event.pool != STAMPS:
            house.pools.tell(event)
        elif isinstance(event, RegisterFailed):
            fittings.transport_died(f"it cannot register the stamps of leases: {event.reason}")

    def on_transport(event: Event) -> None:
        match event:
            case Landed() | ReadFailed():
                house.scheduler.tell(event)
            case PeerAdded() | PeerFailed() | Described():
                house.handshake.tell(event)
            case Registered() | RegisterFailed() | Deregistered():
                on_memory(event)
            case Answered():
                fittings.transport_answered(event.number)
            case TransportDied():
                fittings.transport_died(event.reason)

    return on_transport
