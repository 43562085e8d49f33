"""Tickets of offers that end when they are read once, and which several requests may have.

They are samples of one prompt, or one that a router sends to have the offer let go of. One of them pulls; the others
wait, and find its blocks in the prefix cache. If its pull is cancelled, or a request that queues is aborted, the offer
is over all the same, but for requests that hold it. The others fail then, as if they had pulled: a router that only
wants the offer let go of must not have this engine compute the prompt.
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
        """Hashes of those that were used, the latest last; and whether this engine got their blocks, or made them."""

    def pull(self, request: str, offered: TransferParams) -> None:
        """The `request` pulls: others wait until that ends, fails or is cancelled."""
        if offered.once:
            self._pulled[request] = offered.ticket
            self._in_pull.add(offered.ticket)

    def fail(self, request: str) -> None:
        """Its pull has failed: the next one pulls."""
        self._in_pull.discard(self._pulled.pop(request, ""))

    def end(self, request: str) -> None:
        """Its pull has ended well, if it had one that has neither failed nor was cancelled."""
        self._end(request, here=True)

    def cancel(self, request: str) -> None:
        """Its pull is cancelled, if it had one that has not failed."""
        self._end(request, here=False)

    def let_go(self, offered: TransferParams, *, here: bool) -> None:
        """A request reads nothing of it, which the daemons are told: its blocks are `here`, or it has ended."""
        if offered.once:
            self._remember(offered.ticket, here=here)

    def is_pulled(self, offered: TransferParams) -> bool:
        """Whether a request pulls."""
        return offered.once and offered.ticket in self._in_pull

    def is_over(self, offered: TransferParams) -> bool:
        """Whether it was used: there is nothing to let go of."""
        return offered.once and hash(offered.ticket) in self._ended

    def is_here(self, offered: TransferParams) -> bool:
        """Whether a request has brought its blocks, or had them: what is still in the cache is found there."""
        return offered.once and self._ended.get(hash(offered.ticket), False)

    def is_lost(self, offered: TransferParams) -> bool:
        """Whether requests have let go of it, and none has brought its blocks: only who holds the offer can pull."""
        return offered.once and not self._ended.get(hash(offered.ticket), True)

    def _end(self, request: str, *, here: bool) -> None:
        if (ticket := self._pulled.pop(request, None)) is not None:
            self._in_pull.discard(ticket)
            self._remember(ticket, here=here)

    def _remember(self, ticket: str, *, here: bool) -> None:
        self._ended[hash(ticket)] = here or self._ended.get(hash(ticket), False)
        if len(self._ended) > MAX_ENDED_TICKETS:
            del self._ended[next(iter(self._ended))]
