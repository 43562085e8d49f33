"""The scheduler's half: decides what is offered, pulled and cancelled. It talks to no daemon.

On the decode side, `arrived` reads a request's transfer parameters and `external` says how many tokens will come. A
request that is not scheduled at once has its offer held, by every rank's daemon (`take_metadata`). Once vLLM has given
the request blocks, `allocated` orders a pull of those that are missing; `finished` cancels a pull that still runs. Of
several requests with one ticket one pulls (`tickets`).
On the prefill side, `finished` orders the offer and returns the ticket, which needs no answer of a daemon. If the
router has sent a request to both sides at once, its offer grows from `arrived` on (`kvd.engines.vllm.growing`). How
many tokens move is told in `kvd.engines.vllm.prompts`.

In a conversation blocks also go back: `answered` has the decode engine keep what it decoded, and the next turn's
request names that to its prefill engine, which pulls as a decode engine does, and then offers (`turns`).
"""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvd.client import Blocks
from kvd.engines.vllm import transfer_params
from kvd.engines.vllm.block_manager import BlockManager
from kvd.engines.vllm.growing import params as growing_params
from kvd.engines.vllm.growing.scheduler import GrowingOffers
from kvd.engines.vllm.loads import Loads, has_failed_load
from kvd.engines.vllm.metadata import HoldOrder, OfferOrder, PullOrder, RankEndpoint, StepMetadata
from kvd.engines.vllm.prompts import Prompts, leave_out
from kvd.engines.vllm.tickets import Answers, Tickets
from kvd.engines.vllm.transfer_params import Prompt, TransferParams
from kvd.engines.vllm.turns.scheduler import TurnPolicy, Turns, is_complete
from kvd.errors import BadRequest, ErrorCode, refusal
from kvd.layout import Full, State, Window
from kvd.limits import MAX_REQUEST_ID_BYTES, SECRET_BYTES

logger = logging.getLogger(__name__)


class SchedulerSide:
    """`groups` are the window and tokens per block of each KV cache group, `ranks` the number of workers.

    `lookahead` is how many tokens of the prompt a drafter reads beyond those that are computed. `adapter_paths` says
    whether LoRA adapters have the same paths on both sides, `alone` whether requests to this engine's address all come
    to this one, and all its workers have daemons: routers are told of them then. `grows` says whether blocks may be
    offered while a prefill goes on: not where workers have copies of others' caches (`kvd.engines.vllm.replica`).
    """

    def __init__(
        self,
        groups: Sequence[tuple[Window, int]],
        ranks: int,
        lookahead: int = 0,
        *,
        adapter_paths: bool = True,
        alone: bool = True,
        grows: bool = True,
        turns: TurnPolicy | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._growing = GrowingOffers(self._groups)
        self._grows = grows
        self._tried = False
        """Whether vLLM has come to a request that waits, since it last scheduled a step: it has asked about one, or
        lacked blocks for one, as it does not ask again about those that are loaded."""
        self._has_states = any(isinstance(window, State) for window, _ in self._groups)
        self._prompts = Prompts(self._groups, lookahead)
        self._adapter_paths = adapter_paths
        self._answers = Answers(ranks, alone=alone)
        self._unsent: dict[int, bool] = {}
        self._params: dict[str, TransferParams] = {}
        """By request, until its ticket is used."""
        self._queued: set[str] = set()
        """Of these, the requests that came since the last step, and are not scheduled in it."""
        self._holds: dict[str, str] = {}
        """The hold of a request that waits for blocks."""
        self._computed: dict[str, int] = {}
        self._manager = BlockManager()
        self._loads = Loads(self._manager)
        self._loading: dict[str, str] = {}
        """The pull that a request waits for."""
        self._tickets = Tickets()
        self._metadata = StepMetadata()
        whole = not all(isinstance(window, Full) for window, _ in self._groups)
        self.turns = Turns(turns or TurnPolicy(), ranks, self._manager, whole=whole)
        self._nonce = os.urandom(4).hex()
        self._names = 0

    # --- from vLLM's scheduler --------------------------------------------------------------------------------------

    def bind(self, manager: Any, step_tokens: int, lookahead: int) -> None:
        """Takes vLLM's KV cache manager (`BlockManager.bind`)."""
        self._manager.bind(manager, step_tokens, lookahead, refused=self._try)

    def _try(self) -> None:
        self._tried = True

    def arrived(self, request: Any) -> None:
        """A new request."""
        params = request.kv_transfer_params
        if transfer_params.is_consumer(params):
            self._offered(request, self._read(params, request))
        elif transfer_params.is_producer(params):
            self._to_prefill(request)

    def _to_prefill(self, request: Any) -> None:
        tokens, params = request.num_prompt_tokens, request.kv_transfer_params
        left_out = self._prompts.left_out(tokens)
        chosen = None
        try:
            if self._grows and growing_params.is_growing(params):
                consumers = transfer_params.consumers(params)
                chosen = growing_params.chosen(params, self._prompt(request), self._prompts.taken(tokens))
        except BadRequest as error:
            logger.warning("request %s is offered only when it has ended: %s", request.request_id, error.text)
        if 0 < left_out < tokens and not request.get_skip_reading_prefix_cache():
            leave_out(request, left_out)
        # If it does not end where the decode engine expects it, a ticket says where.
        if chosen is not None and request.num_prompt_tokens == tokens - left_out:
            self._growing.open(request, chosen, consumers)
        if (earlier := self.turns.offered(request, self._prompt(request))) is not None:
            self._offered(request, earlier)

    def _read(self, params: dict[str, Any], request: Any) -> TransferParams:
        prompt = self._prompt(request)
        if growing_params.is_growing(params):
            return growing_params.read(params, prompt, self._prompts.taken(prompt.length))
        return transfer_params.read(params, prompt)

    def external(self, request: Any, computed: int) -> int | None:
        """How many tokens a pull will bring after the `computed` ones; 0 to compute them all, None to ask again."""
        self._try()
        if self._loads.has_failed(request.request_id):
            self.turns.kept.asked(request)
            return None if self._loads.must_wait(request) else 0
        tokens = self._external(request, computed)
        if tokens is not None:
            self.turns.kept.asked(request)
        return tokens

    def _external(self, request: Any, computed: int) -> int | None:
        """As `external`, of a request whose load has not failed."""
        offered = self._params.get(request.request_id)
        if offered is None or self._tickets.is_here(offered) or (offered.turn and self._tickets.is_lost(offered)):
            return 0
        if self._tickets.is_pulled(offered):
            return None
        wanted: int = request.num_prompt_tokens - 1
        if self._has_states and offered.tokens > wanted and not offered.refused:
            text = "request %s is computed here: its recurrent state is that after %d tokens, not after %d"
            logger.warning(text, request.request_id, offered.tokens, wanted)
            return 0
        self._computed[request.request_id] = computed
        tokens = max(0, min(offered.tokens, wanted) - computed)
        if offered.turn:
            tokens = self.turns.worth(tokens)
        return None if tokens and self._loads.any_failed else tokens

    def allocated(self, request: Any, blocks: Sequence[Sequence[Any]], external: int) -> None:
        """VLLM gave the request `blocks` [group][position], with room for `external` tokens to come."""
        self.turns.kept.admitted(request.request_id)
        self._loads.forget(request.request_id)
        offered = self._params.pop(request.request_id, None)
        if offered is None:
            return
        self._queued.discard(request.request_id)
        tokens = self._computed.pop(request.request_id, 0) + external
        if offered.turn:
            self.turns.allocated(request.request_id, offered, external)
        if external == 0:
            self._let_go(request, offered, here=True)
            return
        name = request.request_id
        if self._tickets.is_lost(offered) and name not in self._holds:
            offered = replace(offered, ticket="", refused="a request with its ticket was aborted, so its offer is over")
        pull = self._loading[name] = self._name(name)
        self._loads.begin(request)
        missing = tuple(self._prompts.missing(blocks, tokens))
        refused = offered.refused
        if len({part.group for part in missing}) < len(missing):
            refused = "the prefix cache holds blocks between the missing ones; kvd does not overwrite them"
        if not refused:
            self._tickets.pull(name, offered)
        held, grows = self._holds.pop(name, ""), offered.grows
        self._metadata.pulls.append(
            PullOrder(name, pull, offered.ticket, missing, waits=True, refused=refused, consumer=held, grows=grows)
        )

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The request has ended. Returns the router's parameters if its blocks are offered: vLLM then keeps them."""
        self.turns.ended(request.request_id)
        self._loads.forget(request.request_id)
        self._computed.pop(request.request_id, None)
        self._queued.discard(request.request_id)
        offered = self._params.pop(request.request_id, None)
        if offered is not None:
            self._let_go(request, offered, here=False)
        pull = self._loading.get(request.request_id)
        if pull is not None:
            self._metadata.cancels.append(pull)
            if has_failed_load(request):
                self._tickets.fail(request.request_id)
            else:
                self._tickets.cancel(request.request_id)
            self._growing.withdraw(request.request_id)  # a prefill that waited for an earlier turn
            return None
        order = self._order(request, block_ids)
        chosen = self._growing.close(request, order)
        if order is None:
            return None
        if chosen is not None:
            params = growing_params.write(chosen, order.consumers)
        else:
            self._metadata.offers.append(order)
            asked, prompt, ticket = request.kv_transfer_params, self._prompt(request), self._answers.ticket(order)
            params = transfer_params.write(ticket, order.tokens, prompt, order.consumers, asked=asked)
        self._answers.add(params, order)
        return params

    def _order(self, request: Any, block_ids: Sequence[Sequence[int]]) -> OfferOrder | None:
        """How the blocks of a request that has ended are offered; None if they are not."""
        if not transfer_params.is_producer(request.kv_transfer_params) or not is_complete(request):
            return None
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_prompt_tokens)
        held = self._prompts.held(block_ids, tokens)
        if not held:
            return None
        try:
            consumers = transfer_params.consumers(request.kv_transfer_params)
            self._check_state(tokens, request.num_computed_tokens)
        except BadRequest as error:
            logger.warning("the KV blocks of request %s are not offered: %s", request.request_id, error.text)
            return None
        return self._new_order(request, tokens, held, consumers)

    def scheduled(self, output: Any) -> None:
        """VLLM has scheduled a step, whose metadata is taken next."""
        tried, self._tried = self._tried, False
        self._growing.scheduled(output, self._is_loading, tried=tried)

    def answered(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """A request has ended whose blocks vLLM does not keep; they may be kept here for the conversation's next turn.

        Returns the parameters of its turn, if its answer is to have them, or of the turn that it asks for.
        """
        if not self.turns.keeps(request):
            return self.turns.take(request)
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, len(request._all_token_ids))
        held = self._prompts.held(block_ids, tokens)
        if not held or (self._has_states and tokens != request.num_computed_tokens):  # a step has taken the state on
            return None
        blocks = self.turns.kept.room(request, [block for part in held for block in part.ids])
        if blocks is None:
            return None
        order = self._new_order(request, tokens, held, turn_ttl=self.turns.policy.ttl)
        self._metadata.offers.append(order)
        ticket = self._answers.ticket(order)
        params, in_answer = self.turns.keep(request, order, ticket, self._prompt(request), blocks)
        self._answers.add(params, order)
        return params if in_answer else None

    def take_metadata(self) -> StepMetadata:
        """What the workers are to do in the next step."""
        self._answers.are_sent()
        self.turns.kept.relieve()
        self._metadata.withdrawals = self.turns.kept.take_withdrawals()
        for request in list(filter(self._is_to_hold, self._queued)):
            self._queued.remove(request)
            offered = self._params[request]
            if not self._tickets.is_over(offered):
                self._holds[request] = hold = self._name(request)
                self._metadata.holds.append(HoldOrder(request, hold, offered.ticket))
        metadata, self._metadata = self._metadata, StepMetadata()
        metadata.growing = self._growing.take_orders()
        return metadata

    # --- from the workers -------------------------------------------------------------------------------------------

    def received(self, requests: Iterable[str], failed: Iterable[str] = ()) -> None:
        """The blocks of these requests are no longer written to; loads of others, or of the same, have `failed`."""
        gone = set(failed)
        for request in gone:
            self._tickets.fail(request)
        self._loads.fail(gone)
        for request in requests:
            self._loading.pop(request, None)
            self._tickets.end(request)
            if (loaded := self._loads.end(request)) is not None:
                self.turns.kept.loaded(loaded)
            self.turns.received(request, failed=request in gone)

    def set_endpoints(self, endpoints: dict[int, RankEndpoint]) -> None:
        """The daemons of these ranks became known or changed."""
        self._answers.set_endpoints(endpoints)

    def set_unsent(self, unsent: dict[int, bool]) -> None:
        """Whether the workers of these ranks have orders that they could not send yet."""
        self._unsent.update(unsent)

    @property
    def unsent(self) -> bool:
        """Whether a worker has such orders, or blocks are given up that it has not let go of.

        Or whether workers are to be told of a request: while it is paused, vLLM makes no step for it.
        """
        untold = self._growing.has_orders or any(map(self._is_to_hold, self._queued))
        return untold or any(self._unsent.values()) or self.turns.kept.freeing

    # --- inside -----------------------------------------------------------------------------------------------------

    def _offered(self, request: Any, offered: TransferParams) -> None:
        self._params[request.request_id] = offered
        if offered.ticket and not offered.refused:
            self._queued.add(request.request_id)

    def _is_to_hold(self, request: str) -> bool:
        """Whether a request that queues waits for no other one's pull: its offer is to be held."""
        return not self._tickets.is_pulled(self._params[request])

    def _is_loading(self, request: str) -> bool:
        """Whether it waits for a pull of its own, which has not failed."""
        return request in self._loading and not self._loads.is_failing(request)

    def _prompt(self, request: Any) -> Prompt:
        return Prompt.of(request, adapter_paths=self._adapter_paths)

    def _check_state(self, tokens: int, computed: int) -> None:
        """Refuses to offer `tokens` tokens if the recurrent state has taken in more."""
        if self._has_states and tokens != computed:
            text = f"the recurrent state is that after {computed} tokens, it was to be that after {tokens}"
            raise refusal(ErrorCode.BAD_BLOCKS, text)

    def _let_go(self, request: Any, offered: TransferParams, *, here: bool) -> None:
        """Tells the producer that its blocks are not needed, unless the offer is over.

        The prompt need not be the ticket's: where vLLM's API server has rejected a request, it sends one with a prompt
        of its own and ends it at once, only for this.
        """
        hold = self._holds.pop(request.request_id, "")
        if offered.ticket and (hold or not self._tickets.is_over(offered)):
            self._tickets.let_go(offered, here=here)
            name = self._name(request.request_id)
            self._metadata.pulls.append(
                PullOrder(request.request_id, name, offered.ticket, (), waits=False, consumer=hold, grows=offered.grows)
            )

    def _new_order(
        self, request: Any, tokens: int, held: tuple[Blocks, ...], consumers: int = 1, turn_ttl: float = 0.0
    ) -> OfferOrder:
        name, secret = self._name(request.request_id), secrets.token_bytes(SECRET_BYTES)
        return OfferOrder(request.request_id, name, tokens, held, secret, consumers, turn_ttl)

    def _name(self, request: str) -> str:
        """A name for an offer or pull, unique over runs of the engine."""
        self._names += 1
        unique = f"#{self._nonce}.{self._names}"
        return request.encode()[: MAX_REQUEST_ID_BYTES - len(unique)].decode(errors="ignore") + unique
