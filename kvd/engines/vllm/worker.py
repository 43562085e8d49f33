"""The worker's half: the session with the rank's daemon, called at the beginning and at the end of each engine step.

It reports every request that waits for a pull to vLLM as received exactly once (as failed before or with that if it
failed), and never while the daemon may still write to its blocks. It reports every offered request as sent exactly
once, when the daemon has let go of its blocks. Ends of kept turns it reports beside: vLLM has ended their requests.

An offer that is held for a request is held until the request's pull has ended, or until nothing of it is wanted.

No order that names blocks leaves before the kernels of the steps before it have ended (`kvd.engines.kernels`);
holds and those that only let go overtake. While the daemon is away or takes no more, orders to it wait up to
`PATIENCE_SECONDS` of the engine's steps, then fail: an engine that was idle or in a long step learns of a restarted
daemon only with its next one. vLLM makes no steps for requests that it has ended, unless it is told that something is
`unsent`.
"""

import logging
import time
from dataclasses import replace
from typing import Any

from kvd.client import Cancelled, Done, Failed, Freed, NotExtended, Offered, OfferRefused, Released
from kvd.engines.kernels import Kernels
from kvd.engines.pool import log_session
from kvd.engines.vllm.growing.worker import GrowingOffers
from kvd.engines.vllm.metadata import (
    HoldOrder,
    OfferOrder,
    PullOrder,
    RankEndpoint,
    Results,
    StepMetadata,
    TransferCounts,
)
from kvd.engines.vllm.orders import Cancel, Order, Orders
from kvd.engines.vllm.step_clock import StepClock
from kvd.errors import ErrorCode, KvdError
from kvd.layout import CacheSpec
from kvd.limits import MAX_PULL_TIMEOUT

PATIENCE_SECONDS = 5.0
"""By `StepClock`. A restart of the daemon takes one to two on a machine with little to do."""

_HELD_AGAIN = {ErrorCode.CANCELLED, ErrorCode.DAEMON_LOST, ErrorCode.PEER_LOST, ErrorCode.DEADLINE}
"""Why a hold may end although its offer stands: a session or a link was lost, the daemon is new, an hour is over."""

_HOLD_SECONDS = 1.0
"""By `StepClock`: how often one hold is sent at most. A daemon that cannot be met at all fails it at once."""

logger = logging.getLogger(__name__)


class WorkerSide:
    """The worker's half over `client`, an attached `kvd.client.Worker` of the pool `name`, whose layout is `spec`."""

    def __init__(
        self, client: Any, name: str, spec: CacheSpec, *, offer_ttl: float, pull_timeout: float, kernels: Kernels
    ) -> None:
        self._client = client
        self._kernels = kernels
        self._name = name
        self._block_bytes = [group.block_bytes for group in spec.groups]
        self._offer_ttl = offer_ttl
        self._pull_timeout = pull_timeout
        self._clock = StepClock()
        self._orders = Orders(self._send_one, self._give_up)
        self._pulls: dict[str, tuple[PullOrder, float]] = {}
        """Pulls that are sent, and when."""
        self._holds: dict[str, tuple[HoldOrder, float]] = {}
        """Holds that are sent, and when by `StepClock`; their pulls name them."""
        self._offers: dict[str, OfferOrder] = {}
        self._turn_ends: list[tuple[str, str]] = []
        self._growing = GrowingOffers(client, offer_ttl, self._growing_ended)
        self._has_launched = True
        """Whether vLLM has said so of the step that has begun last."""
        self._results = Results()
        self._told: RankEndpoint | None = None
        self._told_unsent = False
        self._counts = TransferCounts()

    # --- the engine's step ------------------------------------------------------------------------------------------

    def begin(self, metadata: StepMetadata) -> None:
        """A step begins: sends what the scheduler decided."""
        self._clock.look()
        if not self._has_launched:  # vLLM with a drafter never says so of pipeline stages before the last
            self.launched()
        self._has_launched = False
        pulls = [self._refuse(pull) if pull.refused else pull for pull in metadata.pulls]
        for orders in (metadata.holds, [pull for pull in pulls if pull.ticket], metadata.offers):
            for order in orders:
                self._wait_to_send(order)
        for pull in metadata.cancels:
            self._cancel(pull)
        for offer in metadata.withdrawals:
            self._withdraw(offer)
        self._growing.begin(metadata.growing, self._kernels.last, self._until)
        if self._has_orders:
            self._take_in()  # the daemon may have gone while the engine idled; what is sent to it then is lost
            self._send()

    def launched(self) -> None:
        """The step's kernels have been given to the GPU. If nobody says so, they have when the next step begins."""
        self._has_launched = True
        self._kernels.launched()
        self._growing.launched(self._kernels.last, self._until)

    def end(self) -> Results:
        """A step ends: returns what happened meanwhile."""
        self._clock.look()
        self._take_in()
        if self._has_orders:
            self._send()
        results, self._results = self._results, Results()
        return results

    # --- for the scheduler ------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> RankEndpoint:
        """Where consumers find this rank; with incarnation 0, any later daemon will do, as offers wait for it."""
        client = self._client
        incarnation = client.incarnation if client.connected else 0
        return RankEndpoint(client.daemon, client.address, incarnation, self._name)

    def changed_endpoint(self) -> RankEndpoint | None:
        """The endpoint if it changed since the last call, else None."""
        endpoint = self.endpoint
        if endpoint == self._told:
            return None
        self._told = endpoint
        return endpoint

    def changed_unsent(self) -> bool | None:
        """Whether orders wait to be sent, for which vLLM is to make steps; None if that is as at the last call."""
        unsent = self._orders.is_unsent(self._clock.now) or self._growing.is_unsent(self._clock.now)
        if unsent == self._told_unsent:
            return None
        self._told_unsent = unsent
        return unsent

    def take_turn_ends(self) -> list[tuple[str, str]]:
        """Offers of turns that have ended since the last call, and why: nobody reads their blocks any more."""
        ends, self._turn_ends = self._turn_ends, []
        return ends

    def take_counts(self) -> TransferCounts:
        """What was counted since the last call."""
        counts, self._counts = self._counts, TransferCounts()
        return counts

    def close(self) -> None:
        """Ends the session; the daemon keeps the pool, so what is offered can still be read."""
        self._client.close()

    # --- orders out --------------------------------------------------------------------------------------------------

    @property
    def _until(self) -> float:
        """How long what cannot be sent now may wait."""
        return self._clock.now + PATIENCE_SECONDS

    @property
    def _has_orders(self) -> bool:
        return bool(self._orders) or self._growing.is_due

    def _wait_to_send(self, order: Order) -> None:
        uses_blocks = isinstance(order, OfferOrder | PullOrder) and bool(order.blocks)
        self._orders.put(order, self._until, after=self._kernels.last if uses_blocks else None)

    def _send(self) -> None:
        self._growing.send(self._clock.now)
        self._orders.send(self._clock.now)

    def _send_one(self, order: Order) -> None:
        if isinstance(order, Cancel):
            self._client.cancel(order.request)
        elif isinstance(order, HoldOrder):
            self._client.pull(order.hold, order.ticket, blocks=(), timeout=MAX_PULL_TIMEOUT, hold=True)
            self._holds[order.hold] = order, self._clock.now
        elif isinstance(order, OfferOrder):
            self._client.offer_nowait(
                order.offer,
                tokens=order.tokens,
                blocks=order.blocks,
                ttl=order.turn_ttl or self._offer_ttl,
                consumers=order.consumers,
                secret=order.secret,
            )
            self._offers[order.offer] = order
        else:
            self._send_pull(order)

    def _send_pull(self, order: PullOrder) -> None:
        if not order.waits and order.consumer in self._holds:
            # The end of the hold lets go, too. Of a pull's end an engine without requests makes no step to hear.
            self._client.cancel(order.consumer)
            del self._holds[order.consumer]
            return
        # A prefill that goes on ends such a pull, and the router knows how long it may take.
        timeout = MAX_PULL_TIMEOUT if order.grows else self._pull_timeout
        self._client.pull(order.pull, order.ticket, blocks=order.blocks, timeout=timeout, consumer=order.consumer)
        self._pulls[order.pull] = order, time.monotonic()
        if not order.waits:
            self._end_hold(order)

    def _give_up(self, order: Order, error: KvdError) -> None:
        if isinstance(order, Cancel):
            logger.debug("nothing to cancel, %s has ended: %s", order.request, error)
        elif isinstance(order, HoldOrder):
            self._not_held(order, error.code, error.text)
        elif isinstance(order, OfferOrder):
            self._offer_refused(order, error.code, error.text)
        else:
            self._failed(order, error.code, error.text)
            self._received(order)
            self._end_hold(order)

    def _refuse(self, order: PullOrder) -> PullOrder:
        """Reports the load as failed, before anything is sent that could be tried again. What is left lets go."""
        self._failed(order, ErrorCode.BAD_TICKET, order.refused)
        self._received(order)
        return _without_blocks(order)

    def _cancel(self, pull: str) -> None:
        for order in self._orders:
            if isinstance(order, PullOrder) and order.pull == pull:
                # It is still sent, without blocks: the producer's are held until it hears that nobody wants them.
                self._orders.replace(order, _without_blocks(order))
                self._received(order)
                return
        if pull in self._pulls:
            self._wait_to_send(Cancel(pull))

    def _withdraw(self, offer: str) -> None:
        for order in self._orders:
            if isinstance(order, OfferOrder) and order.offer == offer:
                self._orders.replace(order, None)
                self._offer_ended(order, "withdrawn")
                return
        if offer in self._offers:
            self._wait_to_send(Cancel(offer))

    def _end_hold(self, order: PullOrder) -> None:
        """Nothing more of this request's offer is wanted."""
        if self._holds.pop(order.consumer, None) is not None:
            self._wait_to_send(Cancel(order.consumer))
        for waiting in self._orders:
            if isinstance(waiting, HoldOrder) and waiting.hold == order.consumer:
                self._orders.replace(waiting, None)  # it was about to be sent again

    # --- events in --------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for event in self._client.poll():
            match event:
                case Done(pull) | Failed(pull) | Cancelled(pull) | Freed(pull) if pull in self._pulls:
                    self._pull_ended(event)
                case Failed(hold, code, text):
                    self._hold_ended(hold, code, text)
                case Offered() | OfferRefused() | NotExtended() | Released() if event.offer in self._growing:
                    self._growing.took(event, self._until)
                case Released(offer, reason):
                    self._offer_ended(self._offers.pop(offer), reason)
                case OfferRefused(offer, code, text):
                    self._offer_refused(self._offers.pop(offer), code, text)
                case Offered() | Cancelled():
                    pass
                case _:
                    log_session(event, self._name)

    def _pull_ended(self, event: Done | Failed | Cancelled | Freed) -> None:
        match event:
            case Done(pull):
                self._done(*self._pulls.pop(pull))
            case Failed(pull, code, text, quarantined):
                self._failed(self._pulls[pull][0], code, text)
                self._ended(pull, quarantined=quarantined)
            case Cancelled(pull, quarantined):
                self._ended(pull, quarantined=quarantined)
            case Freed(pull):
                self._ended(pull, quarantined=False)

    def _hold_ended(self, hold: str, code: str, text: str) -> None:
        order, sent_at = self._holds.pop(hold, (None, 0.0))
        if order is None:
            return  # it was being cancelled
        if code not in _HELD_AGAIN:
            self._not_held(order, code, text)
        else:
            self._orders.put(order, self._until + _HOLD_SECONDS, not_before=sent_at + _HOLD_SECONDS)

    def _not_held(self, order: HoldOrder, code: str, text: str) -> None:
        """The request may still find the offer when it has blocks; its pull will say."""
        logger.warning("the KV blocks of request %s are not held while it queues: %s: %s", order.request, code, text)

    def _done(self, order: PullOrder, sent_at: float) -> None:
        if order.waits:
            self._counts.pull_seconds.append(time.monotonic() - sent_at)
            self._counts.pull_blocks.append(sum(len(part.ids) for part in order.blocks))
            self._counts.pull_bytes.append(sum(len(part.ids) * self._block_bytes[part.group] for part in order.blocks))
        self._received(order)
        self._end_hold(order)

    def _ended(self, pull: str, *, quarantined: bool) -> None:
        """The pull brought nothing of use; its request may have its blocks back unless they are in quarantine."""
        self._end_hold(self._pulls[pull][0])
        if not quarantined:
            self._received(self._pulls.pop(pull)[0])

    def _received(self, order: PullOrder) -> None:
        """Nothing is written to the blocks of this pull any more."""
        if order.waits:
            self._results.received.add(order.request)

    def _failed(self, order: PullOrder, code: str, text: str) -> None:
        if order.waits:
            logger.error("the KV blocks of request %s were not loaded: %s: %s", order.request, code, text)
            self._counts.failed_pulls += 1
            self._results.failed.add(order.request)

    def _growing_ended(self, request: str, reason: str) -> None:
        self._counts.expired_offers += reason == "expired"
        self._counts.refused_offers += reason == "refused"
        self._results.sent.add(request)

    def _offer_refused(self, order: OfferOrder, code: str, text: str) -> None:
        logger.error("the KV blocks of request %s are not offered: %s: %s", order.request, code, text)
        self._counts.refused_offers += 1
        self._offer_ended(order, "refused")

    def _offer_ended(self, order: OfferOrder, reason: str) -> None:
        """Nobody reads its blocks any more."""
        if order.turn_ttl:
            self._turn_ends.append((order.offer, reason))
        else:
            self._counts.expired_offers += reason == "expired"
            self._results.sent.add(order.request)


def _without_blocks(order: PullOrder) -> PullOrder:
    """A pull that only lets the producer free its blocks."""
    return replace(order, blocks=(), waits=False, refused="")
