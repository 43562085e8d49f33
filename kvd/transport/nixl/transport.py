"""The transport over NIXL: one agent (UCX backend) on one thread.

NIXL posts block (a same-host read is copied inside of the post), and its agent is not locked, so calls of it are made
on the thread: commands travel there on a queue, events travel back through an `Outbox`. Only a small read may be made
on the loop, while the thread has nothing to do and `AgentThread.turn` keeps it from beginning.
`kvd.transport.nixl.agent_thread` is what runs on the thread; this file is its door, and the only one that imports nixl.

At the end of the process: `stop()` shuts NIXL down in order, but NIXL's own teardown has crashed (signal 11) in
processes that lost a peer in the middle of a read. A daemon therefore leaves by `os._exit` once its own clean-up is
done, so that no destructor decides its exit status.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvd.errors import ErrorCode, InternalError
from kvd.transport.interface import Deregistered, Event, Registered, TransportDied
from kvd.transport.nixl.agent_thread import AgentThread
from kvd.transport.nixl.metadata import agent_of
from kvd.transport.nixl.outbox import Outbox
from kvd.transport.nixl.queue import Slices
from kvd.transport.nixl.ucx import choose_settings, load_nixl, make_agent
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints

if TYPE_CHECKING:
    from kvd.plan import Descriptors

STOP_SECONDS = 5.0
"""How long `stop` waits for slices that are posted: at memory speed 64 MiB take 10 ms, over a bad network seconds."""


def open_agent(name: str, devices: Collection[str] | None = None) -> Any:
    """A NIXL agent with the UCX backend and without a progress thread: whoever holds it makes the progress.

    `devices` are as in `choose_settings`; what the first agent of a process is given holds for all.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).

    """
    choose_settings(os.environ, devices)
    return make_agent(load_nixl(), name)


def open_transports(
    agents: Sequence[str], loop: asyncio.AbstractEventLoop, *, devices: Collection[str] | None = None
) -> list[NixlTransport]:
    """The transports of one process, each with a thread of its own; the first tells by which path a peer is reached.

    `devices` are as in `choose_settings`.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).

    """
    others = [NixlTransport(agent, loop, beside=None, devices=devices) for agent in agents[1:]]
    return [NixlTransport(agents[0], loop, beside=others, devices=devices), *others]


class NixlTransport:
    """`kvd.transport.interface.Transport` over NIXL. `agent` must be unique to this incarnation of the daemon.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).

    """

    def __init__(
        self,
        agent: str,
        loop: asyncio.AbstractEventLoop,
        *,
        beside: Sequence[NixlTransport] | None = (),
        devices: Collection[str] | None = None,
    ) -> None:
        """The transports `beside` it in this process rest while it asks UCX for lanes; None: another one asks."""
        handle = open_agent(agent, devices)
        bindings = vars(load_nixl()._bindings)
        failures = tuple(kind for name, kind in bindings.items() if name.startswith("nixl") and name.endswith("Error"))
        self._agent = agent
        self._library = type(handle).__module__
        self._loop = loop
        self._metadata: bytes = handle.get_agent_metadata()
        if agent_of(self._metadata) != agent:
            raise InternalError(
                ErrorCode.INTERNAL, f"this NIXL writes metadata of a form unknown to kvd: {self._metadata[:64]!r}"
            )
        lanes = None if beside is None else UcxEndpoints(agent, [other._engine.turn for other in beside])
        self._engine: AgentThread = AgentThread(handle, failures, lanes)
        self._thread: threading.Thread | None = None
        self._outbox: Outbox | None = None

    @property
    def library(self) -> str:
        """The module that the agent is from: NIXL has one for each major release of CUDA."""
        return self._library

    @property
    def agent(self) -> str:
        """The name under which peers add this agent."""
        return self._agent

    @property
    def metadata(self) -> bytes:
        """What a peer needs to add this agent, as of the last event that changed it."""
        return self._metadata

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts the thread; `on_event` is called on the loop, in the order of the events."""
        if self._thread is not None:
            raise InternalError(ErrorCode.INTERNAL, f"transport {self._agent!r} was started twice")

        def deliver(event: Event) -> None:
            if isinstance(event, Registered | Deregistered):
                self._metadata = event.metadata
            on_event(event)

        self._outbox = Outbox(self._loop, deliver)
        self._thread = threading.Thread(target=self._run, args=(self._outbox,), name="kvd-transport", daemon=True)
        self._thread.start()

    def register(self, pool: int, base: int, size: int) -> None:
        """Registers `size` bytes at address `base`; answered by `Registered` or `RegisterFailed`."""
        self._engine.commands.put(partial(self._engine.register, pool, base, size))

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        self._engine.commands.put(partial(self._engine.deregister, pool))

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that leads to the registrations of `pools` and to no others; answered by `Described`."""
        self._engine.commands.put(partial(self._engine.describe, pools))

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Makes `agent` reachable and starts to connect; answered by `PeerAdded` or `PeerFailed`."""
        self._engine.commands.put(partial(self._engine.add_peer, agent, metadata))

    def add_peer_by(self, path: str, agent: str, metadata: bytes) -> None:
        """As `add_peer`, of one that another transport of this process reaches by `path`."""
        self._engine.commands.put(partial(self._engine.add_peer, agent, metadata, path))

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._engine.commands.put(partial(self._engine.remove_peer, agent))

    def read(
        self, read: int, agent: str, local_base: int, remote_base: int, descriptors: Descriptors, *, stamp: int = 0
    ) -> None:
        """Reads `descriptors.length[i]` bytes at `remote_base + src[i]` of `agent` into `local_base + dst[i]`."""
        if self._outbox is not None and self._engine.read_at_once(
            read, agent, local_base, remote_base, descriptors, stamp=stamp
        ):
            self._outbox.deliver()
        else:
            self.read_share(agent, local_base, remote_base, Slices(read, descriptors), stamp=stamp)

    def read_share(self, agent: str, local_base: int, remote_base: int, slices: Slices, *, stamp: int = 0) -> None:
        """As `read`, of what it gets of `slices`."""
        self._engine.commands.put(partial(self._engine.read, agent, local_base, remote_base, slices, stamp=stamp))

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._engine.commands.put(partial(self._engine.abort, read))

    def expect_connection(self) -> None:
        """A peer has been given this agent's metadata and will connect: it is answered promptly for a while."""
        self._engine.commands.put(self._engine.expect_connection)

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, it answers them promptly."""
        self._engine.commands.put(partial(self._engine.expect_readers, expected))

    def ping(self, number: int) -> None:
        """Asks whether the thread turns; answered by `Answered`."""
        self._engine.commands.put(partial(self._engine.ping, number))

    def stop(self) -> None:
        """Ends everything in order, waiting for it, `STOP_SECONDS` at most for slices that are posted."""
        if self._thread is None or self._outbox is None:
            return
        self._outbox.close()
        self._engine.commands.put(partial(self._engine.stop, STOP_SECONDS))
        self._thread.join()

    def _run(self, outbox: Outbox) -> None:
        try:
            self._engine.run(outbox.put, outbox.flush)
        except BaseException as error:
            outbox.put(TransportDied(f"the transport's thread raised {type(error).__name__}: {error}"))
            outbox.flush()
            raise
