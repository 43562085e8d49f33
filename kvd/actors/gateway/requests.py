"""The requests of workers: each is decoded and checked here, so that no other actor sees an unchecked block id."""

from collections.abc import Callable

from kvd import limits
from kvd.actors.completion.actor import CompletionActor
from kvd.actors.completion.sessions import Session, Sessions
from kvd.actors.gateway.admission import Admission
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.runtime.actor import Actor, Component, run
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.pools import check_spans
from kvd.actors.scheduler.actor import SchedulerActor
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec, ticket
from kvd.protocol.worker import Acknowledge, Cancel, Extend, Offer, Pull, Request, Status, StatusRequest


class Requests(Component):
    """Passes each request to the actor that serves it."""

    def __init__(
        self,
        actor: Actor,
        context: ActorContext,
        *,
        admission: Admission,
        sessions: Sessions,
        status: Callable[[int], Status],
        scheduler: SchedulerActor,
        leases: LeasesActor,
        completion: CompletionActor,
    ) -> None:
        self.actor = actor
        self._context = context
        self._admission = admission
        self._sessions = sessions
        self._status = status
        self._scheduler = scheduler
        self._leases = leases
        self._completion = completion

    def received(self, event: WorkerFrame) -> None:
        """One request, checked and passed on, or refused."""
        session = self._sessions.find(event.session)
        if session is not None and event.uid != session.uid:
            # Not answered: an answer would travel to the session's owner.
            self._context.metrics.refused.labels("worker", ErrorCode.NOT_PERMITTED).inc()
            self._admission.stolen(session.pool.name, session.uid, event.uid)
            return
        number = 0
        try:
            if session is None:
                self._admission.unknown(event.uid)
                raise refusal(ErrorCode.NOT_ATTACHED, "this routing id belongs to no session; attach first")
            request = codec.worker_requests.decode(event.frame)
            number = getattr(request, "call", 0)
            self._route(request, session)
        except KvdError as error:
            self._sessions.refuse_frame(event.session, number, error)

    def _route(self, request: Request, session: Session) -> None:
        worker = session.pool.name
        match request:
            case Pull():
                self._check_new(request, session)
                if not limits.MIN_PULL_TIMEOUT <= request.timeout <= limits.MAX_PULL_TIMEOUT:
                    bounds = f"{limits.MIN_PULL_TIMEOUT} to {limits.MAX_PULL_TIMEOUT}"
                    text = f"timeout is {request.timeout} s; it may be {bounds}"
                    raise refusal(ErrorCode.BAD_MESSAGE, text)
                if request.hold and request.spans:
                    raise refusal(ErrorCode.BAD_MESSAGE, "a pull that only holds an offer has no blocks")
                run(self._scheduler.start, session.pool, request, ticket.decode(request.ticket))
            case Offer():
                self._check_new(request, session)
                run(self._leases.offer, session.pool, request)
            case Extend():
                self._admission.take_request(session.connection)
                check_spans(request.spans, session.pool.spec)
                run(self._leases.extend, worker, request)
            case Acknowledge():
                run(self._completion.acknowledged, worker, request.sequence)
            case Cancel():
                run(self._scheduler.cancel, worker, request)
            case StatusRequest():
                self._admission.take_status(session.connection)
                self._sessions.answer(worker, self._status(request.call))

    def _check_new(self, request: Pull | Offer, session: Session) -> None:
        self._admission.check_open()
        if session.backlogged:
            text = f"{limits.MAX_UNACKNOWLEDGED} notifications are unacknowledged; poll the client, then try again"
            raise refusal(ErrorCode.OVERLOADED, text)
        self._admission.take_request(session.connection)
        check_spans(request.spans, session.pool.spec)
