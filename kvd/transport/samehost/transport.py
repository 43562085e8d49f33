"""The transport within a host: a peer's pools are mapped for reading, and threads of ours copy.

A peer that reads from us needs nothing of this process but its exporter's socket. Small reads are copied on the loop,
or launched there if GPUs copy them, as that takes less time than waking a thread up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import structlog

from kvd import limits
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.unix import ReadWatch
from kvd.protocol.codec import encode, export_addresses
from kvd.protocol.export import ExportAddress
from kvd.transport.interface import (
    Deregistered,
    Described,
    Event,
    Landed,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Region,
    Registered,
    RegisterFailed,
    TransportDied,
)
from kvd.transport.on_loop import Outbox, on_loop, outcome
from kvd.transport.samehost.copies import CopyThreads, Memory, Read
from kvd.transport.samehost.devices import Devices, Mappings
from kvd.transport.samehost.exporter import Exporter
from kvd.transport.samehost.importer import ImportedPools, check_path, import_pools
from kvd.transport.samehost.launches import Launches

_log = structlog.get_logger("kvd.transport")

PATH: Final = "copy/memory"
"""The path to every peer (`kvd.transport.path`)."""


class SameHostTransport:
    """`kvd.transport.interface.Transport` within `host`, the running kernel. Peers import pools at `path`.

    `device` is the UUID of the GPU that our pools are on; empty for host memory.

    Raises:
        BadRequest: `BAD_CONFIG`, nothing can be bound at `path`, of file mode `mode`.

    """

    def __init__(
        self,
        agent: str,
        loop: asyncio.AbstractEventLoop,
        path: str,
        *,
        host: str,
        threads: int,
        mode: int = 0o600,
        device: str = "",
    ) -> None:
        self.agent = agent
        """The name under which peers add this agent."""
        self._loop = loop
        self._path = path
        self._host = host
        self._devices = Devices(device)
        self._exporter = Exporter(path, mode)
        self.metadata = self._address(self._exporter.token())
        """What a peer needs to add this agent, as of the last event that changed it."""
        self._outbox = Outbox(loop, self._deliver)
        self._copies = CopyThreads(threads, self._outbox.put)
        self._bases: dict[int, int] = {}
        """Addresses of the registered pools, by number."""
        self._pools: dict[int, Memory] = {}
        """By address."""
        self._mappings = Mappings(self._devices)
        self._imports = ThreadPoolExecutor(limits.MAX_HANDSHAKES, "kvd-import")
        """Not the loop's executor: exporters that do not answer must not keep other work of the daemon waiting."""
        self._peers: dict[str, ImportedPools] = {}
        self._watches: dict[str, ReadWatch] = {}
        """Of the connections over which they came."""
        self._importing: dict[str, object] = {}
        """The latest attempt to import the pools of an agent."""
        self._reads: dict[int, tuple[str, ImportedPools, int]] = {}
        """What open reads use: an agent, its pools as they were imported then, and the address of one of them there."""
        self._launches = Launches(loop, self._deliver)
        self._on_event: Callable[[Event], None]
        self._stopped = False
        self._died = False

    @property
    def lock(self) -> int:
        """A descriptor: while it or a duplicate is open, no other daemon serves here."""
        return self._exporter.lock.descriptor

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Starts the threads; `on_event` is called on the loop, in the order of the events."""
        self._on_event = on_event
        self._copies.start()

    # --- our pools --------------------------------------------------------------------------------------------------

    def register(self, pool: int, region: Region) -> None:
        """Exports a pool, if it has a descriptor, and lets reads land in it; see `Transport.register`."""
        if region.descriptor >= 0:
            try:
                self._exporter.add(pool, region)
            except OSError as error:
                self._on_event(RegisterFailed(pool, f"it cannot be lent to daemons of this host: {error}"))
                return
        self._pools[region.base] = Memory(region.base, region.size, region.device)
        self._bases[pool] = region.base
        if not region.device:
            self._mappings.add(region.base, region.length or region.size)
        self.metadata = self._address(self._exporter.token())
        self._on_event(Registered(pool, self.metadata))

    def deregister(self, pool: int, *, returns: bool = False) -> None:  # noqa: ARG002 - there is always room for it
        """Ends a registration that no open read uses; answered by `Deregistered`."""
        base = self._bases.pop(pool)
        del self._pools[base]
        self._exporter.remove(pool)
        self.metadata = self._address(self._exporter.token())
        unpinning = self._mappings.remove(base)
        if unpinning is None:
            self._on_event(Deregistered(pool, self.metadata))
        else:
            asyncio.wrap_future(unpinning, loop=self._loop).add_done_callback(partial(self._unpinned, pool))

    def _unpinned(self, pool: int, unpinning: asyncio.Future[None]) -> None:
        if self._stopped:
            return
        error = unpinning.exception()
        if error is not None:
            _log.error("a pool cannot be unpinned, and is given back all the same", exc_info=error)
        self._on_event(Deregistered(pool, self.metadata))

    def describe(self, pools: tuple[int, ...]) -> None:
        """Asks for metadata that covers the registrations of `pools` only; answered by `Described`."""
        self._on_event(Described(pools, self._address(self._exporter.token(pools))))

    def _address(self, token: bytes) -> bytes:
        return encode(ExportAddress(self.agent, self._host, self._path, token))

    # --- peers ------------------------------------------------------------------------------------------------------

    def add_peer(self, agent: str, metadata: bytes, address: str = "") -> None:
        """Imports the pools of `agent`; answered by `PeerAdded` or `PeerFailed`, unless stopped."""
        if self._stopped:
            return
        try:
            export = self._check(agent, metadata, address)
        except KvdError as error:
            self._importing.pop(agent, None)
            self._lose(agent, error.text)
            return
        attempt = self._importing[agent] = object()
        importing = self._loop.run_in_executor(self._imports, import_pools, export, self._mappings.map_pool)
        importing.add_done_callback(partial(self._imported, agent, metadata, attempt))

    def _check(self, agent: str, metadata: bytes, address: str) -> ExportAddress:
        """Reads the metadata of a daemon at `address`.

        Raises:
            BadRequest: `BAD_MESSAGE`, it is malformed, another agent's, or leads to a socket that is not the daemon's.
            Unavailable: `TRANSPORT`, the agent is on another host.

        """
        export = export_addresses.decode(metadata)
        if export.agent != agent:
            raise refusal(ErrorCode.BAD_MESSAGE, f"its metadata is about {export.agent!r}")
        if export.host != self._host:
            raise refusal(ErrorCode.TRANSPORT, f"it runs on another host ({export.host!r}, not {self._host!r})")
        check_path(export.path, address)
        return export

    def _imported(self, agent: str, metadata: bytes, attempt: object, importing: asyncio.Future[ImportedPools]) -> None:
        if importing.cancelled():
            return
        imported = outcome(importing, "an import failed", agent=agent)
        current = self._importing.get(agent) is attempt and not self._stopped
        if current:
            del self._importing[agent]
        if isinstance(imported, ImportedPools):
            if current:
                self._add(agent, metadata, imported)
            else:
                imported.hang_up()
        elif current:
            self._lose(agent, imported.text)

    def _add(self, agent: str, metadata: bytes, pools: ImportedPools) -> None:
        self._forget(agent)
        self._peers[agent] = pools
        if pools.device:
            self._mappings.pin_for(pools.device)
        self._watches[agent] = ReadWatch(pools.fileno(), partial(self._hear, agent, pools), self._loop)
        self._watches[agent].start()
        self._on_event(PeerAdded(agent, metadata, PATH, same_host=True, stamps=pools.process is not None))

    def _hear(self, agent: str, pools: ImportedPools) -> None:
        """A peer says that pools have ended, or has ended itself."""
        try:
            lives = pools.hear()
        except KvdError as error:
            self._lose(agent, error.text)
            return
        if not lives:
            self._lose(agent, "it has ended, or hung up")

    def _lose(self, agent: str, reason: str) -> None:
        """A peer is of no use any more: its reads fail."""
        self._forget(agent)
        self._on_event(PeerFailed(agent, reason))
        for read, (whose, pools, _) in list(self._reads.items()):
            if whose == agent:  # also of pools that were imported before its last metadata
                pools.lost = f"lost agent {agent!r}: {reason}"
                self._copies.give_up(read, pools.lost)

    def remove_peer(self, agent: str) -> None:
        """Forgets `agent`; its open reads keep what they read from. No answer."""
        self._importing.pop(agent, None)
        self._forget(agent)

    def _forget(self, agent: str) -> None:
        pools = self._peers.pop(agent, None)
        if pools is not None:
            self._watches.pop(agent).stop()
            pools.hang_up()

    # --- reads ------------------------------------------------------------------------------------------------------

    def read(self, request: ReadRequest) -> None:
        """Starts a read; its number must not be that of an open one. It ends in `Landed` or `ReadFailed`."""
        if self._stopped:
            return
        pools = self._peers.get(request.agent)
        source = pools.find(request.remote_base) if pools else None
        target = self._pools.get(request.local_base)
        if pools is None or source is None or target is None:
            self._on_event(ReadFailed(request.read, self._missing(request, known=pools is not None)))
            return
        if request.expected and pools.stamp(request.stamp) != request.expected:
            self._on_event(request.unproven())
            return
        read = Read(request, source, target, pools.stamp)
        host = not source.device and not target.device
        if host and read.is_small and source.is_whole:
            read.run_few()
            self._on_event(read.end())
            return
        pools.use(request.remote_base)
        self._reads[request.read] = (request.agent, pools, request.remote_base)
        if read.is_small and not self._launches.busy:
            small = self._devices.small_copies(source, target, request.descriptors)
            if small is not None:
                self._launches.start(read, small)
                return
        read.copy, read.bounds = self._devices.copy_between(source, target, request.descriptors)
        self._copies.add(read)

    def _missing(self, request: ReadRequest, *, known: bool) -> str:
        if not known:
            return f"agent {request.agent!r} is not known: add it before reading from it"
        if request.local_base in self._pools:
            return f"agent {request.agent!r} has exported no pool at {request.remote_base:#x}"
        return f"no pool is registered at {request.local_base:#x}"

    def abort(self, read: int) -> None:
        """Asks for an early end of a read; unknown and ended reads are ignored."""
        self._copies.give_up(read, "aborted", aborted=True)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def expect_connection(self) -> None:
        """Nothing to do: the exporter answers."""

    def expect_readers(self, expected: bool) -> None:
        """Nothing to do: peers that read need nothing of us."""

    def ping(self, number: int) -> None:
        """Asks the threads, and a GPU that copies a small read, for a sign of life; answered by `Answered`."""
        self._launches.when_idle(partial(self._copies.ping, number))

    def stop(self) -> None:
        """Ends the threads after the slices that they copy. Open reads get no more events. On any thread."""
        if self._stopped:
            return
        self._stopped = True
        self._outbox.close()
        self._launches.stop()
        self._imports.shutdown(wait=False, cancel_futures=True)
        self._copies.stop()
        on_loop(self._loop, self._hang_up)
        self._mappings.stop()
        if not self._died:
            self._devices.close()

    def _hang_up(self) -> None:
        for agent in list(self._peers):
            self._forget(agent)
        if not self._died:  # else a GPU may still copy, and the end of the process gives back what it uses
            for _, pools, base in self._reads.values():
                pools.release(base)
        self._exporter.close()

    def _deliver(self, event: Event) -> None:
        self._died |= isinstance(event, TransportDied)
        if isinstance(event, Landed | ReadFailed):
            _, pools, base = self._reads.pop(event.read)
            if pools.lost and isinstance(event, Landed):  # its last slice was being copied as the peer was lost
                event = ReadFailed(event.read, pools.lost)
            pools.release(base)
        self._on_event(event)
