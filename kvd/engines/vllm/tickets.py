"""Tickets of offers that end when they are read once, and which several requests may have.

They are samples of one prompt, or one that a router sends to have the offer let go of. One of them pulls; the others
wait, and find its blocks in the prefix cache. If its pull is cancelled, or a request that queues is aborted, the offer
is over all the same, but for requests that hold it. The others fail then, as if they had pulled: a router that only
wants the offer let go of must not have this engine compute the prompt.

Where an engine's daemons are, its answers say in tickets and in `kvd_producer`. vLLM tells of daemons that have changed
after it has finished a step's requests and before it sends their outputs: what it has not sent yet is put right.
"""

from typing import Any

from kvd.client.events import spans
from kvd.engines.vllm import transfer_params
from kvd.engines.vllm.growing import params as growing_params
from kvd.engines.vllm.metadata import OfferOrder, RankEndpoint
from kvd.engines.vllm.transfer_params import TransferParams
from kvd.errors import ErrorCode, refusal
from kvd.limits import MAX_ENDED_TICKETS
from kvd.protocol.ticket import Ticket, TicketRank


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


class Answers:
    """Of an engine with so many `ranks`.

    `alone` says whether requests to its address all come to it: routers are then told where its daemons are.
    """

    def __init__(self, ranks: int, *, alone: bool) -> None:
        self._ranks = ranks
        self._alone = alone
        self._endpoints: dict[int, RankEndpoint] = {}
        self._of_step: list[tuple[dict[str, Any], OfferOrder]] = []
        """This step's answers, which vLLM has not sent yet, and what they are about."""

    def add(self, params: dict[str, Any], order: OfferOrder) -> None:
        """An answer of this step, whose ticket, if it has one, is for what `order` offers."""
        self._of_step.append((params, order))
        self._name_producer(params)

    def are_sent(self) -> None:
        """Another step begins: vLLM has sent those of the one before."""
        self._of_step.clear()

    def set_endpoints(self, endpoints: dict[int, RankEndpoint]) -> None:
        """The daemons of these ranks became known or changed."""
        self._endpoints.update(endpoints)
        for params, order in self._of_step:
            if "kvd_ticket" in params:
                transfer_params.put_ticket(params, self.ticket(order))
            self._name_producer(params)

    def ticket(self, order: OfferOrder) -> str:
        """The ticket for what `order` offers on every rank.

        Raises:
            InternalError: a rank has not said where its daemon is.

        """
        ranks = tuple(
            TicketRank(rank.daemon, rank.address, rank.incarnation, rank.pool, order.offer, 0, order.secret)
            for rank in self._ranks_endpoints()
        )
        return Ticket(order.tokens, ranks, (spans(order.blocks),)).encode()

    def _name_producer(self, params: dict[str, Any]) -> None:
        """Says where this engine's daemons are, unless what is answered is a turn."""
        if transfer_params.is_consumer(params) and (self._alone or growing_params.is_growing(params)):
            params["kvd_producer"] = growing_params.producer(self._ranks_endpoints())

    def _ranks_endpoints(self) -> list[RankEndpoint]:
        if len(self._endpoints) != self._ranks:
            text = f"only ranks {sorted(self._endpoints)} of {self._ranks} said where their daemon is"
            raise refusal(ErrorCode.INTERNAL, text)
        return [endpoint for _, endpoint in sorted(self._endpoints.items())]
