"""Pulls without transfers: they wait for their producers' daemons, for pools there, and for routes to our pools."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from kvd import limits
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.runtime.actor import Actor, Component, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pools import PeerView
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pull import TABLE, UNROUTED, Event, Pull, State
from kvd.actors.scheduler.transfers import Transfers
from kvd.errors import ErrorCode, KvdError, refusal

_IDS_PROVEN: Final = 64
"""To give a block back takes as long as the hash over so many ids of a ticket: 0.3 us."""


class UnroutedPulls(Component):
    """Has pulls go on by `route`, or end by `step`. `pulls` gives all there are, those that are leaving too.

    Those that waited for the same go on some at a time: to route, claim and plan one may take a millisecond.
    """

    def __init__(
        self,
        context: ActorContext,
        actor: Actor,
        producers: Producers,
        transfers: Transfers,
        *,
        handshake: HandshakeActor,
        pulls: Callable[[], list[Pull]],
        route: Callable[[Pull], None],
        step: Callable[[Pull, Event, KvdError | None], None],
    ) -> None:
        self._context = context
        self.actor = actor
        self._producers = producers
        self._transfers = transfers
        self._handshake = handshake
        self._pulls = pulls
        self._route = route
        self._step = step
        self._ready: Batch[Pull] = Batch(actor, self._go_on, _weight)
        """Those whose producers' daemons, or whose route, are known now; and routed ones with grants that waited."""
        self._failing: Batch[Pull] = Batch(actor, self._end, lambda _: limits.BLOCKS_PER_PULL)

    def of(self, address: str) -> list[Pull]:
        """Those that have to do with this peer, and do not fail already."""
        return [
            pull
            for pull in self._pulls()
            if pull.state in UNROUTED and address in pull.addresses and pull.failing is None
        ]

    def connect(self, pull: Pull) -> None:
        """Has the daemons asked that a pull waits for."""
        pull.unasked -= pull.awaited
        for address in sorted(pull.awaited):
            call(self._handshake.need, address, worker=pull.key[0], stale=address in self._producers.ready)

    def retry_later(self, pull: Pull) -> None:
        """Looks again for the pools of a pull after a while."""
        self.actor.later(self._context.settings.retry, self._retry, pull)

    def _retry(self, pull: Pull) -> None:
        if pull.state in (State.WAITING, State.LEAVING) and pull.can_go_on:
            pull.lookups_left = 1
            self._route(pull)

    # --- what they wait for -----------------------------------------------------------------------------------------

    def peer_up(self, view: PeerView) -> None:
        """A peer is ready, or has told us about its pools again.

        Goes on with the pulls that waited for it, and with those that it granted a pool not known before.
        """
        self._producers.ready[view.address] = view
        for pull in self._pulls():
            if view.address in pull.awaited:
                pull.awaited.discard(view.address)
                if not pull.awaited:
                    self._ready.put(pull)
        for pull in self._transfers.granted_early(view.address):
            self._ready.put(pull)

    def peer_down(self, address: str, error: KvdError, *, restarted: bool) -> None:
        """Fails those that have to do with this peer; if it has `restarted`, they wait for it."""
        self._producers.forget(address)
        pulls = self.of(address)
        if not restarted:
            self._fail(dict.fromkeys(pulls, error))
            return
        for pull in pulls:
            pull.routing = 0
            pull.awaited.add(address)
            self._step(pull, Event.RESTARTED, None)

    def peers_refused(self, worker: str, reasons: Mapping[str, str]) -> None:
        """Fails those of this worker that wait for one of these peers: others may have them connected to."""
        failures: dict[Pull, KvdError] = {}
        for pull in self._pulls():
            if pull.key[0] == worker and pull.state in UNROUTED and (refused := pull.awaited & reasons.keys()):
                address = min(refused)
                text = f"the daemon at {address} cannot be met: {reasons[address]}"
                failures[pull] = refusal(ErrorCode.PEER_LOST, text)
        self._fail(failures)

    def routes_made(self, numbers: Collection[int], failure: KvdError | None) -> None:
        """Goes on with the pulls that waited for one of these routes; fails them if it could not be worked out."""
        waited = [pull for pull in self._pulls() if pull.routing in numbers]
        for pull in waited:
            pull.routing = 0
            if failure is None:
                self._ready.put(pull)
        if failure is not None:
            self._fail(dict.fromkeys(waited, refusal(failure.code, failure.text)))

    def _fail(self, failures: Mapping[Pull, KvdError]) -> None:
        """A few at once, as a peer that nobody needs any more is forgotten next; many some at a time."""
        for pull, error in failures.items():
            pull.failing = pull.failing or error
        if len(failures) * limits.BLOCKS_PER_PULL <= limits.BATCH_BLOCKS:
            self._end(list(failures))
            return
        for pull in failures:
            self._failing.put(pull)

    def _end(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            if pull.state not in TABLE.final:
                self._step(pull, Event.FAIL, pull.failing)

    def _go_on(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            if pull.state not in UNROUTED:
                self._transfers.rerouted(pull)
            elif pull.can_go_on:  # unless a daemon has restarted meanwhile, or it has failed
                self._route(pull)


def _weight(pull: Pull) -> int:
    """How much work it is to go on with a pull, in blocks that are given back.

    About one for each descriptor, and one for as many ids as a proof goes over in that time, for each rank.
    """
    groups = pull.pool.spec.groups
    descriptors = sum(
        len(span.ids) // 4 * sum(len(view.layers) for view in groups[span.group].views) for span in pull.blocks
    )
    ids = [sum(len(span.ids) // 4 for span in spans) for spans in pull.ticket.blocks]
    proven = sum(ids[rank.blocks] for rank in pull.ticket.ranks)
    return limits.BLOCKS_PER_PULL + descriptors + proven // _IDS_PROVEN
