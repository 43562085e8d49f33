"""The requests of workers: each is decoded and checked here, so that no other actor sees an unchecked block id."""

from kvd import limits
from kvd.actors.completion.messages import Acknowledged
from kvd.actors.gateway.admission import Admission
from kvd.actors.gateway.sessions import Session, Sessions
from kvd.actors.gateway.statuses import Statuses
from kvd.actors.leases.messages import OfferBlocks
from kvd.actors.runtime.actor import Component, handles
from kvd.actors.runtime.blocks import check_spans
from kvd.actors.runtime.context import ActorContext
from kvd.actors.scheduler.messages import CancelRequest, StartPull
from kvd.errors import ErrorCode, KvdError, refusal
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec, ticket
from kvd.protocol.worker import Acknowledge, Cancel, Offer, Pull, Request, StatusRequest


class Requests(Component):
    """Passes each request to the actor that serves it."""

    def __init__(self, context: ActorContext, admission: Admission, sessions: Sessions, statuses: Statuses) -> None:
        self._context = context
        self._admission = admission
        self._sessions = sessions
        self._statuses = statuses

    @handles(WorkerFrame)
    def received(self, event: WorkerFrame) -> None:
        """One request, checked and passed on, or refused."""
        session = self._sessions.find(event.session)
        if session is not None and event.uid != session.connection.uid:
            # Not answered: an answer would travel to the session's owner.
            self._context.metrics.refused.labels("worker", ErrorCode.NOT_PERMITTED).inc()
            self._admission.stolen(session.pool.worker, session.connection.uid, event.uid)
            return
        call = 0
        try:
            if session is None:
                self._admission.unknown(event.uid)
                raise refusal(ErrorCode.NOT_ATTACHED, "this routing id belongs to no session; attach first")
            request = codec.worker_requests.decode(event.frame)
            call = getattr(request, "call", 0)
            self._route(request, session)
        except KvdError as error:
            self._sessions.refuse_frame(event.session, call, error)

    def _route(self, request: Request, session: Session) -> None:
        worker = session.pool.worker
        match request:
            case Pull():
                self._check_new(request, session)
                if not limits.MIN_PULL_TIMEOUT <= request.timeout <= limits.MAX_PULL_TIMEOUT:
                    bounds = f"{limits.MIN_PULL_TIMEOUT} to {limits.MAX_PULL_TIMEOUT}"
                    text = f"timeout is {request.timeout} s; it may be {bounds}"
                    raise refusal(ErrorCode.BAD_MESSAGE, text)
                if request.hold and request.spans:
                    raise refusal(ErrorCode.BAD_MESSAGE, "a pull that only holds an offer has no blocks")
                self._context.scheduler.tell(StartPull(session.pool, request, ticket.decode(request.ticket)))
            case Offer():
                self._check_new(request, session)
                self._context.leases.tell(OfferBlocks(session.pool, request))
            case Acknowledge():
                self._context.completion.tell(Acknowledged(worker, request.sequence))
            case Cancel():
                self._context.scheduler.tell(CancelRequest(worker, request))
            case StatusRequest():
                session.connection.allowance.take_status()
                self._statuses.request(request.call, lambda status: self._sessions.answer(worker, status))

    def _check_new(self, request: Pull | Offer, session: Session) -> None:
        self._admission.check_open()
        if session.backlogged:
            text = f"{limits.MAX_UNACKNOWLEDGED} notifications are unacknowledged; poll the client, then try again"
            raise refusal(ErrorCode.OVERLOADED, text)
        session.connection.allowance.take_request()
        check_spans(request.spans, session.pool.spec)
