"""What the blocking client and the one for asyncio have in common."""

import secrets
import time
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from kvd.client.blocks import Blocks
from kvd.client.driver import Driver
from kvd.client.events import Event, Offered, OfferRefused
from kvd.errors import ErrorCode, Unavailable, error_from_code
from kvd.limits import SECRET_BYTES


class Spec(Protocol):
    """What `attach` needs of a `kvd.layout.CacheSpec`."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""

    def encode(self) -> bytes:
        """The spec as the daemon reads it."""


class Session:
    """What both clients have in common: the pool, facts about the daemon, and every request that waits for nothing.

    Belongs to one thread of one process: it must not be shared, nor used on both sides of a fork.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def pool(self) -> memoryview:
        """The pool's bytes, writable, at the same place for the session's whole life."""
        assert self._driver.pool is not None  # noqa: S101 - a session is made after the pool was lent
        return self._driver.pool.view

    @property
    def connected(self) -> bool:
        """Whether requests can be made now; where not, `poll` attaches again."""
        return self._driver.connected

    @property
    def backing(self) -> str:
        """What the pool's memory is made of: `hugetlb`, `thp`, `plain`."""
        return self._driver.core.attached.backing

    @property
    def kept(self) -> bool:
        """Whether the pool had the bytes of an earlier session when it was last lent."""
        return self._driver.core.attached.kept

    @property
    def daemon(self) -> str:
        """The daemon's name."""
        return self._driver.core.attached.daemon

    @property
    def address(self) -> str:
        """Where peers reach the daemon."""
        return self._driver.core.attached.address

    @property
    def incarnation(self) -> int:
        """Which run of the daemon lent the pool last."""
        return self._driver.core.attached.incarnation

    def ticket(self, offer: str, tokens: int, blocks: Iterable[Blocks], secret: bytes) -> str:
        """A ticket of an offer of this worker that is made with `secret`, without asking the daemon.

        A consumer's claim waits for an offer that has not arrived yet, so the ticket may travel ahead of it. It is of
        use only to the incarnation that it was made under. `secret` is 16 bytes that nobody can guess, drawn for this
        offer alone (`secrets.token_bytes`): whoever has it may read the blocks.

        Raises:
            BadRequest: `BAD_BLOCKS`, an id is no unsigned 32-bit integer.

        """
        return self._driver.core.ticket(offer, tokens, blocks, secret)

    def offer_nowait(
        self,
        offer: str,
        *,
        tokens: int,
        blocks: Iterable[Blocks],
        ttl: float,
        consumers: int = 1,
        secret: bytes | None = None,
    ) -> None:
        """Offers blocks of a sequence of `tokens` tokens for `ttl` seconds; the answer comes by `poll`.

        The blocks must not be written to from here on until `OfferRefused` or `Released`. The offer ends when as many
        `consumers` have read it, each with all its ranks; with 0 any number may, until it expires or is cancelled.
        `secret` is that of a ticket that was made already; one is drawn where it is None.

        Raises:
            BadRequest: `DUPLICATE_REQUEST`, the name is that of an open request; `BAD_BLOCKS` or `BAD_MESSAGE`, a value
                that cannot be sent; or why the daemon will not have this worker any more.
            Unavailable: `DAEMON_LOST`, not connected just now; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        drawn = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._driver.request(
            self._driver.core.offer(offer, tokens, blocks, ttl, secret=drawn, consumers=consumers), offer
        )

    def pull(
        self,
        request: str,
        ticket: str,
        *,
        blocks: Iterable[Blocks],
        timeout: float,
        traceparent: str | None = None,
        consumer: str = "",
    ) -> None:
        """Brings what `ticket` offers at the positions of `blocks` into these blocks of the pool, within `timeout` s.

        Returns at once; exactly one of `Done`, `Failed` and `Cancelled` comes by `poll`. The daemons' spans, where they
        trace, lie under the span that `traceparent` (W3C Trace Context) names. `consumer` is what the producer counts
        as one consumer of the offer, whichever ranks of an engine pull it: the same for all of them, and no other
        engine's. Where it is empty `request` is that name.

        Raises:
            BadRequest: `DUPLICATE_REQUEST`, the name is that of an open request, or of one whose blocks are in
                quarantine; `BAD_BLOCKS` or `BAD_MESSAGE`, a value that cannot be sent; or why the daemon will not
                have this worker any more.
            Unavailable: `DAEMON_LOST`, not connected just now; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        now = time.monotonic()
        frame = self._driver.core.pull(
            request, ticket, blocks, timeout, now, traceparent=traceparent, consumer=consumer
        )
        self._driver.request(frame, request)

    def cancel(self, request: str) -> None:
        """Stops a pull or withdraws an offer. Its outcome still comes by `poll`; a pull may have been done already.

        Raises:
            BadRequest: `UNKNOWN_REQUEST`, no open pull or offer has this name.
            Unavailable: `DAEMON_LOST`, not connected just now; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        self._driver.request(self._driver.core.cancel(request))

    def poll(self) -> list[Event]:
        """What has happened since the last call, oldest first. Never waits: made for every step of an engine.

        What it returned is acknowledged by the next call, so a daemon keeps it until then. Connects again after a loss.
        """
        self._driver.step(time.monotonic())
        return self._driver.core.take_events()

    # --- for the two clients ----------------------------------------------------------------------------------------

    def _take_attached(self) -> bool | None:
        self._driver.check()
        return self._driver.connected or None

    def _take_offer(self, offer: str) -> str | None:
        """The ticket, once it is there; raises what the daemon refused with."""
        self._driver.check()
        match self._driver.core.take_offer(offer):
            case Offered(_, ticket):
                return ticket
            case OfferRefused(_, code, text):
                raise error_from_code(code, text)
        return None

    def _offer_overdue(self, offer: str, timeout: float) -> Unavailable:
        self._driver.core.abandon(offer)
        return Unavailable(
            ErrorCode.DEADLINE,
            f"no answer to the offer {offer!r} within {timeout} s; it is withdrawn, and its end comes by poll()",
        )

    def _ask_status(self) -> int:
        self._driver.check()
        call, frame = self._driver.core.status()
        self._driver.request(frame)
        return call

    def _take_status(self, call: int) -> dict[str, Any] | None:
        report = self._driver.core.status_answer(call)
        return None if report is None else msgspec.json.decode(report, type=dict[str, Any])

    def _take_detached(self) -> bool | None:
        if self._driver.detached:
            return True
        if not self._driver.connected:
            raise Unavailable(ErrorCode.DAEMON_LOST, "the daemon is gone, and the pool with it")
        return None
