"""The transport over NIXL: one agent (UCX backend) in a process of its own (`kvd.transport.nixl.process`).

UCX's port asks nobody for a key, so what can be reached there is a process that has the pools and nothing else. When it
ends, its reads and peers fail, it is started again, and the pools are registered anew. A read ends only when the kernel
has reported the end of the process: until then it may write to the read's destination, and afterwards nothing does.

No peer's metadata is loaded before it is examined, since some of it kills the process that loads it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import TypeVar

from kvd.errors import Unavailable
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Landed,
    NetworkDown,
    NetworkEvent,
    NetworkUp,
    Notified,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Region,
    Registered,
    RegisterFailed,
)
from kvd.transport.nixl import messages
from kvd.transport.nixl.keeper import Keeper
from kvd.transport.nixl.probe import Examine, ExaminedPeers, accept
from kvd.transport.nixl.ucx import choose_settings, nixl_name

T = TypeVar("T")


class NixlTransport:
    """`kvd.transport.interface.Network` over NIXL. `agent` must be unique to this incarnation of the daemon.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).
        BadRequest: `BAD_CONFIG`, UCX does not start; the text names what it was told by the environment.

    """

    def __init__(
        self,
        agent: str,
        loop: asyncio.AbstractEventLoop,
        *,
        examine: Examine = accept,
        devices: Collection[str] | None = None,
        ports: str | None = None,
        held: tuple[int, ...] = (),
    ) -> None:
        """No metadata is loaded that `examine` finds fault with; `devices` and `ports` are as in `choose_settings`.

        The descriptors `held` stay open until neither this process nor the transport's writes to pools any more. `ends`
        is one for workers: poll(2) reports an error on it from then on.
        """
        nixl_name()
        choose_settings(os.environ, devices, ports)
        self.agent = agent
        """The name under which peers add this agent."""
        self._alive, self.ends = os.pipe()
        held = (self._alive, *held)
        self._keeper = Keeper(agent, loop, held, opened=self._opened, heard=self._heard, ended=self._ended)
        self.metadata = self._keeper.metadata
        """What a peer needs to add this agent, as of the last event that changed it; empty while nobody can."""
        self._peers = ExaminedPeers(_of_nixl(examine), load=self._load, refuse=self._refuse)
        self._on_event: Callable[[NetworkEvent], None]
        self._readers_expected = False
        self._regions: dict[int, Region] = {}
        """Pools that are to be registered."""
        self._registering: set[int] = set()
        """Those whose caller waits for that."""
        self._missing: set[int] = set()
        """Those that the process has yet to register anew."""
        self._deregistering: set[int] = set()
        self._describing: set[tuple[int, ...]] = set()
        self._joining: dict[str, bytes] = {}
        """Metadata of peers that wait for the process."""
        self._agents: set[str] = set()
        """Peers that it was told of."""
        self._words = 0
        """How much more it may say of peers: of each that it is told of that it was added, and that it is lost."""
        self._reads: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self._keeper.pid

    def start(self, on_event: Callable[[NetworkEvent], None]) -> None:
        """Starts; `on_event` is called on the loop, in the order of the events."""
        self._on_event = on_event
        self._keeper.start()

    # --- commands ---------------------------------------------------------------------------------------------------

    def register(self, pool: int, region: Region) -> None:
        """Registers memory that has a descriptor; answered by `Registered` or `RegisterFailed`."""
        self._regions[pool] = region
        self._registering.add(pool)
        self._register(pool)

    def _register(self, pool: int) -> None:
        region = self._regions[pool]
        command = messages.Register(pool, region.base, region.size, region.length, region.hidden)
        try:
            self._keeper.tell(command, (region.descriptor,))
        except (Unavailable, OSError) as error:
            self._register_failed(RegisterFailed(pool, f"it cannot be passed to the transport's process: {error}"))

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        del self._regions[pool]
        if self._keeper.running:
            self._deregistering.add(pool)
            self._keeper.tell(messages.Deregister(pool))
        else:
            self._on_event(Deregistered(pool, self.metadata))

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        if self._keeper.running:
            self._describing.add(pools)
            self._keeper.tell(messages.Describe(pools))
        else:
            self._on_event(Described(pools, b""))

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:  # noqa: ARG002
        """Makes `agent` reachable and starts to connect; answered by `PeerAdded` or `PeerFailed`."""
        self._peers.add(agent, metadata)

    def _load(self, agent: str, metadata: bytes) -> None:
        if self._keeper.running:
            self._agents.add(agent)
            self._words += 2
            self._keeper.tell(messages.AddPeer(agent, metadata))
        else:
            self._joining[agent] = metadata

    def _refuse(self, agent: str, fault: str) -> None:
        self.remove_peer(agent)
        self._on_event(PeerFailed(agent, fault))

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._peers.forget(agent)
        self._joining.pop(agent, None)
        self._agents.discard(agent)
        self._keeper.tell(messages.RemovePeer(agent))

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""
        if request.expected:
            self._on_event(request.unproven())  # no stamp is read over a network
            return
        if not self._keeper.running:
            self._on_event(ReadFailed(request.read, "the transport to other hosts is being started again"))
            return
        try:
            command, table = messages.read_command(request)
        except OSError as error:
            self._on_event(ReadFailed(request.read, f"its descriptors cannot be passed on: {error}"))
            return
        self._reads.add(request.read)
        try:
            self._keeper.tell(command, table)
        except Unavailable as error:
            self._reads.remove(request.read)
            self._on_event(ReadFailed(request.read, error.text))
        finally:
            for descriptor in table:
                os.close(descriptor)

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._keeper.tell(messages.Abort(read))

    def notify(self, agent: str, content: bytes) -> None:
        """Sends a message to a peer, see `Network.notify`."""
        self._keeper.tell(messages.Notify(agent, content))

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""
        self._keeper.tell(messages.ExpectConnection())

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""
        self._readers_expected = expected
        self._keeper.tell(messages.ExpectReaders(expected))

    def ping(self, number: int) -> None:
        """Asks the process for a sign of life; answered by `Answered`, also while it is being started again."""
        if self._keeper.running:
            self._keeper.ping(number)
        else:
            self._on_event(Answered(number))

    def stop(self) -> None:
        """Ends the process and waits for it: then nothing is written any more. Open reads get no more events."""
        self._peers.forget_all()
        self._keeper.stop()

    # --- what the process says --------------------------------------------------------------------------------------

    def _heard(self, event: messages.Reported) -> bool:
        """Delivers an event; False if nobody asked for it."""
        match event:
            case Registered():
                return self._registered(event)
            case RegisterFailed():
                return self._register_failed(event)
            case PeerAdded() | PeerFailed():
                return self._peer_told(event)
            case Landed() | ReadFailed():
                asked = _strike_off(event.read, self._reads)
            case Described():
                asked = _strike_off(event.pools, self._describing)
            case Deregistered():
                asked = _strike_off(event.pool, self._deregistering)
                self.metadata = event.metadata if asked else self.metadata
            case Answered() | Notified():
                asked = True  # an answer that the keeper has passed on, or a peer's message
                self._make_room(event)
        if asked:
            self._on_event(event)
        return asked

    def _make_room(self, event: Answered | Notified) -> None:
        if isinstance(event, Answered) and not (self._reads or self._readers_expected):
            self._keeper.make_room(event)

    def _peer_told(self, event: PeerAdded | PeerFailed) -> bool:
        if not self._words:
            return False
        self._words -= 1
        if event.agent in self._agents:  # else it was removed meanwhile
            if isinstance(event, PeerFailed):
                self._agents.remove(event.agent)
                self._peers.forget(event.agent)
            self._on_event(event)
        return True

    def _registered(self, event: Registered) -> bool:
        anew, asked = _strike_off(event.pool, self._missing), _strike_off(event.pool, self._registering)
        self.metadata = event.metadata if anew or asked else self.metadata
        if asked:
            self._on_event(event)
        if anew and not self._missing:
            self._on_event(NetworkUp(self.metadata))
        return anew or asked

    def _register_failed(self, event: RegisterFailed) -> bool:
        if _strike_off(event.pool, self._registering):
            del self._regions[event.pool]
            self._on_event(event)
            return True
        if event.pool in self._missing:
            self._keeper.accuse(f"a pool cannot be registered anew: {event.reason}")
            return True
        return False

    # --- its end, and the next one ----------------------------------------------------------------------------------

    def _ended(self, how: str) -> None:
        """Ends what the process had open: nothing writes any more to that."""
        reason = f"the process that reads from other hosts ended: {how}"
        self.metadata = b""
        self._on_event(NetworkDown(reason))  # again if it does not start: operators want to know why it does not
        for agent in sorted(self._agents):
            self._peers.forget(agent)
            self._on_event(PeerFailed(agent, reason))
        self._agents.clear()
        self._words = 0
        reads, self._reads = self._reads, set()
        for number in sorted(reads):
            self._on_event(ReadFailed(number, reason))
        described, self._describing = self._describing, set()
        for pools in sorted(described):
            self._on_event(Described(pools, b""))
        ended, self._deregistering = self._deregistering, set()
        for pool in sorted(ended):
            self._on_event(Deregistered(pool, self.metadata))

    def _opened(self, metadata: bytes) -> None:
        """Registers the pools anew, then sends on what was asked for meanwhile."""
        self.metadata = metadata
        self._missing = self._regions.keys() - self._registering
        for pool in list(self._regions):
            self._register(pool)
        self._keeper.tell(messages.ExpectReaders(self._readers_expected))
        joining, self._joining = self._joining, {}
        for agent, peer_metadata in joining.items():
            self._load(agent, peer_metadata)
        if not self._missing:
            self._on_event(NetworkUp(self.metadata))


def _strike_off(item: T, awaited: set[T]) -> bool:
    """Removes what is awaited no longer; whether it was."""
    if item not in awaited:
        return False
    awaited.remove(item)
    return True


def _of_nixl(examine: Examine) -> Examine:
    """Examines the part of peers' metadata that is NIXL's."""

    def examine_part(agent: str, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        parts, before = messages.metadata(metadata), messages.metadata(known)
        if parts is None:
            done("its metadata is not a NIXL transport's")
        else:
            examine(agent, before.nixl if before else b"", parts.nixl, done)

    return examine_part
