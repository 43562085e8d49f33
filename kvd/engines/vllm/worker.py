"""A worker's half: the session with the rank's daemon. Called at the beginning and at the end of each engine step.

What it guarantees vLLM: every request that waits for a pull is reported as received exactly once, as failed before or
with that if it failed, and never while the daemon may still write to its blocks. Every offered request is reported as
sent exactly once, when the daemon has let go of its blocks.

While the daemon is away, orders wait a moment for it: an engine that idled learns only with its next step that its
daemon was started anew. After that they fail.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvd.client import (
    Cancelled,
    DaemonError,
    Disconnected,
    Done,
    Failed,
    Freed,
    Offered,
    OfferRefused,
    Reattached,
    Released,
)
from kvd.engines.vllm.metadata import OfferOrder, Orders, PullOrder, RankPlace
from kvd.engines.vllm.tally import Tally
from kvd.errors import ErrorCode, KvdError, Unavailable
from kvd.layout import CacheSpec

PATIENCE_SECONDS = 5.0
"""How long an order waits for a daemon that is away: a restart takes one to two on a machine with little to do."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """What has ended since the last step, as vLLM's request ids."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Pull:
    order: PullOrder
    sent_at: float


class WorkerSide:
    """See the module's text. `client` is an attached `kvd.client.Worker` of the pool `name`, whose layout is `spec`."""

    def __init__(self, client: Any, name: str, spec: CacheSpec, *, offer_ttl: float, pull_timeout: float) -> None:
        self._client = client
        self._name = name
        self._block_bytes = [group.block_bytes for group in spec.groups]
        self._offer_ttl = offer_ttl
        self._pull_timeout = pull_timeout
        self._queue: deque[tuple[float, PullOrder | OfferOrder]] = deque()
        self._pulls: dict[str, _Pull] = {}
        self._offers: dict[str, str] = {}
        self._results = Results()
        self._told: RankPlace | None = None
        self._tally = Tally()

    # --- the engine's step ------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """A step begins: send what the scheduler decided."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._queue.extend((until, order) for order in orders.pulls)
        self._queue.extend((until, order) for order in orders.offers)
        for pull in orders.cancels:
            self._cancel(pull)
        if self._queue:
            self._take_in()  # the daemon may have gone while the engine idled; what is sent to it then is lost
            self._send()

    def end(self) -> Results:
        """A step ends: what has happened meanwhile."""
        self._take_in()
        if self._queue:
            self._send()
        results, self._results = self._results, Results()
        return results

    # --- what the scheduler has to know -----------------------------------------------------------------------------

    @property
    def place(self) -> RankPlace:
        """Where consumers find this rank. While the daemon is away, the next one will do: offers wait for it."""
        client = self._client
        incarnation = client.incarnation if client.connected else 0
        return RankPlace(client.daemon, client.address, incarnation, self._name)

    def new_place(self) -> RankPlace | None:
        """The place, if it is another than when this was last asked."""
        place = self.place
        if place == self._told:
            return None
        self._told = place
        return place

    def take_tally(self) -> Tally:
        """What was counted since this was last called."""
        tally, self._tally = self._tally, Tally()
        return tally

    def close(self) -> None:
        """Ends the session. The daemon keeps the pool, and what is offered there can still be read."""
        self._client.close()

    # --- orders out -------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while self._queue:
            until, order = self._queue[0]
            try:
                self._send_one(order)
            except Unavailable as error:
                if time.monotonic() < until:
                    return
                self._give_up(order, error)
            except KvdError as error:
                self._give_up(order, error)
            self._queue.popleft()

    def _send_one(self, order: PullOrder | OfferOrder) -> None:
        if isinstance(order, OfferOrder):
            self._client.offer_nowait(
                order.offer,
                tokens=order.tokens,
                blocks=order.blocks,
                ttl=self._offer_ttl,
                consumers=order.consumers,
                secret=order.secret,
            )
            self._offers[order.offer] = order.request
        elif order.refused:
            self._failed(order, ErrorCode.BAD_TICKET, order.refused)
            self._over(order)
        else:
            self._client.pull(order.pull, order.ticket, blocks=order.blocks, timeout=self._pull_timeout)
            self._pulls[order.pull] = _Pull(order, time.monotonic())

    def _give_up(self, order: PullOrder | OfferOrder, error: KvdError) -> None:
        if isinstance(order, OfferOrder):
            self._offer_refused(order.request, error.code, error.text)
        else:
            self._failed(order, error.code, error.text)
            self._over(order)

    def _cancel(self, pull: str) -> None:
        for entry in self._queue:
            order = entry[1]
            if isinstance(order, PullOrder) and order.pull == pull:
                self._queue.remove(entry)
                self._over(order)
                return
        if pull in self._pulls:
            try:
                self._client.cancel(pull)
            except KvdError as error:
                logger.debug("the pull %s is not cancelled but awaited: %s", pull, error)

    # --- events in --------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for event in self._client.poll():
            match event:
                case Done(pull):
                    self._done(self._pulls.pop(pull))
                case Failed(pull, code, text, quarantined):
                    self._failed(self._pulls[pull].order, code, text)
                    self._ended(pull, quarantined=quarantined)
                case Cancelled(pull, quarantined):
                    self._ended(pull, quarantined=quarantined)
                case Freed(pull):
                    self._ended(pull, quarantined=False)
                case Released(offer, reason):
                    self._tally.released(reason)
                    self._results.sent.add(self._offers.pop(offer))
                case OfferRefused(offer, code, text):
                    self._offer_refused(self._offers.pop(offer), code, text)
                case Offered():
                    pass
                case _:
                    self._log(event)

    def _log(self, event: Disconnected | Reattached | DaemonError) -> None:
        match event:
            case Disconnected(code, text):
                logger.warning("the daemon of %s is away (%s): %s", self._name, code, text)
            case Reattached(_, same):
                logger.warning("the daemon of %s is back%s", self._name, "" if same else ", started anew")
            case DaemonError(code, text):
                logger.error("the daemon of %s: %s: %s", self._name, code, text)

    def _done(self, pull: _Pull) -> None:
        if pull.order.waits:
            blocks = sum(len(part.ids) for part in pull.order.blocks)
            nbytes = sum(len(part.ids) * self._block_bytes[part.group] for part in pull.order.blocks)
            self._tally.pulled(time.monotonic() - pull.sent_at, blocks, nbytes)
        self._over(pull.order)

    def _ended(self, name: str, *, quarantined: bool) -> None:
        """A pull is over that brought nothing of use; its request may have its blocks back unless in quarantine."""
        if not quarantined:
            self._over(self._pulls.pop(name).order)

    def _over(self, order: PullOrder) -> None:
        """Nothing is written to the blocks of this pull any more."""
        if order.waits:
            self._results.received.add(order.request)

    def _failed(self, order: PullOrder, code: str, text: str) -> None:
        if order.waits:
            logger.error("the KV blocks of request %s were not loaded: %s: %s", order.request, code, text)
            self._tally.failed_pulls += 1
            self._results.failed.add(order.request)

    def _offer_refused(self, request: str, code: str, text: str) -> None:
        logger.error("the KV blocks of request %s are not offered: %s: %s", request, code, text)
        self._tally.refused_offers += 1
        self._results.sent.add(request)
