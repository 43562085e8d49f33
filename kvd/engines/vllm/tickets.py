"""Tickets of offers that end when they are read once, and which several requests may have.

They are samples of one prompt, or one that a router sends to have the offer let go of. One of them pulls; the others
wait, and find its blocks in the prefix cache. Once that pull has ended well, or was cancelled, or a request has let go
of the ticket, the offer is over: a pull could only fail.
"""

from kvd.engines.vllm.transfer_params import TransferParams
from kvd.limits import MAX_ENDED_TICKETS


class Tickets:
    """Of what requests were `offered`; those of offers that may be read more than once are not looked at."""

    def __init__(self) -> None:
        self._pulled: dict[str, str] = {}
        """By the request that pulls."""
        self._in_pull: set[str] = set()
        self._ended: dict[int, None] = {}
        """Hashes of those whose offer is over, the latest last."""

    def pull(self, request: str, offered: TransferParams) -> None:
        """The `request` pulls: others wait for its `end`, or for it to `fail`."""
        if offered.once:
            self._pulled[request] = offered.ticket
            self._in_pull.add(offered.ticket)

    def fail(self, request: str) -> None:
        """Its pull has failed: the next one pulls."""
        self._in_pull.discard(self._pulled.pop(request, ""))

    def end(self, request: str) -> None:
        """Its pull has ended well or is cancelled, if it had one that has not failed."""
        if (ticket := self._pulled.pop(request, None)) is not None:
            self._in_pull.discard(ticket)
            self._remember(ticket)

    def let_go(self, offered: TransferParams) -> None:
        """A request reads nothing of it, which the daemons are told."""
        if offered.once:
            self._remember(offered.ticket)

    def is_pulled(self, offered: TransferParams) -> bool:
        """Whether a request pulls."""
        return offered.once and offered.ticket in self._in_pull

    def is_over(self, offered: TransferParams) -> bool:
        """Whether the offer is over, as a request of this engine has read it or let go of it."""
        return offered.once and hash(offered.ticket) in self._ended

    def _remember(self, ticket: str) -> None:
        self._ended[hash(ticket)] = None
        if len(self._ended) > MAX_ENDED_TICKETS:
            del self._ended[next(iter(self._ended))]
