"""The gateway: checks everything that workers send, and passes it to the other actors."""

from collections.abc import Callable

from kvd.actors.gateway.admission import Admission
from kvd.actors.gateway.connections import Connections
from kvd.actors.gateway.policy import Policy
from kvd.actors.gateway.requests import Requests
from kvd.actors.gateway.sessions import Sessions
from kvd.actors.gateway.statuses import Statuses
from kvd.actors.runtime.actor import Actor, OnFailure, handles
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.loop import Background
from kvd.actors.runtime.messages import Drain, Stop
from kvd.net.interface import WorkerPort


class GatewayActor(Actor):
    """A failure concerns one message of one worker: it is reported, and the others go on."""

    name = "gateway"
    on_failure = OnFailure.RESUME

    def __init__(
        self,
        context: ActorContext,
        port: WorkerPort,
        *,
        peer_address: Callable[[], str],
        draw_session: Callable[[], bytes],
        describe: Callable[[], dict[str, object]],
        policy: Policy,
        background: Background,
    ) -> None:
        super().__init__(context.dispatcher)
        self._admission = Admission(policy, context.loop)
        self.sessions = Sessions(
            context,
            port,
            peer_address=peer_address,
            draw_id=draw_session,
            hang_up=lambda connection: self._connections.hang_up(connection),  # noqa: PLW0108 - made below
        )
        self._statuses = Statuses(
            context, lambda: {**describe(), "workers": self.sessions.workers, "worker_pids": self.sessions.pids}
        )
        self._connections = Connections(
            context,
            port,
            admission=self._admission,
            sessions=self.sessions,
            statuses=self._statuses,
            background=background,
        )
        requests = Requests(context, self._admission, self.sessions, self._statuses)
        for component in (self.sessions, self._statuses, self._connections, requests):
            self.serve(component)

    @handles(Drain)
    def drain(self, _message: Drain) -> None:
        """Nothing new is accepted; what was accepted still gets its outcome."""
        self._admission.close()

    @handles(Stop)
    def stop(self, _message: Stop) -> None:
        """Hangs up on every worker, after what was sent to it."""
        self._connections.close_all()
