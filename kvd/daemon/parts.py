"""The parts of a daemon beside its actors: opened in one place, in order, once nobody else has what they need."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from kvd import limits
from kvd.actors.gateway import admission
from kvd.actors.runtime.pace import WarnOnce
from kvd.daemon.config import Config
from kvd.daemon.health import Health
from kvd.daemon.http import HttpServer
from kvd.daemon.processor import ProcessorWait
from kvd.daemon.systemd import Notifier
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.holders import Place, Ports, wait_until_free
from kvd.host import boot_id
from kvd.memory.interface import MemoryProvider
from kvd.memory.provider import provider_for
from kvd.metrics import Metrics
from kvd.net import keys
from kvd.net.addresses import check_own
from kvd.net.lock import Lock
from kvd.net.peers import PeerSockets
from kvd.net.trust import Rejection, Trust
from kvd.net.workers import WorkerSockets
from kvd.protocol.address import REQUESTS, export_path, is_local
from kvd.transport.routed import RoutedTransport
from kvd.transport.samehost.transport import SameHostTransport

if TYPE_CHECKING:
    from kvd.daemon.tracing import Traces
    from kvd.transport.nixl.probe import Probe
    from kvd.transport.nixl.transport import NixlTransport
    from kvd.transport.staged.transport import StagedTransport


T = TypeVar("T")

_TRANSPORT_PORTS = 2
"""Those of NIXL's process, and of the one that tries foreign metadata."""

_log = structlog.get_logger("kvd")


class Background:
    """Runs slow work on a thread of `executor`, or of the loop's: decoding a spec takes milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor | None = None) -> None:
        self._loop = loop
        self._executor = executor

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Runs `work` on a thread, then `done` on the loop, with the result or with why there is none."""

        def attempt() -> T | KvdError:
            try:
                return work()
            except KvdError as error:
                return error
            except Exception as error:  # noqa: BLE001 - reported to the caller
                _log.error("background work failed", exc_info=error)
                return refusal(ErrorCode.INTERNAL, f"internal {type(error).__name__}; see the daemon's log")

        pending = [(attempt, done)]
        """Whoever takes it out has the answer to give; the executor keeps `run` in any case."""

        def run() -> None:
            try:
                taken, answer = pending.pop()
            except IndexError:  # it was refused
                return
            result = taken()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(answer, result)

        try:
            self._loop.run_in_executor(self._executor, run)
        except RuntimeError as error:  # no thread can be started, though one that there is may have begun
            with contextlib.suppress(IndexError):
                pending.pop()
                text = f"no thread for background work: {error}; raise TasksMax (ulimit -u)"
                self._loop.call_soon(done, refusal(ErrorCode.OVERLOADED, text))


class Rejections:
    """Counts every daemon that is refused, and logs each offender once. `log` is a structlog logger."""

    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._once = WarnOnce(log, "kvd_peers_rejected_total")

    def __call__(self, rejection: Rejection) -> None:
        """Counts the rejection, and logs it if the offender is new."""
        self._metrics.peers_rejected.labels(rejection.reason).inc()
        self._once.warn(
            "peer rejected",
            rejection.reason,
            rejection.key,
            reason=rejection.reason,
            key=rejection.key,
            address=rejection.address,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is open."""

    provider: MemoryProvider
    policy: admission.Policy
    transport: RoutedTransport
    probe: "Probe | None"
    """The process that tries NIXL's metadata, if there is a transport to other hosts."""
    workers: WorkerSockets
    peers: PeerSockets
    http: HttpServer
    traces: "Traces | None"
    processor: ProcessorWait


def load_trust(config: Config) -> Trust | None:
    """The keys of this daemon and of those that may connect; None without CURVE.

    Raises:
        BadRequest: `BAD_CONFIG`, a file cannot be read or is not what it should be.

    """
    if config.curve_key is None or config.curve_peers is None:
        return None
    return Trust(keys.load(config.curve_key), config.name, keys.load_allowed(config.curve_peers))


def open_parts(
    config: Config,
    agent: str,
    trust: Trust | None,
    *,
    loop: asyncio.AbstractEventLoop,
    metrics: Metrics,
    health: Health,
    log: Any,
) -> Opened:
    """Opens everything; nobody can connect before the sockets are started. `agent` names this run.

    Raises:
        BadRequest: `BAD_CONFIG`, a part cannot be opened as it is configured.

    """
    mappings = 1 if is_local(config.listen) else 2  # NIXL's process has the other
    provider = provider_for(config.device, config.memory, mappings=mappings)
    rules = () if config.worker_policy is None else admission.load(config.worker_policy)
    policy = admission.Policy(os.geteuid(), rules)
    http = HttpServer(config.http, metrics.registry, health)
    same_host = SameHostTransport(
        agent,
        loop,
        export_path(config.listen, str(config.socket)),
        host=boot_id(),
        threads=config.copy_threads,
        device=provider.device,
        mode=0o666 if trust or config.insecure else 0o600,  # peers of other users; they show a token
    )
    network, probe = _open_network(config, agent, loop, same_host.lock, log)
    return Opened(
        provider=provider,
        policy=policy,
        transport=RoutedTransport(same_host, _with_staging(network, provider.device, config.copy_threads, loop)),
        probe=probe,
        workers=WorkerSockets(
            str(config.socket),
            mode=int(config.socket_mode, 8),
            may_pass=policy.may_attach,
            ends=network.ends if network else None,
        ),
        peers=PeerSockets(
            config.listen,
            agent.encode(),
            config.advertise,
            trust=trust,
            on_rejected=Rejections(metrics, log),
            folder=str(config.socket.absolute().parent),
        ),
        http=http,
        traces=_open_traces(config),
        processor=ProcessorWait(loop, metrics, network=lambda: network.pid if network else None),
    )


def _open_network(
    config: Config, agent: str, loop: asyncio.AbstractEventLoop, lock: int, log: Any
) -> "tuple[NixlTransport | None, Probe | None]":
    """The transport to other hosts, if this daemon listens for them; NIXL takes half a second to start.

    Its process holds `lock`, too: no other daemon takes these pools back while it may write to them.
    """
    if is_local(config.listen):
        return None, None
    from kvd.transport.nixl.probe import Probe  # noqa: PLC0415
    from kvd.transport.nixl.transport import NixlTransport  # noqa: PLC0415
    from kvd.transport.nixl.ucx import nixl_name  # noqa: PLC0415

    try:
        probe = Probe(nixl_name())
    except ImportError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"listen {config.listen} needs NIXL: {error}") from error
    devices, ports = config.network_devices(), config.transport_ports
    transport = NixlTransport(agent, loop, examine=probe, devices=devices, ports=ports, held=(lock,))
    log.warning(
        "the transport is unprotected",
        devices=os.environ["UCX_NET_DEVICES"],
        ports=os.environ["UCX_TCP_PORT_RANGE"],
        risk="whoever reaches these reads and writes all pools, with or without a key",
    )
    probe.start()
    return transport, probe


def _with_staging(
    network: "NixlTransport | None", device: str, threads: int, loop: asyncio.AbstractEventLoop
) -> "StagedTransport | None":
    """The network for pools on a GPU, and for reads of those of others."""
    if network is None:
        return None
    from kvd.transport.staged.host import staged  # noqa: PLC0415 - as late as NIXL

    return staged(network, loop, device=device, threads=threads)


def _open_traces(config: Config) -> "Traces | None":
    if not config.traces:
        return None
    try:
        from kvd.daemon.tracing import exporting  # noqa: PLC0415  # OpenTelemetry is an extra
    except ImportError as error:
        text = f"traces is set, but OpenTelemetry is not installed ({error}); pip install '.[otel]' in a clone of kvd"
        raise refusal(ErrorCode.BAD_CONFIG, text) from error
    return exporting(config.name)


async def wait_for_predecessor(config: Config, stopping: asyncio.Event, notifier: Notifier) -> None:
    """Returns when all is free that this daemon opens, after `limits.PREDECESSOR_SECONDS`, or when it is to stop.

    Raises:
        BadRequest: `BAD_CONFIG`, the address to listen on is malformed.

    """

    def tell(what: str) -> None:
        _log.warning("waiting for what another process has", what=what, seconds=limits.PREDECESSOR_SECONDS)
        # As long again for the rest of the start.
        notifier.starting(f"waiting for {what}", 2 * limits.PREDECESSOR_SECONDS)

    await wait_until_free(_places(config), stopping, tell)


def _places(config: Config) -> list[Place]:
    listen, socket = config.listen, str(config.socket)
    paths = {socket, socket + REQUESTS, export_path(listen, socket)}
    places: list[Place] = [*Ports.of(config.http)]
    if (path := check_own(listen)["path"]) is not None:
        paths.add(path)
    else:
        places += Ports.of(listen.removeprefix("tcp://"))
    if not is_local(listen):
        first, last = map(int, config.transport_ports.split("-"))
        places.append(Ports(config.unprotected_transport, first, last, _TRANSPORT_PORTS))
    return [*places, *(Lock(path) for path in sorted(paths))]
