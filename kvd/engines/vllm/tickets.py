"""Tickets of offers that end when they are read once, and which several requests may have.

They are samples of one prompt, or one that a router sends to have the offer let go of. One of them pulls; the others
wait, and find its blocks in the prefix cache. Once that pull has ended well, the offer is over: a pull could only fail.
So it is once a pull was cancelled, or a request has let go of the ticket, but for requests that hold the offer.
"""

from kvd.engines.vllm.transfer_params import TransferParams
from kvd.limits import MAX_ENDED_TICKETS


class Tickets:
    """Of what requests were `offered`; those of offers that may be read more than once are not looked at."""

    def __init__(self) -> None:
        self._pulled: dict[str, str] = {}
        """By the request that pulls."""
        self._in_pull: set[str] = set()
        self._ended: dict[int, bool] = {}
        """Hashes of those that were used, the latest last; and whether their blocks have been read."""

    def pull(self, request: str, offered: TransferParams) -> None:
        """The `request` pulls: others wait for its `end`, or for it to `fail`."""
        if offered.once:
            self._pulled[request] = offered.ticket
            self._in_pull.add(offered.ticket)

    def fail(self, request: str) -> None:
        """Its pull has failed: the next one pulls."""
        self._in_pull.discard(self._pulled.pop(request, ""))

    def end(self, request: str) -> None:
        """Its pull has ended well, if it had one that has neither failed nor was cancelled."""
        self._end(request, read=True)

    def cancel(self, request: str) -> None:
        """Its pull is cancelled, if it had one that has not failed."""
        self._end(request, read=False)

    def let_go(self, offered: TransferParams) -> None:
        """A request reads nothing of it, which the daemons are told."""
        if offered.once:
            self._remember(offered.ticket, read=False)

    def is_pulled(self, offered: TransferParams) -> bool:
        """Whether a request pulls."""
        return offered.once and offered.ticket in self._in_pull

    def is_over(self, offered: TransferParams, *, held: bool) -> bool:
        """Whether the offer is over, or would be but for this request, which has `held` it, and finds the blocks here.

        A request of this engine has read it or let go of it.
        """
        read = self._ended.get(hash(offered.ticket)) if offered.once else None
        return read is not None and (read or not held)

    def _end(self, request: str, *, read: bool) -> None:
        if (ticket := self._pulled.pop(request, None)) is not None:
            self._in_pull.discard(ticket)
            self._remember(ticket, read=read)

    def _remember(self, ticket: str, *, read: bool) -> None:
        self._ended[hash(ticket)] = read or self._ended.get(hash(ticket), False)
        if len(self._ended) > MAX_ENDED_TICKETS:
            del self._ended[next(iter(self._ended))]
