"""The transport over NIXL: one agent (UCX backend) on one thread.

A NIXL post may block, and the agent is not locked, so calls to it are made on the thread
(`kvd.transport.nixl.agent_thread`): commands travel there on a queue, events travel back through an `Outbox`. Nothing
else imports nixl, and this file does so late: workers and tests import the package without it.

No peer's metadata is loaded before it is examined, since some of it kills the process that loads it.

At the end of the process, `stop()` shuts NIXL down in order, but NIXL's own teardown has crashed (signal 11) in
processes that lost a peer in the middle of a read. A daemon therefore leaves by `os._exit` once its own clean-up is
done, so that no destructor decides its exit status.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from kvd.errors import ErrorCode, refusal
from kvd.transport.interface import Deregistered, Event, PeerFailed, ReadRequest, Region, Registered, TransportDied
from kvd.transport.nixl.agent_thread import AgentThread
from kvd.transport.nixl.examined import Examine, ExaminedPeers, accept
from kvd.transport.nixl.metadata import agent_of
from kvd.transport.nixl.peers import text_of
from kvd.transport.nixl.ucx import choose_settings, load_nixl, make_agent, set_by_operator
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints
from kvd.transport.outbox import Outbox

STOP_SECONDS = 5.0
"""How long `stop` waits for posted slices: 64 MiB take 10 ms at memory speed, seconds over a bad network."""


def open_agent(name: str, devices: Collection[str] | None = None, ports: str | None = None) -> Any:
    """A NIXL agent with the UCX backend and no progress thread: the caller makes the progress.

    `devices` and `ports` are as in `choose_settings`; those of the first agent in a process hold for all.

    Raises:
        ImportError: nixl is not installed (it comes with the extra `daemon`).
        BadRequest: `BAD_CONFIG`, UCX does not start; the text names what it was told by the environment.

    """
    choose_settings(os.environ, devices, ports)
    nixl = load_nixl()
    try:
        return make_agent(nixl, name)
    except failures_of(nixl) as error:
        told = set_by_operator(os.environ)
        text = f"UCX does not start ({text_of(error)}) with {told or 'no variable of its own set'}"
        fix = "change or remove what the manifest or the unit sets of that; UCX_LOG_LEVEL=info says more"
        raise refusal(ErrorCode.BAD_CONFIG, f"{text}; {fix}") from error


def failures_of(nixl: Any) -> tuple[type[Exception], ...]:
    """The errors of NIXL's module `nixl`, which have no base of their own."""
    bindings = vars(nixl._bindings)
    return tuple(kind for name, kind in bindings.items() if name.startswith("nixl") and name.endswith("Error"))


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
        examine: Examine = accept,
        devices: Collection[str] | None = None,
        ports: str | None = None,
    ) -> None:
        """No metadata is loaded that `examine` finds fault with; `devices` and `ports` are as in `choose_settings`."""
        handle = open_agent(agent, devices, ports)
        failures = failures_of(load_nixl())
        self._agent = agent
        self._metadata: bytes = handle.get_agent_metadata()
        if agent_of(self._metadata) != agent:
            raise refusal(
                ErrorCode.INTERNAL, f"this NIXL writes metadata of a form unknown to kvd: {self._metadata[:64]!r}"
            )
        self._outbox = Outbox(loop, self._deliver)
        self._agent_thread: AgentThread = AgentThread(
            handle, failures, UcxEndpoints(agent), emit=self._outbox.put, flush=self._outbox.flush
        )
        load = partial(self._tell, self._agent_thread.add_peer)
        self._peers = ExaminedPeers(examine, load=load, refuse=self._refuse)
        self._thread: threading.Thread | None = None
        self._on_event: Callable[[Event], None]

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
            raise refusal(ErrorCode.INTERNAL, f"transport {self._agent!r} was started twice")
        self._on_event = on_event
        self._thread = threading.Thread(target=self._run, name="kvd-transport", daemon=True)
        self._thread.start()

    def register(self, pool: int, region: Region) -> None:
        """Registers memory; answered by `Registered` or `RegisterFailed`."""
        self._tell(self._agent_thread.register, pool, region.base, region.size)

    def deregister(self, pool: int) -> None:
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        self._tell(self._agent_thread.deregister, pool)

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        self._tell(self._agent_thread.describe, pools)

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:  # noqa: ARG002
        """Makes `agent` reachable and starts to connect; answered by `PeerAdded` or `PeerFailed`."""
        self._peers.add(agent, metadata)

    def _refuse(self, agent: str, fault: str) -> None:
        self.remove_peer(agent)
        self._on_event(PeerFailed(agent, fault))

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent` once its reads have ended. No answer."""
        self._peers.forget(agent)
        self._tell(self._agent_thread.remove_peer, agent)

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""
        if request.expected:
            self._on_event(request.unproven())  # no stamp is read over a network
        else:
            self._tell(self._agent_thread.read, request)

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._tell(self._agent_thread.abort, read)

    def expect_connection(self) -> None:
        """A peer has this agent's metadata and will connect: for a while, answer it promptly."""
        self._tell(self._agent_thread.expect_connection)

    def expect_readers(self, expected: bool) -> None:
        """Whether peers are about to read from this agent: while they are, answer them promptly."""
        self._tell(self._agent_thread.expect_readers, expected)

    def ping(self, number: int) -> None:
        """Asks the thread for a sign of life; answered by `Answered`."""
        self._tell(self._agent_thread.ping, number)

    def stop(self) -> None:
        """Shuts down in order and waits for it, `STOP_SECONDS` at most for posted slices."""
        self._peers.forget_all()
        if self._thread is None:
            return
        self._outbox.close()
        self._tell(self._agent_thread.stop, STOP_SECONDS)
        self._thread.join()

    def _tell(self, command: Callable[..., None], *arguments: Any) -> None:
        self._agent_thread.commands.put(partial(command, *arguments))

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Registered | Deregistered):
            self._metadata = event.metadata
        elif isinstance(event, PeerFailed):
            self._peers.forget(event.agent)
        self._on_event(event)

    def _run(self) -> None:
        try:
            self._agent_thread.run()
        except BaseException as error:
            self._outbox.put(TransportDied(f"the transport's thread raised {type(error).__name__}: {error}"))
            self._outbox.flush()
            raise
