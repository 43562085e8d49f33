"""The daemon: the only place that wires concrete parts together, starts them, and stops them in order."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

import kvd
from kvd import limits
from kvd.actors.build import Actors, Dependencies, build_actors
from kvd.actors.handshake.introductions import anybody
from kvd.actors.handshake.peer_server import PeerServer, everything
from kvd.actors.runtime.actor import call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.supervisor import LoggingSupervisor
from kvd.daemon.config import Config
from kvd.daemon.health import Health, Watchdog
from kvd.daemon.parts import Background, Opened, load_trust, open_parts, wait_for_predecessor
from kvd.daemon.shutdown import STOP_SECONDS, Part, Parts, Shutdown
from kvd.daemon.systemd import DescriptorStore, Notifier, received_descriptors
from kvd.discovery.directory import Directory, PeersFile
from kvd.errors import KvdError
from kvd.host import raise_open_files
from kvd.memory.stamps import HostStamps
from kvd.metrics import Metrics
from kvd.net import keys
from kvd.net.peers import DESCRIPTORS_PER_LINK, PeerSockets
from kvd.net.trust import Trust
from kvd.protocol.status import ProcessStatus

_ROUND_SECONDS = 1.0
"""Between rounds of the watchdog."""

_POOL_THREADS = 16
"""Pools whose memory is made, moved or given back at one time."""


class Daemon:
    """One daemon; `serve` runs it until a signal."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.incarnation = time.time_ns()
        self._log = structlog.get_logger("kvd").bind(daemon=config.name)
        self.metrics = Metrics(CollectorRegistry())
        ProcessCollector(registry=self.metrics.registry)
        self.health = Health(self.metrics)
        self._notifier = Notifier(os.environ)
        self._store = DescriptorStore(self._notifier, received_descriptors(os.environ))
        self._stopping = asyncio.Event()
        self._failure = ""
        self._shutdown = Shutdown(lambda: bool(self._failure))

    async def serve(self) -> int:
        """Starts, waits for SIGTERM or SIGINT, drains, stops. Returns the exit status: 1 after a failure, else 0."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._escaped)
        for number in (signal.SIGTERM, signal.SIGINT):
            _on_signal(loop, number, partial(self._signalled, number))
        _on_signal(loop, signal.SIGHUP, partial(self._log.info, "nothing to read again", signal="SIGHUP"))
        await wait_for_predecessor(self.config, self._stopping, self._notifier)
        if not self._stopping.is_set():
            await self._run(loop)
        return 1 if self._failure else 0

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """From the first file that is opened to the last that is closed."""
        config = self.config
        raise_open_files(limits.MAX_PEERS * DESCRIPTORS_PER_LINK)
        trust = load_trust(config)
        directory = self._make_directory(trust, lambda addresses: call(actors.handshake.connector.expect, addresses))
        parts = open_parts(
            config,
            f"{config.name}#{self.incarnation}",
            trust,
            loop=loop,
            metrics=self.metrics,
            health=self.health,
            log=self._log,
        )
        watchdog: Watchdog  # made below, as it looks after the actors
        answered: Callable[[int], None] = lambda number: watchdog.transport_answered(number)  # noqa: E731, PLW0108
        actors = build_actors(self._make_context(loop, parts), self._make_dependencies(loop, parts, trust, answered))
        watchdog = Watchdog(
            loop,
            _ROUND_SECONDS,
            actors=actors.all,
            ping=parts.transport.ping,
            fed=partial(self._fed, parts.peers),
            metrics=self.metrics,
        )
        watchdog.start()
        if trust is not None:
            _on_signal(loop, signal.SIGHUP, partial(self._reload, trust, actors.peer_server, directory))
        self._store.drop_unclaimed_after(loop, config.pool_linger)
        directory.start()
        gc.freeze()  # what was imported stays; to look through it again and again stopped the loop for 0.1 s
        self.health.set("starting", None)
        self._notifier.ready()
        self._log.info(
            "serving",
            version=kvd.__version__,
            socket=str(config.socket),
            address=parts.peers.address,
            http=parts.http.address,
            incarnation=self.incarnation,
            pid=os.getpid(),
            pools_kept=self._store.unclaimed,
        )
        await self._stopping.wait()
        directory.stop()
        await self._shut_down(actors, parts)

    def _make_directory(self, trust: Trust | None, expect: Callable[[frozenset[str]], None]) -> Directory:
        config, own = self.config, self.config.advertise or self.config.listen
        names = None
        if config.peers_dns:
            from kvd.discovery.names import PeerNames  # noqa: PLC0415 - a resolver that few need takes 40 ms to import

            names = PeerNames(config.peers_dns, config.name, own, trust, config.dns_server)
        file = PeersFile(config.peers, config.name, own, trust) if config.peers else None
        return Directory(file, names, expect, self._log)

    def _make_context(self, loop: asyncio.AbstractEventLoop, parts: Opened) -> ActorContext:
        return ActorContext(
            loop=loop,
            settings=self.config.actor_settings(self.incarnation),
            metrics=self.metrics,
            supervisor=LoggingSupervisor(self.metrics, self.fail),
            condition=self.health.set,
            note=self.health.note,
            idle=self._shutdown.is_idle,
            starved=parts.processor.starved,
            spans=parts.traces,
        )

    def _make_dependencies(
        self, loop: asyncio.AbstractEventLoop, parts: Opened, trust: Trust | None, answered: Callable[[int], None]
    ) -> Dependencies:
        return Dependencies(
            worker_port=parts.workers,
            peer_port=parts.peers,
            transport=parts.transport,
            provider=parts.provider,
            background=Background(loop),
            pool_background=Background(loop, ThreadPoolExecutor(_POOL_THREADS, "kvd-pool")),
            draw_session=lambda: os.urandom(16),
            describe=partial(self._describe, parts),
            transport_died=lambda reason: self.fail(f"the transport died: {reason}"),
            transport_answered=answered,
            store=self._store,
            policy=parts.policy,
            stamps=HostStamps(),
            rights=trust.pools_of if trust else everything,
            speaks_for=trust.speaks_for if trust else anybody,
        )

    async def _shut_down(self, actors: Actors, parts: Opened) -> None:
        self.health.set("stopping", self._failure or "the daemon is stopping")
        self._notifier.stopping(self.config.drain_grace + STOP_SECONDS)
        if not self._failure:
            self._log.info("draining", grace=self.config.drain_grace)
        if left := await self._shutdown.run(actors, _in_order(parts), self.config.drain_grace):
            self.fail(f"{left} did not stop within {STOP_SECONDS:g} s; the process ends without that")
        else:
            self._log.info("stopped", failure=self._failure or None)

    # --- what happens meanwhile -------------------------------------------------------------------------------------

    def _fed(self, peers: PeerSockets) -> None:
        """Every part answered the watchdog."""
        self.health.beat()
        self._notifier.feed()
        reasons = self.health.reasons
        self._notifier.status("; ".join(reasons.values()) or f"serving peers at {peers.address}")

    def _signalled(self, number: int) -> None:
        self._log.info("signal", signal=signal.Signals(number).name)
        if self._stopping.is_set():
            self._shutdown.hurry()
        self._stopping.set()

    def _reload(self, trust: Trust, server: PeerServer, directory: Directory) -> None:
        """SIGHUP: reads the allow-list again; a bad list changes nothing."""
        assert self.config.curve_peers is not None  # noqa: S101 - there is trust
        try:
            allowed = keys.load_allowed(self.config.curve_peers)
        except KvdError as error:
            self._log.error("the allow-list stays as it was", reason=error.text)
            return
        trust.replace(allowed)
        self._log.info("allow-list read", peers=len(allowed))
        call(server.rights_changed)
        directory.refresh()

    def fail(self, reason: str) -> None:
        """Ends the daemon with status 1, as its state may be wrong. That costs only its requests in flight."""
        self._log.error("stopping after a failure", reason=reason)
        self._failure = self._failure or reason
        self._stopping.set()

    def _escaped(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised, which is a bug. Logs it without the arguments that asyncio shows: some are messages."""
        self._log.error("a callback of the loop failed", what=context["message"], exc_info=context.get("exception"))

    def _describe(self, parts: Opened) -> ProcessStatus:
        config = self.config
        return ProcessStatus(
            daemon=config.name,
            version=kvd.__version__,
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=parts.peers.address,
            http=parts.http.address,
            device=config.device,
            ready=not self.health.reasons,
            not_ready=self.health.reasons,
            processor=parts.processor.status(),
            totals=self.metrics.totals(time.monotonic()),
        )


def _on_signal(loop: asyncio.AbstractEventLoop, number: int, call: Callable[[], None]) -> None:
    """Calls `call` on the loop, once for each signal.

    uvloop's `add_signal_handler` may call twice if another signal comes just then, as it learns of each in two ways
    (0.23, `Loop._invoke_signals`). SIGHUP and SIGTERM together would then end a drain that has just begun.
    """
    signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))
    signal.siginterrupt(number, False)  # system calls go on, as with asyncio's own


def _in_order(parts: Opened) -> Parts:
    """What is stopped, in order."""
    transport = [Part("the transport", partial(asyncio.to_thread, parts.transport.stop))]
    if parts.probe is not None:
        transport.insert(0, Part("the process that tries NIXL's metadata", parts.probe.close))
    rest = [Part("the HTTP server", partial(asyncio.to_thread, parts.http.close))]
    if parts.traces is not None:
        rest.insert(0, Part("the exporter of traces", partial(asyncio.to_thread, parts.traces.close)))
    return Parts(peers=parts.peers, workers=parts.workers, transport=transport, rest=rest)
