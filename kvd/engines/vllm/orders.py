"""Orders that wait to be sent: for kernels to end, for their time, and while the daemon is away or takes no more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvd.engines.kernels import Event
from kvd.engines.vllm.metadata import HoldOrder, OfferOrder, PullOrder
from kvd.errors import KvdError, Unavailable


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this pull, end this hold or withdraw this offer."""

    request: str


Order: TypeAlias = HoldOrder | PullOrder | OfferOrder | Cancel


@dataclass(slots=True)
class _Waiting:
    """An order that is not sent yet: not before the kernels of `after` have ended, nor before `not_before`.

    While the daemon is away it is sent not later than `until`.

    Of cancels, which never come too late, `until` only bounds how long vLLM makes steps for them alone.
    """

    order: Order | None
    """None once it is sent, has failed or is not wanted any more."""
    until: float
    after: Event | None
    not_before: float


class Orders:
    """Sends them in their order by `send_one`; one that cannot be sent, or not in time, goes to `give_up`.

    Times are those of a `StepClock`.
    """

    def __init__(self, send_one: Callable[[Order], None], give_up: Callable[[Order, KvdError], None]) -> None:
        self._send_one = send_one
        self._give_up = give_up
        self._queue: list[_Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __iter__(self) -> Iterator[Order]:
        return iter([waiting.order for waiting in self._queue if waiting.order is not None])

    def is_unsent(self, now: float) -> bool:
        """Whether one waits for the daemon or for kernels, and its time is not over."""
        return any(waiting.not_before <= now < waiting.until for waiting in self._queue)

    def put(self, order: Order, until: float, *, after: Event | None = None, not_before: float = 0.0) -> None:
        """Has it sent, once what comes before `after` has ended and it is `not_before`."""
        self._queue.append(_Waiting(order, until, after, not_before))

    def replace(self, order: Order, other: Order | None) -> None:
        """Has `other` sent in place of one that waits, whatever kernels do; None for nothing."""
        for waiting in self._queue:
            if waiting.order is order:
                waiting.order, waiting.after = other, None

    def send(self, now: float) -> None:
        """Sends what may leave, in order, up to the first that the daemon cannot take now."""
        trouble: Unavailable | None = None
        for waiting in tuple(self._queue):
            order = waiting.order
            if order is None or now < waiting.not_before or not (waiting.after is None or waiting.after.query()):
                continue
            try:
                if trouble is not None:
                    raise trouble
                self._send_one(order)
            except Unavailable as error:
                trouble = error
                if isinstance(order, Cancel) or now < waiting.until:
                    continue
                self._give_up(order, error)
            except KvdError as error:
                self._give_up(order, error)
            waiting.order = None
        self._queue = [waiting for waiting in self._queue if waiting.order is not None]
