"""The pool, facts about the daemon, and every request that does not wait."""

import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvd.client.driver import Driver
from kvd.client.events import Blocks, Event
from kvd.client.pool import PoolMap
from kvd.errors import ErrorCode, refusal
from kvd.limits import SECRET_BYTES

if TYPE_CHECKING:
    from kvd.client.pool.cuda import DeviceBytes


class Spec(Protocol):
    """The part of `kvd.layout.CacheSpec` that `attach` needs."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""

    def encode(self) -> bytes:
        """The spec in the daemon's encoding."""


class Session:
    """Belongs to one thread of one process: do not share it, nor use it on both sides of a fork."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def pool(self) -> memoryview:
        """The bytes of a pool in host memory, writable, at the same address as long as the session exists.

        Raises:
            BadRequest: `WRONG_STATE`, the pool is in a GPU's memory: see `device_pool`.

        """
        assert self._driver.pool is not None  # noqa: S101 - `attach` returns once the pool is lent
        if not isinstance(self._driver.pool, PoolMap):
            raise refusal(ErrorCode.WRONG_STATE, f"the pool is in the memory of {self.device}; use `device_pool`")
        return self._driver.pool.view

    @property
    def device_pool(self) -> "DeviceBytes":
        """The bytes of a pool in a GPU's memory, writable, at the same address as long as they are used.

        Raises:
            BadRequest: `WRONG_STATE`, the pool is in host memory (see `pool`), or the worker is closed.

        """
        assert self._driver.pool is not None  # noqa: S101 - `attach` returns once the pool is lent
        if isinstance(self._driver.pool, PoolMap):
            raise refusal(ErrorCode.WRONG_STATE, "the pool is in host memory; use `pool`")
        if self._driver.pool.descriptor < 0:
            raise refusal(ErrorCode.WRONG_STATE, "the worker is closed")
        return self._driver.pool.view

    @property
    def device(self) -> str:
        """The UUID of the GPU that has the pool (`GPU-...`); empty for host memory."""
        return self._driver.core.attached.device

    @property
    def connected(self) -> bool:
        """Whether requests can be made now; if not, `poll` attaches again."""
        return self._driver.connected

    @property
    def backing(self) -> str:
        """The kind of the pool's memory: `hugetlb`, `thp`, `plain`; `cuda` on a GPU."""
        return self._driver.core.attached.backing

    @property
    def kept(self) -> bool:
        """Whether the pool still had the bytes of an earlier session when it was last lent."""
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
        """The run of the daemon that lent the pool last."""
        return self._driver.core.attached.incarnation

    def ticket(self, offer: str, tokens: int, blocks: Iterable[Blocks], secret: bytes) -> str:
        """Makes the ticket of an offer with `secret`, without asking the daemon.

        Claims wait for an offer that has not arrived yet, so the ticket may travel ahead of it. It is valid only for
        the current incarnation. `secret` is 16 random bytes, drawn for this offer (`secrets.token_bytes`): whoever has
        it may read the blocks.

        Raises:
            BadRequest: `BAD_BLOCKS`, an id is not an unsigned 32-bit integer; `BAD_TICKET`, another value does not fit.

        """
        return self._driver.core.ticket(offer, tokens, blocks, secret)

    def growing_ticket(self, offer: str, secret: bytes) -> str:
        """Makes the ticket of an offer that grows, which is to be opened with `secret`, without asking the daemon.

        It is valid only for the current incarnation; `kvd.protocol.ticket.growing` makes one for any.

        Raises:
            BadRequest: `BAD_TICKET`, a value does not fit.

        """
        return self._driver.core.ticket(offer, 0, (), secret, grows=True)

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
        """Offers blocks of a sequence of `tokens` tokens for `ttl` seconds; `poll` returns the answer.

        Do not write to the blocks from now on until `OfferRefused` or `Released`. The offer ends when this many
        `consumers` have read it, each with all its ranks; with 0, only when it expires or is cancelled. `secret` is
        that of the ticket, if one was made already.

        Raises:
            BadRequest: `DUPLICATE_REQUEST`, an open request has this name, or one whose end was not told yet;
                `BAD_BLOCKS` or `BAD_MESSAGE`, a value cannot be sent; or the reason why the daemon no longer accepts
                this worker.
            Unavailable: `DAEMON_LOST`, not connected; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        drawn = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._driver.request(self._driver.core.offer(offer, tokens, blocks, ttl, secret=drawn, consumers=consumers))

    def open_offer_nowait(self, offer: str, *, ttl: float, consumers: int = 1, secret: bytes | None = None) -> None:
        """Opens an offer that grows: its blocks are named by `extend_offer` and `close_offer`; `poll` has the answer.

        Whoever has the ticket may pull from now on, and reads each part while the next one is computed. `ttl` begins
        anew with each extension. An offer that is not closed ends with the session, in which `Released` says so.

        Raises:
            KvdError: as `offer_nowait`.

        """
        self._driver.check()
        drawn = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._driver.request(self._driver.core.offer(offer, 0, (), ttl, secret=drawn, consumers=consumers, grows=True))

    def extend_offer(self, offer: str, *, tokens: int, blocks: Iterable[Blocks] = ()) -> None:
        """Adds `blocks` to an offer that grows: the first `tokens` tokens of the sequence are complete in what it has.

        Call it when the copy or computation that writes them has ended. Positions go on where they ended before; the
        last block may be filled up later, behind `tokens`. Name every group that attends to all tokens, and no other.
        Returns at once; `NotExtended` comes as an event if the daemon refuses.

        Raises:
            BadRequest: `UNKNOWN_REQUEST`, no open offer has this name: drop it, as it has ended; `BAD_BLOCKS` or
                `BAD_MESSAGE`, a value cannot be sent.
            Unavailable: `DAEMON_LOST`, not connected; `OVERLOADED`, the queue to the daemon is full.

        """
        self._extend(offer, tokens, blocks, closes=False)

    def close_offer(self, offer: str, *, tokens: int, blocks: Iterable[Blocks] = ()) -> None:
        """Like `extend_offer`, for the last time: these are all `tokens`. Groups of any kind may be named.

        Raises:
            KvdError: as `extend_offer`.

        """
        self._extend(offer, tokens, blocks, closes=True)

    def _extend(self, offer: str, tokens: int, blocks: Iterable[Blocks], *, closes: bool) -> None:
        self._driver.check()
        self._driver.request(self._driver.core.extend(offer, tokens, blocks, closes=closes))

    def pull(
        self,
        request: str,
        ticket: str,
        *,
        blocks: Iterable[Blocks],
        timeout: float,
        traceparent: str | None = None,
        consumer: str = "",
        hold: bool = False,
    ) -> None:
        """Reads what `ticket` offers at the positions of `blocks` into these blocks of the pool, within `timeout` s.

        Returns at once; `poll` returns exactly one of `Done`, `Failed` and `Cancelled`. If the daemons trace, their
        spans are children of `traceparent` (W3C Trace Context). `consumer` names the consumer that the producer counts:
        the same for all ranks of an engine, different for every engine; if empty, `request` does.

        With `hold` and no blocks nothing is read: the offer outlives its ttl until you cancel this, for as long as your
        session lasts. For a request that queues: hold its offer, pull when it has blocks, then cancel the hold.

        Raises:
            BadRequest: `DUPLICATE_REQUEST`, an open request has this name, one whose blocks are in quarantine, or one
                whose end was not told yet;
                `BAD_BLOCKS` or `BAD_MESSAGE`, a value cannot be sent; or the reason why the daemon no longer accepts
                this worker.
            Unavailable: `DAEMON_LOST`, not connected; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        now = time.monotonic()
        frame = self._driver.core.pull(
            request, ticket, blocks, timeout, now, traceparent=traceparent, consumer=consumer, hold=hold
        )
        self._driver.request(frame)

    def cancel(self, request: str) -> None:
        """Stops a pull or withdraws an offer. `poll` still returns its outcome; a pull may already be done.

        Raises:
            BadRequest: `UNKNOWN_REQUEST`, no open pull or offer has this name.
            Unavailable: `DAEMON_LOST`, not connected; `OVERLOADED`, the queue to the daemon is full.

        """
        self._driver.check()
        self._driver.request(self._driver.core.cancel(request))

    def poll(self) -> list[Event]:
        """The events since the last call, oldest first. Never waits: call it in every step of an engine.

        The next call acknowledges them; the daemon keeps them until then. Connects again after a loss.
        """
        self._step(time.monotonic())
        return self._driver.core.take_events()

    def close(self) -> None:
        """Ends the session; the daemon keeps the pool and its bytes for the next process with this name.

        Another process gets them only when this one has ended, since this one could still write to them.

        Memory that tensors use stays mapped until they are gone. A second call does nothing.
        """
        self._driver.close()

    def _step(self, now: float) -> None:
        self._driver.step(now)
