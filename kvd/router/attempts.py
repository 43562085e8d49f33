"""What earlier attempts at a request left for the next one."""

import time
from dataclasses import dataclass, field

import msgspec

from kvd.router import limits
from kvd.router.answer import ServerFailed
from kvd.router.engines import Prefilled
from kvd.router.growing import Early
from kvd.router.legs import Meeting
from kvd.router.servers import Server, rest, served, unknown


@dataclass(slots=True)
class Attempts:
    """What earlier attempts left: who failed, and the offer of a prefill that no decode server is known to have."""

    tried: set[Server] = field(default_factory=set)
    suspects: set[Server] = field(default_factory=set)
    """Those of them that failed, unless the request is at fault."""
    finds_out: dict[Server, tuple[float, float]] = field(default_factory=dict)
    """Servers that have failed before, and get this request to show whether they still do; since when, and until when
    others wait for that."""
    prefilled: Prefilled | None = None
    left_over: list[Prefilled] = field(default_factory=list)
    """Offers that were to be read by servers that then failed. They are released once the request is `settled`."""
    prefill: Server | None = None
    meeting: Meeting | None = None
    """Of a prefill on a server of SGLang's; it withdraws the offer when it is ended."""
    refused_by: Server | None = None
    """The decode server whose refusal is the answer."""
    turn: msgspec.Raw | None = None
    """What the conversation's last turn left."""
    early: Early | None = None
    """The prefill that goes on."""
    in_turn: bool = False
    """Both servers are not asked at once any more."""
    taken: bool = False
    """The decode server's engine has begun the answer: if it aborts that, it lets go of the offer, too. One that says
    an error need not have the request: vLLM refuses some in the stream."""
    answered: bool = False
    """The decode server has begun the answer that the client gets."""
    settled: bool = False
    """It is known who does not fail: one serves the request, or there is no further attempt."""
    asked_first: Server | None = None
    """The decode server that is asked first to release an offer: it serves the request, or was the last one asked."""
    left: bool = False
    """The client has left."""

    def failed(self, failure: ServerFailed) -> None:
        """A server has failed the request."""
        self.tried.add(failure.server)
        if failure.lost:
            self._is_at_fault(failure.server)
        else:
            self.suspects.add(failure.server)

    def served(self, server: Server) -> None:
        """The request can be served, as `server` has: so those of its role that failed are at fault."""
        served(server)
        for suspect in [one for one in self.suspects if one.role == server.role]:
            self.suspects.remove(suspect)
            self._is_at_fault(suspect)

    def find_out_no_more(self) -> None:
        """Leaves what the request has not found out to the next ones: its client has left, or it is at fault itself.

        Such are also those that the server refused, which says nothing of others.

        Not so if its client has left, and has waited for so long that it may have left for that.
        """
        now = time.monotonic()
        for server, (asked, until) in self.finds_out.items():
            if not self.left or now - asked < limits.REST_SECONDS:
                unknown(server, until)

    def leave(self) -> None:
        """Ends the meeting, if there is one."""
        if self.meeting is not None:
            self.meeting.end()
            self.meeting = None

    def _is_at_fault(self, server: Server) -> None:
        self.finds_out.pop(server, None)
        rest(server, time.monotonic())
