"""Pulls without transfers: they wait for their producers' daemons, for pools there, and for routes to our pools."""

from collections.abc import Callable, Mapping

from kvd import limits
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.runtime.actor import Actor, Component, call
from kvd.actors.runtime.context import ActorContext
from kvd.actors.runtime.deferred import Batch
from kvd.actors.runtime.pools import PeerView
from kvd.actors.scheduler.producers import Producers
from kvd.actors.scheduler.pull import UNROUTED, Event, Pull, State
from kvd.actors.scheduler.routes import RouteKey
from kvd.actors.scheduler.transfers import Transfers
from kvd.errors import ErrorCode, KvdError, refusal


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

    def of(self, address: str) -> list[Pull]:
        """Those that have to do with this peer."""
        return [pull for pull in self._pulls() if pull.state in UNROUTED and pull.reads_from(address)]

    def connect(self, pull: Pull) -> None:
        """Has the daemons asked that a pull waits for."""
        pull.unasked -= pull.awaited
        for address in sorted(pull.awaited):
            call(self._handshake.need, address, worker=pull.key[0], stale=address in self._producers)

    def retry_later(self, pull: Pull) -> None:
        """Looks again for the pools of a pull after a while."""
        self.actor.later(self._context.settings.retry, self._retry, pull)

    def _retry(self, pull: Pull) -> None:
        if pull.state in (State.WAITING, State.LEAVING) and not pull.awaited:
            pull.lookups_left = 1
            self._route(pull)

    # --- what they wait for -----------------------------------------------------------------------------------------

    def peer_up(self, view: PeerView) -> None:
        """A peer is ready, or has told us about its pools again.

        Goes on with the pulls that waited for it, and with those that it granted a pool not known before.
        """
        self._producers.learn(view)
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
        for pull in self.of(address):
            if restarted:
                pull.routing = None
                pull.awaited.add(address)
                self._step(pull, Event.RESTARTED, None)
            else:
                self._step(pull, Event.FAIL, error)  # at once: a peer that nobody needs any more is forgotten next

    def peers_refused(self, worker: str, reasons: Mapping[str, str]) -> None:
        """Fails those of this worker that wait for one of these peers: others may have them connected to."""
        for pull in self._pulls():
            if pull.key[0] == worker and pull.state in UNROUTED and (refused := pull.awaited & reasons.keys()):
                address = min(refused)
                text = f"the daemon at {address} cannot be met: {reasons[address]}"
                self._step(pull, Event.FAIL, refusal(ErrorCode.PEER_LOST, text))

    def route_made(self, key: RouteKey, failure: KvdError | None) -> None:
        """Goes on with the pulls that waited for this route; fails them if it could not be worked out."""
        for pull in self._pulls():
            if pull.routing == key:
                pull.routing = None
                if failure is None:
                    self._ready.put(pull)
                else:
                    self._step(pull, Event.FAIL, refusal(failure.code, failure.text))

    def _go_on(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            if pull.state not in UNROUTED:
                self._transfers.rerouted(pull)
            elif not pull.awaited:  # it waits for a daemon again if that has restarted meanwhile
                self._route(pull)


def _weight(pull: Pull) -> int:
    """How much work it is to go on with a pull, in blocks that are given back: about one for each descriptor."""
    groups = pull.pool.spec.groups
    descriptors = sum(
        len(span.ids) // 4 * sum(len(view.layers) for view in groups[span.group].views) for span in pull.blocks
    )
    return limits.BLOCKS_PER_PULL + descriptors
