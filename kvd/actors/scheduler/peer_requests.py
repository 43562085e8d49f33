"""What producers are asked on behalf of transfers: claims, renewals, fences; sent again if an answer is late."""

from collections import Counter
from collections.abc import Callable, Mapping

from kvd import limits
from kvd.actors.handshake.peers import PeerChannel
from kvd.actors.runtime.actor import Actor
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch, Deadlines
from kvd.actors.scheduler.pull import WAS_CANCELLED
from kvd.actors.scheduler.transfer import TABLE, TELLING, Event, State, Transfer
from kvd.errors import ErrorCode, refusal
from kvd.protocol.peer import Claim, Fence, Follow, Release, Renew, Settle
from kvd.protocol.types import Message


class ClaimShares:
    """Claims by user and producer, who has room for so many of this daemon: one user leaves some to others.

    Those ahead of their offers wait at the producer, as their tickets name no lease.
    """

    def __init__(self) -> None:
        self._ahead: Counter[tuple[int, str]] = Counter()
        self._open: Counter[tuple[int, str]] = Counter()
        """Transfers that began with a claim and have not ended, each of which may hold one."""

    def check(self, transfer: Transfer) -> None:
        """Checks whether one more may be sent.

        Raises:
            Unavailable: `OVERLOADED`, too many of its user's wait or are held already.

        """
        key = _key(transfer)
        if transfer.rank.generation == 0 and self._ahead[key] >= limits.MAX_CLAIMS_AHEAD:
            text = f"{self._ahead[key]} claims of this user wait for offers at {transfer.address}, the bound"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; try again later")
        if self._open[key] >= limits.MAX_CLAIMS_PER_USER:
            text = f"{self._open[key]} reads of this user from {transfer.address} have not ended, the bound"
            raise refusal(ErrorCode.OVERLOADED, f"{text}; try again later")

    def step(self, transfer: Transfer, before: State) -> None:
        """A transfer that asks has come from another state."""
        if transfer.rank.generation == 0:
            _add(self._ahead, transfer, (transfer.state is State.CLAIMING) - (before is State.CLAIMING))
        _add(self._open, transfer, (before is State.NEW) - (transfer.state in TABLE.final))


def _add(counter: Counter[tuple[int, str]], transfer: Transfer, change: int) -> None:
    if change:
        key = _key(transfer)
        counter[key] += change
        if not counter[key]:
            del counter[key]


def _key(transfer: Transfer) -> tuple[int, str]:
    return transfer.pull.pool.uid, transfer.address


CLAIM_AFTER = 0.02
"""Seconds after which a read that began without a claim sends one: on the same host most have ended by then."""

SETTLE_AFTER = 0.02
"""Seconds after which a producer hears of reads that its leases' stamps have proven: many at once."""


class PeerRequests:
    """Sends requests to producers. `transfers` are the open ones by number; `step` takes what happens to one."""

    def __init__(
        self,
        context: ActorContext,
        scheduler: Actor,
        channel: PeerChannel,
        *,
        transfers: Mapping[int, Transfer],
        step: Callable[[Transfer, Event], None],
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._channel = channel
        self._transfers = transfers
        self._step = step
        self._renewing = False
        self._settling: list[Transfer] = []
        """Those whose reader has finished, and the producer has not been told."""
        self._unclaimed: list[Transfer] = []
        """Reads that began without a claim since `_claim_lasting` ran."""
        self._due: Deadlines[Transfer] = Deadlines(context.loop, Batch(scheduler, self._resend).put)
        """When answers are late."""

    def request(self, transfer: Transfer, message: Message) -> None:
        """Sends `message`, again and again until it is `answered`."""
        transfer.unanswered = message
        self._channel.ask(transfer.address, message)
        self._due.set(transfer, self._context.loop.time() + self._context.settings.retry)

    def answered(self, transfer: Transfer) -> None:
        """Requests nothing for this transfer any more."""
        transfer.unanswered = None
        self._due.unset(transfer)

    def _resend(self, late: list[Transfer]) -> None:
        """Sends again what has no answer in time: it, or the answer, may have been lost with a connection."""
        for transfer in late:
            if transfer.unanswered is None or transfer in self._due:
                continue  # the answer has come since
            if transfer.state in TELLING and self._context.loop.time() > transfer.settled_by:
                self._step(transfer, Event.REFUSED)  # a peer that lives and does not answer: its lease will expire
            else:
                self.request(transfer, transfer.unanswered)

    # --- claims -----------------------------------------------------------------------------------------------------

    def claim(self, transfer: Transfer) -> None:
        """Asks the producer to hold the lease, which is renewed once it is granted."""
        transfer.claimed = True
        self.request(transfer, self._claim_of(transfer))
        if not self._renewing:
            self._renew_later()

    def claim_if_it_lasts(self, transfer: Transfer) -> None:
        """Claims the lease of an unclaimed read if it is open for long."""
        if not self._unclaimed:
            self._scheduler.later(CLAIM_AFTER, self._claim_lasting)
        self._unclaimed.append(transfer)

    def _claim_lasting(self) -> None:
        unclaimed, self._unclaimed = self._unclaimed, []
        for transfer in unclaimed:
            if transfer.state is State.READING and not transfer.claimed:
                self._step(transfer, Event.LASTS)

    def _renew_later(self) -> None:
        self._renewing = True
        self._scheduler.later(self._context.settings.claim_ttl / 3, self._renew)

    def _renew(self) -> None:
        """Renews every granted claim; that of a read which still drains, although its pull has ended, is released.

        Nobody will use what such a read brings, and it may hang for long: the producer need not keep blocks for it.
        Those that drain as quickly as usual keep theirs, as a producer without readers answers slowly.

        A claim that is not granted yet is sent again instead: a renewal that overtakes it would be answered `Broken`.
        """
        by_address: dict[str, list[int]] = {}
        for transfer in self._transfers.values():
            if transfer.state is State.DRAINING:
                self.release(transfer)
            elif transfer.granted:
                by_address.setdefault(transfer.address, []).append(transfer.number)
        for address, numbers in by_address.items():
            for start in range(0, len(numbers), limits.MAX_RENEWALS):
                self._channel.ask(address, Renew(tuple(numbers[start : start + limits.MAX_RENEWALS])))
        self._renewing = False
        if self._transfers:
            self._renew_later()

    def release(self, transfer: Transfer) -> None:
        """The claim is not wanted any more; the producer is told once."""
        self.answered(transfer)
        if transfer.claimed:
            # A cancelled pull will not come again; one that failed may, from another rank or after a retry.
            self._channel.ask(transfer.address, Release(transfer.number, transfer.pull.state in WAS_CANCELLED))
            transfer.claimed = transfer.granted = False
            transfer.released = True

    def follow(self, transfer: Transfer) -> None:
        """Asks what the offer grows by beyond what is known of it."""
        self.request(transfer, Follow(transfer.number, transfer.told.parts))

    # --- fences -----------------------------------------------------------------------------------------------------

    def fence(self, transfer: Transfer) -> None:
        """Asks whether the lease was held until now."""
        self.request(transfer, self._fence_of(transfer))

    def settle_soon(self, transfer: Transfer) -> None:
        """Tells the producer of a read that was proven without it, or will not come, so that it counts its reader."""
        if not self._settling:
            self._scheduler.later(SETTLE_AFTER, self._settle)
        self._settling.append(transfer)
        transfer.settled_by = self._context.loop.time() + self._context.settings.tombstone

    def _settle(self) -> None:
        settling, self._settling = self._settling, []
        by_address: dict[str, list[Fence]] = {}
        again = self._context.loop.time() + self._context.settings.retry
        for transfer in settling:
            if transfer.state in TELLING:
                fence = self._leave_of(transfer) if transfer.state is State.LEAVING else self._fence_of(transfer)
                transfer.unanswered = fence if transfer.state is State.SETTLING else Settle((fence,))
                self._due.set(transfer, again)
                by_address.setdefault(transfer.address, []).append(fence)
        for address, fences in by_address.items():
            for start in range(0, len(fences), limits.MAX_SETTLED):
                self._channel.ask(address, Settle(tuple(fences[start : start + limits.MAX_SETTLED])))

    def _fence_of(self, transfer: Transfer) -> Fence:
        unclaimed = None if transfer.granted else self._claim_of(transfer)
        proof = transfer.proof if transfer.pull.ticket.grows else None
        return Fence(transfer.number, transfer.generation, unclaimed, proof)

    def _leave_of(self, transfer: Transfer) -> Fence:
        return Fence(transfer.number, 0, self._claim_of(transfer))

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
            serve=not transfer.view.same_host,
            traceparent=None if transfer.span is None else transfer.span.traceparent,
        )
