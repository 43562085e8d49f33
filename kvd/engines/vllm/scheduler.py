"""The scheduler's half: decides what is offered, pulled and cancelled. It talks to no daemon.

A request on the decode side: `arrived` reads its handover; `external` says how many tokens will come; once vLLM has
given it blocks, `allocated` orders the pull of those that it misses; `finished` cancels it if that is still running.
On the prefill side: `finished` orders the offer and returns the ticket, which is known without asking the daemons.

The decode engine computes the last token of the prompt itself, to sample from it. So it needs what attention to that
token needs: with sliding or chunked windows that can be a block more than a prefill of the whole prompt keeps. Then the
prefill engine leaves the last token out (`arrived`), as vLLM's own connector does for recurrent models.
"""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from kvd.client import Blocks
from kvd.client.blocks import spans
from kvd.engines.vllm import transfer_params as handover
from kvd.engines.vllm.metadata import OfferOrder, Orders, PullOrder, RankPlace
from kvd.engines.vllm.transfer_params import Handover
from kvd.errors import BadRequest, ErrorCode, InternalError
from kvd.layout import Window
from kvd.limits import MAX_REQUEST_ID_BYTES, SECRET_BYTES
from kvd.protocol.ticket import Ticket, TicketRank

_NULL_BLOCK = 0
"""vLLM's block id for positions that a request has no block at."""

_COMPLETE = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}

logger = logging.getLogger(__name__)


class SchedulerSide:
    """See the module's text. `groups` are windows and tokens a block of each KV cache group; `ranks` the workers."""

    def __init__(self, groups: Sequence[tuple[Window, int]], ranks: int) -> None:
        self._groups = tuple(groups)
        self._ranks = ranks
        self._places: dict[int, RankPlace] = {}
        self._handovers: dict[str, Handover] = {}
        """Of requests whose ticket has not been used."""
        self._computed: dict[str, int] = {}
        self._loading: dict[str, str] = {}
        """Pull of each request that waits for one."""
        self._orders = Orders()
        self._fresh: list[tuple[dict[str, Any], OfferOrder]] = []
        """Tickets of this step, which vLLM has not sent yet."""
        self._nonce = os.urandom(4).hex()
        self._names = 0

    # --- what vLLM's scheduler tells --------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request."""
        params = request.kv_transfer_params
        if handover.is_consumer(params):
            prompt, tokens = request.prompt_token_ids, request.num_prompt_tokens
            self._handovers[request.request_id] = handover.read(params, prompt, tokens)
        elif handover.is_producer(params) and self._keeps_too_little(request):
            _leave_out_last_token(request)

    def external(self, request: Any, computed: int) -> int:
        """Tokens that a pull will bring after the `computed` ones that are here; 0 to compute them all."""
        offered = self._handovers.get(request.request_id)
        if offered is None:
            return 0
        self._computed[request.request_id] = computed
        wanted: int = request.num_prompt_tokens - 1
        return max(0, min(offered.tokens, wanted) - computed)

    def allocated(self, request: Any, blocks: Sequence[Sequence[Any]], external: int) -> None:
        """VLLM gave the request `blocks` [group][position], with room for `external` tokens to come."""
        offered = self._handovers.pop(request.request_id, None)
        if offered is None:
            return
        tokens = self._computed.pop(request.request_id, 0) + external
        if external == 0:
            self._let_go(request, offered)
            return
        pull = self._name(request.request_id)
        self._loading[request.request_id] = pull
        missing = tuple(self._missing(blocks, tokens))
        refused = offered.refused
        if len({part.group for part in missing}) < len(missing):
            refused = "the prefix cache holds blocks between those that are missing, which kvd will not overwrite"
        self._orders.pulls.append(
            PullOrder(request.request_id, pull, offered.ticket, missing, waits=True, refused=refused)
        )

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The request has ended. Returns what goes to the router if its blocks are offered; vLLM then keeps them."""
        self._computed.pop(request.request_id, None)
        offered = self._handovers.pop(request.request_id, None)
        if offered is not None:
            self._let_go(request, offered)
        pull = self._loading.get(request.request_id)
        if pull is not None:
            self._orders.cancels.append(pull)
            return None
        if not handover.is_producer(request.kv_transfer_params) or request.status.name not in _COMPLETE:
            return None
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_prompt_tokens)
        held = self._held(block_ids, tokens)
        if not held:
            return None
        try:
            consumers = handover.consumers(request.kv_transfer_params)
        except BadRequest as error:
            logger.warning("the KV blocks of request %s are not offered: %s", request.request_id, error.text)
            return None
        name, secret = self._name(request.request_id), secrets.token_bytes(SECRET_BYTES)
        order = OfferOrder(request.request_id, name, tokens, held, secret, consumers)
        self._orders.offers.append(order)
        params = handover.write(self._ticket(order), tokens, request.prompt_token_ids)
        self._fresh.append((params, order))
        return params

    def take_orders(self) -> Orders:
        """What the workers have to do in the next step."""
        self._fresh.clear()
        orders, self._orders = self._orders, Orders()
        return orders

    # --- what the workers tell --------------------------------------------------------------------------------------

    def received(self, requests: Iterable[str]) -> None:
        """Nothing is written to the blocks of these requests any more."""
        for request in requests:
            self._loading.pop(request, None)

    def moved(self, places: dict[int, RankPlace]) -> None:
        """Daemons of these ranks are known now, or are others. Tickets that have not been sent yet name the new ones.

        vLLM tells this after it finished the step's requests and before it sends their outputs.
        """
        self._places.update(places)
        for params, order in self._fresh:
            params["kvd_ticket"] = self._ticket(order)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _keeps_too_little(self, request: Any) -> bool:
        """Whether the prefill of the whole prompt drops blocks that computing its last token once more needs."""
        tokens = request.num_prompt_tokens
        if tokens < 2 or request.get_skip_reading_prefix_cache():
            return False
        return any(
            not set(window.needed(tokens - 1, block_tokens)) <= set(window.needed(tokens, block_tokens))
            for window, block_tokens in self._groups
        )

    def _let_go(self, request: Any, offered: Handover) -> None:
        """Tell the producer that its blocks are not needed."""
        if not offered.refused:
            name = self._name(request.request_id)
            self._orders.pulls.append(PullOrder(request.request_id, name, offered.ticket, (), waits=False))

    def _missing(self, blocks: Sequence[Sequence[Any]], tokens: int) -> Iterable[Blocks]:
        """The blocks that attention to the next token needs and that are not here; here are those with a hash."""
        for group, (window, block_tokens) in enumerate(self._groups):
            table = blocks[group]
            wanted = [
                position
                for position in window.needed(tokens, block_tokens)
                if not table[position].is_null and table[position].block_hash is None
            ]
            yield from _runs(group, wanted, [table[position].block_id for position in wanted])

    def _held(self, block_ids: Sequence[Sequence[int]], tokens: int) -> tuple[Blocks, ...]:
        """Of each group the blocks at the end without a gap: attention to the next token needs none before a gap."""
        held = []
        for group, (_, block_tokens) in enumerate(self._groups):
            table = block_ids[group][: -(-tokens // block_tokens)]
            positions = [position for position, block in enumerate(table) if block != _NULL_BLOCK]
            held += list(_runs(group, positions, [table[position] for position in positions]))[-1:]
        return tuple(held)

    def _ticket(self, order: OfferOrder) -> str:
        if len(self._places) != self._ranks:
            text = f"places of ranks {sorted(self._places)} are known, the engine has {self._ranks} ranks"
            raise InternalError(ErrorCode.INTERNAL, text)
        ranks = tuple(
            TicketRank(place.daemon, place.address, place.incarnation, place.pool, order.offer, 0, order.secret)
            for _, place in sorted(self._places.items())
        )
        return Ticket(order.tokens, ranks, (spans(order.blocks),)).encode()

    def _name(self, request: str) -> str:
        """A name for an offer or a pull that no other has, of this run of the engine or another."""
        self._names += 1
        unique = f"#{self._nonce}.{self._names}"
        return request.encode()[: MAX_REQUEST_ID_BYTES - len(unique)].decode(errors="ignore") + unique


def _runs(group: int, positions: Sequence[int], ids: Sequence[int]) -> Iterable[Blocks]:
    """`Blocks` of each run of consecutive positions."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1:
            yield Blocks(group, positions[start], ids[start:end])
            start = end


def _leave_out_last_token(request: Any) -> None:
    """Makes the prefill end one token early. It samples from the wrong token, but only to end: nobody reads that."""
    if request.prompt_token_ids is None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    else:
        del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
