"""The daemon: the only place that wires concrete parts together, starts them, and stops them in order."""

import asyncio
import gc
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

import kvd
from kvd import limits
from kvd.actors.build import Dependencies, build_actors
from kvd.actors.gateway import admission as policy
from kvd.actors.handshake.introductions import anybody
from kvd.actors.handshake.peer_server import everything
from kvd.actors.runtime.actor import call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.supervisor import LoggingSupervisor
from kvd.daemon.background import Background
from kvd.daemon.config import Config
from kvd.daemon.health import Health
from kvd.daemon.http import HttpServer
from kvd.daemon.predecessor import wait_for_predecessor
from kvd.daemon.processor import ProcessorWait
from kvd.daemon.rejections import Rejections
from kvd.daemon.shutdown import STOP_SECONDS, Part, Parts, Shutdown
from kvd.daemon.systemd import DescriptorStore, Notifier, received_descriptors
from kvd.daemon.watchdog import Watchdog
from kvd.discovery.directory import Directory, PeersFile
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.host import boot_id, raise_open_files
from kvd.memory.interface import MemoryProvider
from kvd.memory.provider import provider_for
from kvd.memory.stamps import HostStamps
from kvd.metrics import Metrics
from kvd.net import keys
from kvd.net.peers import DESCRIPTORS_PER_LINK, PeerSockets
from kvd.net.trust import Trust
from kvd.net.workers import WorkerSockets
from kvd.protocol.address import export_path, is_local
from kvd.transport.routed import RoutedTransport
from kvd.transport.samehost.transport import SameHostTransport

if TYPE_CHECKING:
    from kvd.daemon.tracing import Traces
    from kvd.transport.nixl.probe import Probe
    from kvd.transport.nixl.transport import NixlTransport


_log = structlog.get_logger("kvd")

_ROUND_SECONDS = 1.0
"""Between rounds of the watchdog."""


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
        self._probe: Probe | None = None
        self._trust: Trust | None = None

    async def serve(self) -> int:
        """Starts, waits for SIGTERM or SIGINT, drains, stops. Returns the exit status: 1 after a failure, else 0."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._escaped)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        await wait_for_predecessor(self.config, self._stopping, self._notifier)
        if not self._stopping.is_set():
            await self._run(loop)
        return 1 if self._failure else 0

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        config = self.config
        raise_open_files(limits.MAX_PEERS * DESCRIPTORS_PER_LINK)
        self._trust = self._load_trust()
        self._directory = self._make_directory()
        provider = provider_for(config.device, config.memory)
        rules = () if config.worker_policy is None else policy.load(config.worker_policy)
        self._http = HttpServer(config.http, self.metrics.registry, self.health)
        workers = policy.Policy(os.geteuid(), rules)
        self._open(loop, provider, workers)
        network = self._network
        self._processor_wait = ProcessorWait(loop, self.metrics, network=lambda: network.pid if network else None)
        self._build(loop, provider, workers)
        self._watchdog = Watchdog(
            loop,
            _ROUND_SECONDS,
            actors=self.actors.all,
            ping=self._transport.ping,
            fed=self._fed,
            metrics=self.metrics,
        )
        self._watchdog.start()
        self._store.drop_unclaimed_after(loop, config.pool_linger)
        self._directory.start()
        gc.freeze()  # what was imported stays; to look through it again and again stopped the loop for 0.1 s
        self.health.set("starting", None)
        self._notifier.ready()
        self._log.info(
            "serving",
            version=kvd.__version__,
            socket=str(config.socket),
            address=self._peer_sockets.address,
            http=self._http.address,
            incarnation=self.incarnation,
            pid=os.getpid(),
            pools_kept=self._store.unclaimed,
        )
        await self._stopping.wait()
        self._directory.stop()
        await self._shut_down()

    def _open(self, loop: asyncio.AbstractEventLoop, provider: MemoryProvider, workers: policy.Policy) -> None:
        """Opens the transport and the sockets."""
        config = self.config
        identity = f"{config.name}#{self.incarnation}"
        same_host = SameHostTransport(
            identity,
            loop,
            export_path(config.listen, str(config.socket)),
            host=boot_id(),
            threads=config.copy_threads,
            device=provider.device,
            mode=0o666 if self._trust or config.insecure else 0o600,  # peers of other users; they show a token
        )
        self._network = network = self._open_network(identity, loop, same_host.lock)
        self._transport = RoutedTransport(same_host, network)
        self._worker_sockets = WorkerSockets(
            str(config.socket),
            mode=int(config.socket_mode, 8),
            may_pass=workers.may_attach,
            ends=network.ends if network else None,
        )
        self._peer_sockets = PeerSockets(
            config.listen,
            identity.encode(),
            config.advertise,
            trust=self._trust,
            on_rejected=Rejections(self.metrics, self._log),
            folder=str(config.socket.absolute().parent),
        )
        self._traces = _traces(config)

    def _open_network(self, agent: str, loop: asyncio.AbstractEventLoop, lock: int) -> "NixlTransport | None":
        """The transport to other hosts, if this daemon listens for them; NIXL takes half a second to start.

        Its process holds `lock`, too: no other daemon takes these pools back while it may write to them.
        """
        if is_local(self.config.listen):
            return None
        from kvd.transport.nixl.probe import Probe  # noqa: PLC0415
        from kvd.transport.nixl.transport import NixlTransport  # noqa: PLC0415
        from kvd.transport.nixl.ucx import nixl_name  # noqa: PLC0415

        try:
            self._probe = Probe(nixl_name())
        except ImportError as error:
            raise refusal(ErrorCode.BAD_CONFIG, f"listen {self.config.listen} needs NIXL: {error}") from error
        devices, ports = self.config.network_devices(), self.config.transport_ports
        transport = NixlTransport(agent, loop, examine=self._probe, devices=devices, ports=ports, held=(lock,))
        self._log.warning(
            "the transport is unprotected",
            devices=os.environ["UCX_NET_DEVICES"],
            ports=os.environ["UCX_TCP_PORT_RANGE"],
            risk="whoever reaches these reads and writes all pools, with or without a key",
        )
        self._probe.start()
        return transport

    def _build(self, loop: asyncio.AbstractEventLoop, provider: MemoryProvider, rules: policy.Policy) -> None:
        """Builds the actors, and lets workers and peers in."""
        context = ActorContext(
            loop=loop,
            settings=self.config.actor_settings(self.incarnation),
            metrics=self.metrics,
            supervisor=LoggingSupervisor(self.metrics, self.fail),
            condition=self.health.set,
            note=self.health.note,
            idle=self._shutdown.is_idle,
            starved=self._processor_wait.starved,
            spans=self._traces,
        )
        dependencies = Dependencies(
            worker_port=self._worker_sockets,
            peer_port=self._peer_sockets,
            transport=self._transport,
            provider=provider,
            background=Background(loop),
            draw_session=lambda: os.urandom(16),
            describe=self._describe,
            transport_died=lambda reason: self.fail(f"the transport died: {reason}"),
            transport_answered=lambda number: self._watchdog.transport_answered(number),  # noqa: PLW0108 - made later
            store=self._store,
            policy=rules,
            stamps=HostStamps(),
            rights=self._trust.pools_of if self._trust else everything,
            speaks_for=self._trust.speaks_for if self._trust else anybody,
        )
        self.actors = build_actors(context, dependencies)

    async def _shut_down(self) -> None:
        self.health.set("stopping", self._failure or "the daemon is stopping")
        self._notifier.stopping(self.config.drain_grace + STOP_SECONDS)
        if not self._failure:
            self._log.info("draining", grace=self.config.drain_grace)
        if left := await self._shutdown.run(self.actors, self._parts(), self.config.drain_grace):
            self.fail(f"{left} did not stop within {STOP_SECONDS:g} s; the process ends without that")
        else:
            self._log.info("stopped", failure=self._failure or None)

    def _parts(self) -> Parts:
        transport = [Part("the transport", partial(asyncio.to_thread, self._transport.stop))]
        if self._probe is not None:
            transport.insert(0, Part("the process that tries NIXL's metadata", self._probe.close))
        rest = [Part("the HTTP server", partial(asyncio.to_thread, self._http.close))]
        if self._traces is not None:
            rest.insert(0, Part("the exporter of traces", partial(asyncio.to_thread, self._traces.close)))
        return Parts(peers=self._peer_sockets, workers=self._worker_sockets, transport=transport, rest=rest)

    def _fed(self) -> None:
        """Every part answered the watchdog."""
        self.health.beat()
        self._notifier.feed()
        reasons = self.health.reasons
        self._notifier.status("; ".join(reasons.values()) or f"serving peers at {self._peer_sockets.address}")

    def _signalled(self, number: int) -> None:
        self._log.info("signal", signal=signal.Signals(number).name)
        if self._stopping.is_set():
            self._shutdown.hurry()
        self._stopping.set()

    def _load_trust(self) -> Trust | None:
        config = self.config
        if config.curve_key is None or config.curve_peers is None:
            return None
        return Trust(keys.load(config.curve_key), config.name, keys.load_allowed(config.curve_peers))

    def _reload(self) -> None:
        """SIGHUP: reads the allow-list again; a bad list changes nothing."""
        if self._trust is None or self.config.curve_peers is None:
            self._log.info("nothing to read again", signal="SIGHUP")
            return
        try:
            allowed = keys.load_allowed(self.config.curve_peers)
        except KvdError as error:
            self._log.error("the allow-list stays as it was", reason=error.text)
            return
        self._trust.replace(allowed)
        self._log.info("allow-list read", peers=len(allowed))
        call(self.actors.peer_server.rights_changed)
        self._directory.refresh()

    def _make_directory(self) -> Directory:
        config, own = self.config, self.config.advertise or self.config.listen
        names = None
        if config.peers_dns:
            from kvd.discovery.names import PeerNames  # noqa: PLC0415 - a resolver that few need takes 40 ms to import

            names = PeerNames(config.peers_dns, config.name, own, self._trust, config.dns_server)
        return Directory(
            PeersFile(config.peers, config.name, own, self._trust) if config.peers else None,
            names,
            lambda addresses: call(self.actors.handshake.expect, addresses),
            self._log,
        )

    def fail(self, reason: str) -> None:
        """Ends the daemon with status 1, as its state may be wrong. That costs only its requests in flight."""
        self._log.error("stopping after a failure", reason=reason)
        self._failure = self._failure or reason
        self._stopping.set()

    def _escaped(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised, which is a bug. Logs it without the arguments that asyncio shows: some are messages."""
        self._log.error("a callback of the loop failed", what=context["message"], exc_info=context.get("exception"))

    def _describe(self) -> dict[str, object]:
        config = self.config
        return {
            "daemon": config.name,
            "version": kvd.__version__,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "address": self._peer_sockets.address,
            "http": self._http.address,
            "device": config.device,
            "ready": not self.health.reasons,
            "not_ready": self.health.reasons,
            "processor": self._processor_wait.status(),
            "totals": {"seconds": time.monotonic(), **self.metrics.totals()},
        }


def _traces(config: Config) -> "Traces | None":
    if not config.traces:
        return None
    try:
        from kvd.daemon.tracing import exporting  # noqa: PLC0415  # OpenTelemetry is an extra
    except ImportError as error:
        text = f"traces is set, but OpenTelemetry is not installed ({error}); pip install 'kvd[otel]'"
        raise refusal(ErrorCode.BAD_CONFIG, text) from error
    return exporting(config.name)
