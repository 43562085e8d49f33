"""Where an engine's daemons are, as its answers say it in tickets and in `kvd_producer`.

vLLM tells of daemons that have changed after it has finished a step's requests and before it sends their outputs: what
it has not sent yet is put right.
"""

from typing import Any

from kvd.client.events import spans
from kvd.engines.vllm import transfer_params
from kvd.engines.vllm.growing import params as growing_params
from kvd.engines.vllm.metadata import OfferOrder, RankEndpoint
from kvd.errors import ErrorCode, refusal
from kvd.protocol.ticket import Ticket, TicketRank


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
