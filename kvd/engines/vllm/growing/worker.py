"""The worker's half of offers that grow: tells the rank's daemon, in order, what the scheduler's half has decided.

A part is named when the kernels that write it have ended, and never before the parts in front of it. An offer that
ended before it was closed, because nobody asked for it in time or its daemon went, is opened again under its name and
told all that it had: its request has its blocks still. One that its readers have finished with is not. Nothing that was
read of an offer counts unless it is closed; so of one that cannot be closed, vLLM gets the blocks back at once.

While the daemon is away or takes no more, orders wait as `kvd.engines.vllm.worker` says.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.client import NotExtended, Offered, OfferRefused, Released
from kvd.engines.kernels import Event
from kvd.engines.vllm.metadata import ExtendOrder, GrowingOrder, OpenOrder, WithdrawOrder
from kvd.errors import ErrorCode, KvdError, Unavailable

GrowingEvent = Offered | OfferRefused | NotExtended | Released

_REFUSED = "refused"
_WITHDRAWN = "withdrawn"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Growing:
    """One offer."""

    order: OpenOrder
    until: float
    """How long what is not sent may wait, by `StepClock`."""
    parts: list[tuple[ExtendOrder, Event | None]] = field(default_factory=list)
    """All that it is to have, each with the kernels that write it."""
    is_open: bool = False
    """The daemon was told, and has not said that it has ended."""
    sent: int = 0
    """How many parts the daemon was told since then."""
    unwanted: str = ""
    """Why it is not to be closed: nobody reads it any more, or it cannot be told to the daemon."""
    to_cancel: bool = False

    @property
    def closes(self) -> bool:
        """Whether its request has ended."""
        return any(part.closes for part, _ in self.parts)

    @property
    def closed(self) -> bool:
        """Whether the daemon was told to close it."""
        return self.is_open and self.closes and self.sent == len(self.parts)

    @property
    def is_due(self) -> bool:
        """Whether something is to be sent."""
        if self.unwanted:
            return self.to_cancel
        return not self.is_open or self.sent < len(self.parts)


class GrowingOffers:
    """Those of one rank over `client`, an attached `kvd.client.Worker`.

    `ended(request, reason)` is called once for each request whose offer was to be closed, when its blocks are vLLM's
    again: for a reason of `Released`, or as it was `refused`.
    """

    def __init__(self, client: Any, ttl: float, ended: Callable[[str, str], None]) -> None:
        self._client = client
        self._ttl = ttl
        self._ended = ended
        self._offers: dict[str, _Growing] = {}
        self._of_step: list[ExtendOrder] = []
        """What is complete when this step's kernels have ended."""

    def __contains__(self, offer: str) -> bool:
        return offer in self._offers

    def begin(self, orders: Sequence[GrowingOrder], after: Event | None, until: float) -> None:
        """A step begins; the kernels of those before it end with `after`. What cannot be sent waits `until` then."""
        for order in orders:
            match order:
                case OpenOrder():
                    self._open(order, until)
                case ExtendOrder(closes=True):
                    self._close(order, after, until)
                case ExtendOrder():
                    self._of_step.append(order)
                case WithdrawOrder():
                    self._withdraw(order)

    def launched(self, after: Event | None, until: float) -> None:
        """The step's kernels have been given to the GPU, and end with `after`."""
        for order in self._of_step:
            growing = self._of(order)
            if growing is not None:
                growing.parts.append((order, after))
                growing.until = until
        self._of_step.clear()

    def _of(self, order: ExtendOrder | WithdrawOrder) -> _Growing | None:
        """The offer that it is about; None if there is none, or it is another request's."""
        growing = self._offers.get(order.offer)
        return growing if growing is not None and growing.order.request == order.request else None

    def _open(self, order: OpenOrder, until: float) -> None:
        """Unless an offer of this name has not ended: a router has used its `kvd_offer` twice."""
        if order.offer in self._offers:
            text = "the KV blocks of request %s are not offered: those of %s still are, by the same kvd_offer"
            logger.error(text, order.request, self._offers[order.offer].order.request)
        else:
            self._offers[order.offer] = _Growing(order, until)

    def _close(self, order: ExtendOrder, after: Event | None, until: float) -> None:
        growing = self._of(order)
        if growing is None:
            self._ended(order.request, _REFUSED)
        elif growing.unwanted:
            self._end(growing)
        else:
            growing.parts.append((order, after))
            growing.until = until

    def _withdraw(self, order: WithdrawOrder) -> None:
        growing = self._of(order)
        if growing is not None:
            growing.unwanted, growing.to_cancel = _WITHDRAWN, growing.is_open
            self._drop(growing)

    def _end(self, growing: _Growing) -> None:
        """The request has ended, and has its blocks back."""
        self._ended(growing.order.request, growing.unwanted)
        growing.unwanted = _WITHDRAWN
        growing.parts.clear()
        self._drop(growing)

    def _drop(self, growing: _Growing) -> None:
        """Forgets an offer of which nothing is to be told, and nothing will be heard."""
        if not growing.is_open:
            self._offers.pop(growing.order.offer, None)

    # --- orders out --------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether something is to be sent."""
        return any(growing.is_due for growing in self._offers.values())

    def is_unsent(self, now: float) -> bool:
        """Whether something is to be sent for which vLLM should make steps."""
        return any(growing.is_due and now < growing.until for growing in self._offers.values())

    def send(self, now: float) -> None:
        """Sends what may leave."""
        for growing in [growing for growing in self._offers.values() if growing.is_due]:
            try:
                self._send(growing)
            except Unavailable as error:
                if now >= growing.until:
                    self._give_up(growing, error)
            except KvdError as error:
                # It has ended, which an event will say; a cancel then has nothing to do.
                growing.to_cancel = False
                if error.code is not ErrorCode.UNKNOWN_REQUEST:
                    self._give_up(growing, error)

    def _send(self, growing: _Growing) -> None:
        name = growing.order.offer
        if growing.to_cancel:
            self._client.cancel(name)
            growing.to_cancel = False
            return
        if not growing.is_open:
            order = growing.order
            self._client.open_offer_nowait(name, ttl=self._ttl, consumers=order.consumers, secret=order.secret)
            growing.is_open, growing.sent = True, 0
        while growing.sent < len(growing.parts):
            part, after = growing.parts[growing.sent]
            if after is not None and not after.query():
                return
            tell = self._client.close_offer if part.closes else self._client.extend_offer
            tell(name, tokens=part.tokens, blocks=part.blocks)
            growing.sent += 1

    def _give_up(self, growing: _Growing, error: KvdError) -> None:
        """It cannot be told to the daemon. What the daemon knows of it is cancelled when that can be told."""
        if not growing.unwanted:
            _log(growing, error.code, error.text)
            growing.unwanted, growing.to_cancel = _REFUSED, growing.is_open
            if growing.closes:
                self._end(growing)

    # --- events in --------------------------------------------------------------------------------------------------

    def took(self, event: GrowingEvent, until: float) -> None:
        """The daemon said something of one of the offers."""
        growing = self._offers[event.offer]
        match event:
            case OfferRefused(_, ErrorCode.DAEMON_LOST, _):
                self._gone(growing, "", until)  # its answer was lost
            case OfferRefused(_, code, text):
                _log(growing, code, text)
                self._gone(growing, _REFUSED, until)
            case NotExtended(_, code, text):
                _log(growing, code, text)
                growing.unwanted, growing.to_cancel = growing.unwanted or _REFUSED, True
            case Released(_, reason):
                self._gone(growing, reason if growing.closed or reason == "read" else "", until)
            case Offered():
                pass

    def _gone(self, growing: _Growing, unwanted: str, until: float) -> None:
        """The daemon has ended it, or does not have it; it is opened again unless it is `unwanted`."""
        growing.is_open, growing.to_cancel, growing.until = False, False, until
        growing.unwanted = growing.unwanted or unwanted
        if growing.unwanted and growing.closes:
            self._end(growing)
        elif growing.unwanted == _WITHDRAWN:
            self._drop(growing)


def _log(growing: _Growing, code: str, text: str) -> None:
    if not growing.unwanted:
        logger.error("the KV blocks of request %s are not offered: %s: %s", growing.order.request, code, text)
