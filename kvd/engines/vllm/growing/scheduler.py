"""The scheduler's half of offers that grow: which blocks are complete after each step of the prefill.

An offer is opened as soon as its request has come, so that claims find it, however long the request queues. Each step
in which the request is scheduled extends it, which the workers tell when the step's kernels have ended. The end of the
request closes it, with the blocks of all other groups. Whatever takes blocks back before, ends the offer: nothing that
was read of it counts then, as it is never closed. The request itself goes on, and is offered in the end like others.

The same becomes of a request for which the engine lacks blocks. A decode engine has blocks for it already, and they may
be what those requests wait for whose offers have the blocks that this one needs: neither engine would ever go on. One
that pulls the blocks of an earlier turn has its own, and its pull ends in time; but if that has failed, or if it waits
for another's pull of that turn, it is taken for one that lacks blocks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.client import Blocks
from kvd.engines.vllm.growing.params import Chosen
from kvd.engines.vllm.metadata import ExtendOrder, GrowingOrder, OfferOrder, OpenOrder, WithdrawOrder
from kvd.engines.vllm.step_clock import StepClock
from kvd.layout import Full, Window

STARVED_SECONDS = 5.0
"""For how long the engine computes nothing at all before it takes the requests that wait for ones that lack blocks. By
`StepClock`: where vLLM plans a step ahead, one in which nothing is computed may wait for a long one that computes."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Growing:
    """The open offer of one request."""

    request: Any
    chosen: Chosen
    end: int
    """With so many tokens it is closed."""
    waits_since: float
    """When it came, or was last seen to wait for a pull, by `StepClock`."""
    begun: bool = False
    """Whether a step has computed some of it."""
    tokens: int = 0
    """So many are complete after the steps so far."""
    named: dict[int, int] = field(default_factory=dict)
    """How many blocks of each group it has."""


class GrowingOffers:
    """Those of one prefill engine, whose KV cache groups have these windows and tokens per block."""

    def __init__(self, groups: Sequence[tuple[Window, int]]) -> None:
        self._full = {number: tokens for number, (window, tokens) in enumerate(groups) if isinstance(window, Full)}
        self._growing: dict[str, _Growing] = {}
        self._names: set[str] = set()
        self._orders: list[GrowingOrder] = []
        self._clock = StepClock()
        self._idle_since: float | None = None
        """Since when no step has computed anything, and in each vLLM came to a request that waits."""

    @property
    def has_orders(self) -> bool:
        """Whether the workers have not been told of all yet."""
        return bool(self._orders)

    def take_orders(self) -> list[GrowingOrder]:
        """What the workers are to do in the next step."""
        orders, self._orders = self._orders, []
        return orders

    def open(self, request: Any, chosen: Chosen, consumers: int) -> None:
        """A request has come whose offer the router chose."""
        if chosen.name in self._names:
            logger.warning("request %s is offered when it has ended: its kvd_offer names another's", request.request_id)
            return
        self._names.add(chosen.name)
        self._clock.look()
        self._growing[request.request_id] = _Growing(request, chosen, request.num_prompt_tokens, self._clock.now)
        self._orders.append(OpenOrder(request.request_id, chosen.name, chosen.secret, consumers))

    def scheduled(self, output: Any, is_loading: Callable[[str], bool], *, tried: bool) -> None:
        """VLLM has scheduled a step; `num_computed_tokens` of its requests are those before it.

        A request that `is_loading` waits for a pull of its own, which has not failed. Unless vLLM `tried` to schedule
        one that waits, it is paused, or none does: it makes steps for other reasons, too.
        """
        self._clock.look()
        now = self._clock.now
        if output.num_scheduled_tokens or not tried:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if not self._growing:
            return
        # Their blocks are others' now, even if they get the same ones again.
        for request in {*(output.preempted_req_ids or ()), *output.scheduled_cached_reqs.resumed_req_ids}:
            self.withdraw(request)
        for request, more in output.num_scheduled_tokens.items():
            growing = self._growing.get(request)
            if growing is not None:
                self._extend(growing, more, output.kv_connector_block_state.get_block_ids(request))
        if self._idle_since is not None:
            self._withdraw_starved(self._idle_since, now, is_loading)

    def _withdraw_starved(self, idle_since: float, now: float, is_loading: Callable[[str], bool]) -> None:
        """Ends the offers of requests that have waited for long while nothing was computed."""
        for request, growing in list(self._growing.items()):
            if is_loading(request):
                growing.waits_since = now
            elif not growing.begun and now - max(idle_since, growing.waits_since) >= STARVED_SECONDS:
                text = "request %s is offered when it has ended: it has waited for %g s in which nothing was computed"
                logger.warning(text, request, STARVED_SECONDS)
                self.withdraw(request)

    def _extend(self, growing: _Growing, more: int, table: Sequence[Sequence[int]]) -> None:
        """After this step `more` tokens are complete than before it.

        Blocks of the prefix cache count only then, too: a request of the same step may be computing them.
        """
        growing.begun = True
        computed = growing.request.num_computed_tokens
        if computed < growing.tokens:  # vLLM computes again what turned out to be wrong
            self.withdraw(growing.request.request_id)
            return
        tokens = min(computed + more, growing.end)
        if tokens > growing.tokens and self._full:
            parts = self._new(growing, tokens, table)
            growing.tokens = tokens
            self._orders.append(ExtendOrder(growing.request.request_id, growing.chosen.name, tokens, parts))

    def _new(self, growing: _Growing, tokens: int, table: Sequence[Sequence[int]]) -> tuple[Blocks, ...]:
        """The blocks that hold the first `tokens` tokens, of groups that attend to all, without those named before."""
        parts = []
        for group, block_tokens in self._full.items():
            first, stop = growing.named.get(group, 0), -(-tokens // block_tokens)
            if stop > first:
                parts.append(Blocks(group, first, table[group][first:stop]))
                growing.named[group] = stop
        return tuple(parts)

    def close(self, request: Any, offer: OfferOrder | None) -> Chosen | None:
        """The request has ended, and would be offered like this. Returns what the router chose if its offer is closed.

        None if it has no offer that grows (any more).
        """
        growing = self._growing.get(request.request_id)
        if growing is None or offer is None or offer.tokens != growing.end:
            self.withdraw(request.request_id)
            return None
        self._forget(growing)
        rest = []
        for part in offer.blocks:
            skipped = growing.named.get(part.group, 0)
            if len(part.ids) > skipped:
                rest.append(Blocks(part.group, part.first + skipped, part.ids[skipped:]))
        name, parts = growing.chosen.name, tuple(rest)
        self._orders.append(ExtendOrder(request.request_id, name, offer.tokens, parts, closes=True))
        return growing.chosen

    def withdraw(self, request: str) -> None:
        """Ends the offer of a request, if it has one that grows."""
        growing = self._growing.get(request)
        if growing is not None:
            self._forget(growing)
            self._orders.append(WithdrawOrder(request, growing.chosen.name))

    def _forget(self, growing: _Growing) -> None:
        del self._growing[growing.request.request_id]
        self._names.discard(growing.chosen.name)
