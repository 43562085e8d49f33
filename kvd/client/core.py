"""The client without its sockets: requests in, frames out; frames in, events out. Its only clock is its arguments."""

import math
from collections.abc import Iterable

from kvd.client.events import Blocks, DaemonError, Disconnected, Event, Reattached, listed, spans
from kvd.client.requests.calls import Calls, Kind
from kvd.client.requests.inbox import EventQueue, Inbox
from kvd.client.requests.offers import Offers
from kvd.client.requests.pulls import Pulls
from kvd.errors import ErrorCode, KvdError, error_from_code, refusal
from kvd.protocol import codec
from kvd.protocol import ticket as tickets
from kvd.protocol import worker as wire


class Core:
    """One worker's session, except its sockets."""

    def __init__(self, name: str) -> None:
        self.events = EventQueue()
        """`take_events` takes them."""
        self._name = name
        self._attached: wire.Attached | None = None
        self._connected = False
        self._pulls = Pulls()
        self._offers = Offers()
        self._calls = Calls()
        self._cancelled: list[str] = []
        """Requests whose cancel may have been lost with the last session."""
        self._frames: list[bytes] = []
        self._inbox = Inbox()
        self._unknown: list[tuple[int, str]] = []
        """Requests that the daemon does not know, each with the notification before which their last one comes."""
        self._reports: dict[int, bytes | KvdError] = {}
        self._refusal = ""
        """What was last said of an attach that was refused."""

    @property
    def attached(self) -> wire.Attached:
        """What the daemon said when it last lent the pool."""
        if self._attached is None:
            raise refusal(ErrorCode.NOT_ATTACHED, "the worker is not attached")
        return self._attached

    @property
    def has_requests(self) -> bool:
        """Whether an offer or a pull is open."""
        return bool(self._offers or self._pulls)

    # --- requests ---------------------------------------------------------------------------------------------------

    def offer(
        self,
        offer: str,
        tokens: int,
        blocks: Iterable[Blocks],
        ttl: float,
        *,
        secret: bytes,
        consumers: int = 1,
        grows: bool = False,
    ) -> bytes:
        """The frame of an offer. One that `grows` has no tokens and no blocks yet."""
        self._check_new(offer)
        call = self._calls.draw()
        frame = _frame_of(wire.Offer(call, offer, tokens, spans(blocks), ttl, secret, consumers, grows))
        self._calls.begin(call, Kind.OFFER, offer)
        self._offers.add(offer)
        return frame

    def extend(self, offer: str, tokens: int, blocks: Iterable[Blocks], *, closes: bool) -> bytes:
        """The frame that extends or closes an offer that grows."""
        self._check_connected()
        if offer not in self._offers:
            raise refusal(ErrorCode.UNKNOWN_REQUEST, f"no offer of this worker is called {offer!r}; it may have ended")
        call = self._calls.draw()
        frame = _frame_of(wire.Extend(call, offer, tokens, spans(blocks), closes))
        self._calls.begin(call, Kind.EXTEND, offer)
        return frame

    def pull(
        self,
        request: str,
        ticket: str,
        blocks: Iterable[Blocks],
        timeout: float,
        now: float,
        *,
        traceparent: str | None = None,
        consumer: str = "",
        hold: bool = False,
    ) -> bytes:
        """The frame of a pull that has to end `timeout` seconds from `now`."""
        self._check_new(request)
        kept = listed(blocks)
        call = self._calls.draw()
        frame = _frame_of(wire.Pull(call, request, ticket, spans(kept), timeout, traceparent, consumer, hold))
        self._calls.begin(call, Kind.PULL, request)
        self._pulls.add(request, kept, now + timeout)
        return frame

    def cancel(self, request: str) -> bytes:
        """The frame that stops a pull or withdraws an offer; its outcome still comes."""
        self._check_connected()
        if request not in self._pulls and request not in self._offers:
            raise refusal(ErrorCode.UNKNOWN_REQUEST, f"no pull and no offer of this worker is called {request!r}")
        return self._cancel(request, Kind.CANCEL)

    def withdraw_unanswered(self, offer: str) -> None:
        """Nobody waits for the answer to this offer any more: withdraws it; its end comes as an event."""
        if offer not in self._offers:
            return
        if self._connected:
            self._frames.append(self._cancel(offer, Kind.SETTLE))
        else:
            self._cancelled.append(offer)

    def status(self) -> tuple[int, bytes]:
        """A frame that requests a status, and the call to give to `status_answer`."""
        self._check_connected()
        call = self._calls.begin(self._calls.draw(), Kind.STATUS)
        return call, codec.encode(wire.StatusRequest(call))

    def ticket(self, offer: str, tokens: int, blocks: Iterable[Blocks], secret: bytes, *, grows: bool = False) -> str:
        """Makes a ticket for this offer without asking the daemon. One that `grows` has no tokens and no blocks yet."""
        attached = self.attached
        rank = tickets.TicketRank(attached.daemon, attached.address, attached.incarnation, self._name, offer, 0, secret)
        return tickets.checked(tickets.Ticket(tokens, (rank,), (spans(blocks),), grows))

    def status_answer(self, call: int) -> bytes | None:
        """The report, once it has arrived.

        Raises:
            KvdError: the daemon refused or is gone.

        """
        answer = self._reports.pop(call, None)
        if isinstance(answer, KvdError):
            raise answer
        return answer

    def abandon_status(self, call: int) -> None:
        """Nobody waits for this status any more."""
        self._calls.answered(call)
        self._reports.pop(call, None)

    def not_sent(self) -> None:
        """The frame made last found no room: forgets its call, and the offer or pull that it would have begun."""
        kind, request = self._calls.take_back()
        if kind in {Kind.OFFER, Kind.PULL}:
            self._offers.refused(request, "", "")
            self._pulls.refused(request, "", "")
            self._forget(request)

    # --- what happens -----------------------------------------------------------------------------------------------

    def on_attached(self, attached: wire.Attached) -> None:
        """The daemon lent the pool, for the first time or again."""
        before = self._attached
        self._attached, self._connected, self._refusal = attached, True, ""
        if before is None:
            return
        same = (before.incarnation, before.tenancy) == (attached.incarnation, attached.tenancy)
        if not same:
            self.on_daemon_gone()
            self._inbox.begin_anew()
        again = [request for request in self._cancelled if request in self._offers or request in self._pulls]
        for request in dict.fromkeys((*self._offers.unanswered(), *self._pulls.overdue(), *again)):
            self._frames.append(self._cancel(request, Kind.SETTLE))
        self.events.put([Reattached(attached.incarnation, same)])

    def on_disconnected(self, error: KvdError) -> None:
        """The session ended; requests stay open: see `kvd.client.requests.pulls`."""
        if not self._connected:
            return
        self._connected = False
        self._frames.clear()
        self._unknown.clear()
        self._inbox.forgive()
        lost = self._calls.lose()
        self._cancelled = [request for kind, request in lost.values() if kind in {Kind.CANCEL, Kind.SETTLE}]
        for call, (kind, _) in lost.items():
            if kind is Kind.STATUS:
                self._reports[call] = refusal(ErrorCode.DAEMON_LOST, error.text)
        self.events.put([Disconnected(error.code, error.text)])

    def on_refused(self, error: KvdError) -> None:
        """The daemon refuses to attach this worker again, or somebody else listens in its place; says so once."""
        if self._refusal != error.text:
            self._refusal = error.text
            self.events.put([Disconnected(error.code, error.text)])

    def on_daemon_gone(self) -> None:
        """The daemon's process has ended: ends every request."""
        self.events.put(self._pulls.daemon_gone())
        self.events.put(self._offers.daemon_gone())

    def on_frame(self, frame: bytes, now: float) -> None:
        """A frame of the daemon.

        Raises:
            BadRequest: it is not a valid reply; drop the connection.

        """
        match codec.worker_replies.decode(frame):
            case wire.Notifications() as batch:
                self._notified(batch, now)
            case wire.Offered(call, ticket):
                kind, request = self._calls.answered(call)
                if kind is Kind.OFFER:
                    self.events.put(self._offers.offered(request, ticket))
            case wire.Extended(call):
                self._calls.answered(call)
            case wire.Error() as error:
                self._refused(error)
            case wire.Status(call, report):
                kind, _ = self._calls.answered(call)
                if kind is Kind.STATUS:
                    self._reports[call] = report

    def on_time(self, now: float) -> None:
        """Ends what should have ended by `now`."""
        if now < self._pulls.next_expiry:
            return
        for event in self._pulls.expire(now):
            self.events.put([event])
            if self._connected:
                self._frames.append(self._cancel(event.request, Kind.SETTLE))

    # --- what follows -----------------------------------------------------------------------------------------------

    @property
    def next_timer(self) -> float:
        """When `on_time`, `lost_notifications` or `take_frames` have something to do; infinite if never."""
        return min(self._pulls.next_expiry, self._inbox.next_timer if self._connected else math.inf)

    def lost_notifications(self, now: float) -> bool:
        """Whether a notification is missing that the daemon did not repeat."""
        return self._inbox.is_lost(now)

    def take_events(self) -> list[Event]:
        """The events since the last call, which count as delivered from now on."""
        self._inbox.hand_out()  # notifications without an event, too
        return self.events.take()

    def take_frames(self, now: float) -> list[bytes]:
        """The core's own frames: an acknowledgement, and queries about requests that seem lost."""
        sequence = self._inbox.acknowledgement(now) if self._connected else None
        if sequence is not None:
            self._frames.append(codec.encode(wire.Acknowledge(sequence)))
        if not self._frames:
            return []
        frames, self._frames = self._frames, []
        return frames

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_connected(self) -> None:
        if not self._connected:
            raise refusal(ErrorCode.DAEMON_LOST, "the daemon cannot be reached; poll() until `Reattached`")

    def _check_new(self, request: str) -> None:
        self._check_connected()
        if request in self._pulls or request in self._offers:
            text = f"{request!r} names an open pull or offer of this worker; use a new name"
            raise refusal(ErrorCode.DUPLICATE_REQUEST, text)
        if request in self.events:  # its events would be taken for those of the next one
            text = f"{request!r} names a pull or offer of which poll() or offer() has more to tell"
            raise refusal(ErrorCode.DUPLICATE_REQUEST, f"{text}; poll first, or use a new name")

    def _forget(self, request: str) -> None:
        """Drops the calls of a request that has ended, and what the daemon does not know of it."""
        if request not in self._pulls and request not in self._offers:
            self._calls.forget(request)
            self._unknown = [(upcoming, name) for upcoming, name in self._unknown if name != request]

    def _cancel(self, request: str, kind: Kind) -> bytes:
        return codec.encode(wire.Cancel(self._calls.begin(self._calls.draw(), kind, request), request))

    def _notified(self, batch: wire.Notifications, now: float) -> None:
        for item in self._inbox.take(batch, now):
            if isinstance(item, wire.Released):
                self.events.put(self._offers.released(item.offer, item.reason))
                self._forget(item.offer)
            else:
                self.events.put(self._pulls.notified(item))
                self._forget(item.request)
        self._end_unknown()

    def _refused(self, error: wire.Error) -> None:
        kind, request = self._calls.answered(error.call)
        match kind:
            case None:
                if error.call == 0:
                    self.events.put([DaemonError(error.code, error.text)])
            case Kind.OFFER:
                self.events.put(self._offers.refused(request, error.code, error.text))
            case Kind.EXTEND:
                self.events.put(self._offers.not_extended(request, error.code, error.text))
            case Kind.PULL:
                self.events.put(self._pulls.refused(request, error.code, error.text))
            case Kind.SETTLE:
                if error.upcoming:
                    self._unknown.append((error.upcoming, request))
                    self._end_unknown()
            case Kind.STATUS:
                self._reports[error.call] = error_from_code(error.code, error.text)
            case Kind.CANCEL:
                pass  # the request has ended, and its outcome is on the way
        self._forget(request)

    def _end_unknown(self) -> None:
        """Ends requests that the daemon does not know, once all that it said of them has arrived.

        Not before: a notification that is on the way would count for the next request of that name.
        """
        ended = [request for upcoming, request in self._unknown if upcoming <= self._inbox.expected]
        self._unknown = [(upcoming, request) for upcoming, request in self._unknown if upcoming > self._inbox.expected]
        for request in ended:
            self.events.put(self._offers.unknown(request))
            self.events.put(self._pulls.unknown(request))
            self._forget(request)


def _frame_of(message: wire.Request) -> bytes:
    """The frame of `message`, decoded as a check: the daemon could not tell which request an unreadable one was."""
    frame = codec.encode(message)
    codec.worker_requests.decode(frame)
    return frame
