"""The gateway: checks everything that workers send, and passes it to the other actors."""

from collections.abc import Callable

import msgspec

from kvd.actors.completion.actor import CompletionActor
from kvd.actors.completion.sessions import Sessions
from kvd.actors.gateway.admission import Admission, Policy
from kvd.actors.gateway.connections import Connections
from kvd.actors.gateway.requests import Requests
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.runtime.actor import Actor, OnFailure, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.loop import Background
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.net.interface import ProcessEnded, SessionClosed, SessionFrame, SessionOpened, WorkerEvent, WorkerPort
from kvd.protocol.status import ProcessStatus, StatusReport
from kvd.protocol.worker import Status


class GatewayActor(Actor):
    """A failure concerns one message of one worker: it is reported, and the others go on.

    `describe` gives what no actor reports in a status.
    """

    name = "gateway"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: WorkerPort,
        *,
        sessions: Sessions,
        pools: PoolsActor,
        handshake: HandshakeActor,
        leases: LeasesActor,
        scheduler: SchedulerActor,
        completion: CompletionActor,
        peer_address: Callable[[], str],
        draw_session: Callable[[], bytes],
        describe: Callable[[], ProcessStatus],
        policy: Policy,
        background: Background,
    ) -> None:
        super().__init__(context.dispatcher)
        self._describe = describe
        self._sessions = sessions
        self._pools = pools
        self._handshake = handshake
        self._leases = leases
        self._scheduler = scheduler
        self._completion = completion
        self._admission = Admission(policy, context.loop)
        self.connections = Connections(
            self,
            context,
            port,
            admission=self._admission,
            sessions=sessions,
            status=self._status,
            peer_address=peer_address,
            draw_session=draw_session,
            background=background,
            pools=pools,
            scheduler=scheduler,
            leases=leases,
            completion=completion,
        )
        self._requests = Requests(
            self,
            context,
            admission=self._admission,
            sessions=sessions,
            status=self._status,
            scheduler=scheduler,
            leases=leases,
            completion=completion,
        )

    def received(self, event: WorkerEvent) -> None:
        """Takes an event of the workers' sockets."""
        match event:
            case SessionFrame():
                call(self.connections.received, event)
            case SessionOpened():
                call(self.connections.opened, event)
            case SessionClosed():
                call(self.connections.closed, event)
            case ProcessEnded():
                call(self.connections.process_ended, event)
            case _:
                call(self._requests.received, event)

    def _status(self, number: int) -> Status:
        """The answer to the request for a status of that number."""
        report = StatusReport(
            **msgspec.structs.asdict(self._describe()),
            workers=self._sessions.workers,
            worker_pids=self._sessions.pids,
            pools=self._pools.report(),
            handshake=self._handshake.report(),
            leases=self._leases.report(),
            scheduler=self._scheduler.report(),
            completion=self._completion.report(),
        )
        return Status(number, msgspec.json.encode(report))

    def drain(self) -> None:
        """Nothing new is accepted; what was accepted still gets its outcome."""
        self._admission.close()

    def stop(self) -> None:
        """Hangs up on every worker, after what was sent to it."""
        self.connections.close_all()
