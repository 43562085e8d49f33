"""What producers are asked on behalf of transfers: claims, renewals, fences; again where an answer is late."""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from kvd import limits
from kvd.actors.runtime.batch import Batch
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.scheduler.pulls import Transfer
from kvd.protocol.peer import Claim, Fence, Release, Renew, Settle
from kvd.protocol.types import Message
from kvd.state.transfer import State

CLAIM_AFTER = 0.02
"""Seconds within which a read that began without a claim sends one: most have ended by then, on the same host."""

SETTLE_AFTER = 0.02
"""Seconds after which a producer hears of reads that its leases' stamps have proven: many at once."""


class Overdue(Struct, frozen=True, gc=False):
    """To the scheduler: some transfers' answers are late."""


class ClaimLasting(Struct, frozen=True, gc=False):
    """To the scheduler: time to claim what is still being read."""


class RenewAll(Struct, frozen=True, gc=False):
    """To the scheduler: time to renew."""


class SettleAll(Struct, frozen=True, gc=False):
    """To the scheduler: time to settle."""


class PeerRequests:
    """The scheduler's letters to producers. `tell` and `tell_later` reach the scheduler itself."""

    def __init__(
        self, context: ActorContext, tell: Callable[[object], None], tell_later: Callable[[float, object], object]
    ) -> None:
        self._context = context
        self._tell_later = tell_later
        self._renewing = False
        self._settling: list[Transfer] = []
        """Proven, and the producer has not been told."""
        self._unclaimed: list[Transfer] = []
        """Reads that began without a claim since they were looked through."""
        self._late: Batch[int] = Batch(lambda: tell(Overdue()))
        """Transfers whose answers are."""
        self._due: Deadlines[int] = Deadlines(context.loop, self._late.put)

    def ask(self, transfer: Transfer, ask: Message) -> None:
        """Sends `ask`, and has it sent again until it is `answered`."""
        transfer.ask = ask
        self._send(transfer.address, ask)
        self._due.set(transfer.number, self._context.loop.time() + self._context.settings.retry)

    def answered(self, transfer: Transfer) -> None:
        """Nothing is asked for this transfer any more."""
        transfer.ask = None
        self._due.unset(transfer.number)

    def take_late(self) -> Iterator[int]:
        """Transfers whose answers are late; they may have come since."""
        return (number for number in self._late.take() if number not in self._due)

    # --- claims -----------------------------------------------------------------------------------------------------

    def claim(self, transfer: Transfer) -> None:
        """Asks the producer to hold the lease, which is renewed from the grant on."""
        transfer.claimed = True
        self.ask(transfer, self._claim_of(transfer))
        if not self._renewing:
            self._renewing = True
            self._tell_later(self._context.settings.claim_ttl / 3, RenewAll())

    def claim_if_it_lasts(self, transfer: Transfer) -> None:
        """Has the scheduler look at an unclaimed read after a while, with all others of that time."""
        if not self._unclaimed:
            self._tell_later(CLAIM_AFTER, ClaimLasting())
        self._unclaimed.append(transfer)

    def take_lasting(self) -> list[Transfer]:
        """The unclaimed reads that have not ended."""
        unclaimed, self._unclaimed = self._unclaimed, []
        return [transfer for transfer in unclaimed if transfer.state is State.READING and not transfer.claimed]

    def renew(self, transfers: Iterable[Transfer]) -> None:
        """Renews every claim that is held, drains included: the producer must not free what is being read.

        One that is not granted yet is asked for again instead: a renewal that overtakes it would be answered `Broken`.
        """
        by_address: dict[str, list[int]] = {}
        self._renewing = False
        for transfer in transfers:
            self._renewing = True
            if transfer.granted:
                by_address.setdefault(transfer.address, []).append(transfer.number)
        for address, numbers in by_address.items():
            for start in range(0, len(numbers), limits.MAX_RENEWALS):
                self._send(address, Renew(tuple(numbers[start : start + limits.MAX_RENEWALS])))
        if self._renewing:
            self._tell_later(self._context.settings.claim_ttl / 3, RenewAll())

    def let_go(self, transfer: Transfer, *, finished: bool) -> None:
        """The claim is not wanted any more; where `finished`, this reader will not come again."""
        if transfer.claimed:
            self._send(transfer.address, Release(transfer.number, finished))

    # --- fences -----------------------------------------------------------------------------------------------------

    def fence(self, transfer: Transfer) -> None:
        """Asks whether the lease was held until now."""
        self.ask(transfer, self._fence_of(transfer))

    def settle_soon(self, transfer: Transfer) -> None:
        """Tells the producer of a read that was proven without it, so that it counts its reader."""
        if not self._settling:
            self._tell_later(SETTLE_AFTER, SettleAll())
        self._settling.append(transfer)
        transfer.settled_by = self._context.loop.time() + self._context.settings.tombstone

    def settle(self) -> None:
        """Sends what waits to be settled."""
        settling, self._settling = self._settling, []
        by_address: dict[str, list[Fence]] = {}
        again = self._context.loop.time() + self._context.settings.retry
        for transfer in settling:
            if transfer.state is State.SETTLING:
                transfer.ask = fence = self._fence_of(transfer)
                self._due.set(transfer.number, again)
                by_address.setdefault(transfer.address, []).append(fence)
        for address, fences in by_address.items():
            for start in range(0, len(fences), limits.MAX_SETTLED):
                self._send(address, Settle(tuple(fences[start : start + limits.MAX_SETTLED])))

    def _fence_of(self, transfer: Transfer) -> Fence:
        return Fence(transfer.number, transfer.generation, None if transfer.granted else self._claim_of(transfer))

    def _claim_of(self, transfer: Transfer) -> Claim:
        pull, rank = transfer.pull, transfer.rank
        return Claim(
            claim=transfer.number,
            pool=rank.pool,
            offer=rank.offer,
            incarnation=rank.incarnation,
            generation=rank.generation,
            proof=pull.ticket.proof(rank),
            consumer=pull.consumer,
            reader=pull.pool.spec.shard.rank,
            readers=transfer.source.readers,
            ttl=self._context.settings.claim_ttl,
            serve=not transfer.direct,
            traceparent=None if transfer.span is None else transfer.span.traceparent,
        )

    def _send(self, address: str, message: Message) -> None:
        self._context.peers.ask(address, message)
