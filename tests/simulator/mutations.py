"""Each promise's mechanisms, taken out one at a time: what the simulator must notice."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, _Log
from kvd.actors.completion.messages import Notify, SessionUp
from kvd.actors.gateway import actor as gateway
from kvd.actors.leases import actor as leases
from kvd.actors.leases import claims, offers
from kvd.actors.leases.claims import Claims
from kvd.actors.pools import actor as pools
from kvd.actors.pools.actor import PoolsActor, PoolState
from kvd.actors.runtime import blocks
from kvd.actors.runtime.blocks import BusyBlocks
from kvd.actors.runtime.deadlines import Deadlines
from kvd.actors.scheduler import actor as scheduler
from kvd.actors.scheduler import peer_requests as asks
from kvd.actors.scheduler import pulls
from kvd.actors.scheduler.transfers import Transfers
from kvd.memory.stamps import Stamps
from kvd.protocol.peer import Held
from kvd.protocol.worker import Cancelled, Failed
from kvd.state import lease as lease_machine
from kvd.state import transfer as transfer_machine
from kvd.state.machine import Step
from tests.simulator.checks import bounds as small
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.support.fake_fabric import FakeFabric, FakeRead, Fault
from tests.support.fake_transport import FakeTransport


@dataclass(frozen=True)
class Mutation:
    name: str
    breaks: Promise
    apply: Callable
    first: int = 0
    """Where to begin: the seed that found it when this was written, where that is far from 0."""
    needs: Piece | None = None
    """A piece without which it is not found."""


MUTATIONS: list[Mutation] = []


def mutation(breaks, first=0, needs=None):
    def register(apply):
        MUTATIONS.append(Mutation(apply.__name__, breaks, apply, first, needs))
        return apply

    return register


def handler(monkeypatch, actor, kind, replacement):
    monkeypatch.setattr(actor, actor.handled[kind], replacement)


def steps(monkeypatch, table, **changes):
    monkeypatch.setattr(table, "steps", {**table.steps, **changes.pop("steps")})


# --- 1: every pull ends once, in time --------------------------------------------------------------------------------


@mutation(Promise.ENDS_ONCE)
def deadlines_are_not_kept(monkeypatch):
    handler(monkeypatch, scheduler.SchedulerActor, scheduler._DeadlinesOver, lambda self, message: None)


@mutation(Promise.ENDS_ONCE)
def a_lost_peer_is_not_told_to_its_pulls(monkeypatch):
    original = scheduler.SchedulerActor._end

    def end(self, pull, error):
        if error.code != "deadline":
            original(self, pull, error)

    monkeypatch.setattr(scheduler.SchedulerActor, "_end", end)


@mutation(Promise.ENDS_ONCE)
def a_pull_that_failed_is_told_twice(monkeypatch):
    original = CompletionActor.notify

    def notify(self, message):
        original(self, message)
        if isinstance(message.item, Failed):
            original(self, message)

    handler(monkeypatch, CompletionActor, Notify, notify)


@mutation(Promise.ENDS_ONCE, first=265)
def a_drain_makes_no_last_call(monkeypatch):
    handler(monkeypatch, leases.LeasesActor, leases._LastCall, lambda self, message: None)


# --- 2: done means the bytes that were offered ------------------------------------------------------------------------


@mutation(Promise.FENCED)
def the_fence_always_holds(monkeypatch):
    original = Claims._fence

    def fence(self, key, peer, fence):
        if key in self._held:
            original(self, key, peer, fence)
        else:
            self._reply(key.sender, Held(key.claim))

    monkeypatch.setattr(Claims, "_fence", fence)


@mutation(Promise.FENCED)
def nobody_asks_for_the_fence(monkeypatch):
    table = transfer_machine.TABLE
    done = Step(
        transfer_machine.State.HELD,
        (transfer_machine.Effect.LET_GO, transfer_machine.Effect.FREE, transfer_machine.Effect.CONTRIBUTE),
    )
    key = (transfer_machine.State.READING, transfer_machine.Event.LANDED)
    steps(monkeypatch, table, steps={key: done})


@mutation(Promise.FENCED, first=19)
def leases_are_not_broken_when_the_offer_is_withdrawn(monkeypatch):
    key = (lease_machine.State.CLAIMED, lease_machine.Event.REVOKE)
    steps(
        monkeypatch,
        lease_machine.TABLE,
        steps={key: Step(lease_machine.State.REVOKED, (lease_machine.Effect.RELEASE,))},
    )


@mutation(Promise.FENCED, first=49)
def an_expired_claim_still_holds_its_lease(monkeypatch):
    """The consumer goes silent, the offer expires, the blocks are the producer's: and then the fence is asked for."""

    def expired(self, key):
        lease = self._held.get(key)
        if lease is not None:
            lease.claims.pop(key)
            self._offers.step(lease, lease_machine.Event.UNCLAIMED)
            if self._context.loop.time() >= lease.expires:
                self._offers.step(lease, lease_machine.Event.EXPIRE, "expired")
            else:
                lease.claims[key] = None

    def fence(self, key, peer, fence):
        if key in self._held:
            self._reply(key.sender, Held(key.claim))
        else:
            original(self, key, peer, fence)

    original = Claims._fence

    monkeypatch.setattr(Claims, "expired", expired)
    monkeypatch.setattr(Claims, "_fence", fence)


@mutation(Promise.FENCED)
def stamps_are_not_wiped(monkeypatch):
    monkeypatch.setattr(Stamps, "wipe", lambda self, number: self._free.append(number) if number else None)


@mutation(Promise.FENCED, first=192)
def a_stamp_is_read_before_the_bytes(monkeypatch):
    early = {}
    read_then = FakeTransport._read

    def read(self, agent, local_base, remote_base, slices, *, stamp):
        word = FakeRead(slices.read, agent, 0, 0, 0, Fault(), stamp)
        early[self._agent, slices.read] = read_now(self._fabric, self._agent, word)
        read_then(self, agent, local_base, remote_base, slices, stamp=stamp)

    read_now = FakeFabric.stamp
    monkeypatch.setattr(FakeTransport, "_read", read)
    monkeypatch.setattr(FakeFabric, "stamp", lambda self, reader, read: early[reader, read.key])


@mutation(Promise.BAD_INPUT, first=75)
def a_stamp_says_nothing_of_the_blocks(monkeypatch):
    for module in (pulls, offers.ticket):
        monkeypatch.setattr(module, "stamp", lambda secret, generation, proof: generation)


@mutation(Promise.FENCED, first=137, needs=Piece.REUSED_NAMES)
def generations_are_not_compared(monkeypatch):
    original = Claims._check_fence

    def check_fence(self, key, fence):
        lease = self._held.get(key)
        if lease is None and fence.unclaimed is not None and key not in self._fenced:
            lease = self._offers.find(fence.unclaimed.pool, fence.unclaimed.offer)
            fence = replace(fence, unclaimed=replace(fence.unclaimed, generation=0))
        return original(self, key, fence if lease is None else replace(fence, generation=lease.generation))

    monkeypatch.setattr(Claims, "_check_fence", check_fence)


@mutation(Promise.FENCED, first=42)
def stamps_are_believed_whatever_path_the_bytes_took(monkeypatch):
    original = Transfers.landed
    monkeypatch.setattr(Transfers, "landed", lambda self, event: original(self, replace(event, in_post=True)))


# --- 3: nothing is written to free blocks -----------------------------------------------------------------------------


@mutation(Promise.QUARANTINE)
def blocks_are_free_before_the_read_has_ended(monkeypatch):
    original = Transfers._read

    def read(self, transfer):
        original(self, transfer)
        transfer.writing = False

    monkeypatch.setattr(Transfers, "_read", read)


@mutation(Promise.QUARANTINE)
def workers_are_not_told_of_quarantine(monkeypatch):
    original = CompletionActor.notify

    def notify(self, message):
        item = message.item
        if isinstance(item, Failed):
            message = Notify(message.worker, Failed(item.request, item.code, item.text, quarantined=False))
        elif isinstance(item, Cancelled):
            message = Notify(message.worker, Cancelled(item.request, quarantined=False))
        original(self, message)

    handler(monkeypatch, CompletionActor, Notify, notify)


# --- 4: no notification is lost, none comes twice ---------------------------------------------------------------------


@mutation(Promise.NOTIFIED)
def notifications_are_not_kept(monkeypatch):
    original = CompletionActor.flush

    def flush(self, message):
        original(self, message)
        log = self._logs.get(message.worker)
        if log is not None:
            log.items.clear()
            log.sent = 0

    monkeypatch.setattr(CompletionActor, "flush", flush)


@mutation(Promise.NOTIFIED)
def a_reconnecting_worker_gets_a_new_log(monkeypatch):
    original = CompletionActor.session_up

    def session_up(self, message):
        self._logs[message.worker] = _Log(message.tenancy)
        original(self, message)

    handler(monkeypatch, CompletionActor, SessionUp, session_up)


# --- 5: only blocks of the own pool -----------------------------------------------------------------------------------


@mutation(Promise.OWN_POOL)
def block_ids_are_not_checked(monkeypatch):
    monkeypatch.setattr(blocks, "check_ids", lambda group, ids: None)
    monkeypatch.setattr(BusyBlocks, "take", lambda self, spans: None)
    monkeypatch.setattr(BusyBlocks, "give_back", lambda self, spans: None)


# --- 6: bad input is refused and changes nothing ----------------------------------------------------------------------


@mutation(Promise.BAD_INPUT, first=29)
def the_proof_of_a_ticket_is_not_checked(monkeypatch):
    monkeypatch.setattr(claims.hmac, "compare_digest", lambda one, other: True)


@mutation(Promise.BAD_INPUT)
def refusals_are_not_sent(monkeypatch):
    monkeypatch.setattr(gateway.GatewayActor, "_refuse", lambda self, session, call, error: None)


# --- 7: a death costs only what it must -------------------------------------------------------------------------------


@mutation(Promise.QUARANTINE)
def successors_do_not_wait(monkeypatch):
    original = PoolsActor.attach

    def attach(self, request):
        record = self._records.get(request.worker)
        if record is not None and record.state is PoolState.KEPT:
            record.request = request
            self._lend(record)
        else:
            original(self, request)

    monkeypatch.setattr(PoolsActor, "attach", attach)


@mutation(Promise.SURVIVES, first=390)
def claims_are_not_renewed(monkeypatch):
    handler(monkeypatch, scheduler.SchedulerActor, asks.RenewAll, lambda self, message: None)


@mutation(Promise.SURVIVES, first=47)
def lost_asks_are_not_sent_again(monkeypatch):
    handler(monkeypatch, scheduler.SchedulerActor, asks.Overdue, lambda self, message: None)


@mutation(Promise.SURVIVES)
def lasting_reads_are_not_claimed(monkeypatch):
    handler(monkeypatch, scheduler.SchedulerActor, asks.ClaimLasting, lambda self, message: None)


@mutation(Promise.SURVIVES, first=96)
def the_incarnation_of_a_claim_is_not_checked(monkeypatch):
    original = Claims._lease_of
    monkeypatch.setattr(Claims, "_lease_of", lambda self, request: original(self, replace(request, incarnation=0)))


@mutation(Promise.SURVIVES)
def a_returned_pool_is_not_taken(monkeypatch):
    original = pools.PoolsActor._make

    def make(self, request):
        original(self, type(request)(**{**{f: getattr(request, f) for f in request.__slots__}, "descriptor": -1}))

    monkeypatch.setattr(pools.PoolsActor, "_make", make)


# --- 0: nothing leaks -------------------------------------------------------------------------------------------------


@mutation(Promise.SOUND)
def tombstones_stay(monkeypatch):
    handler(monkeypatch, leases.LeasesActor, leases._Sweep, lambda self, message: None)


@mutation(Promise.SOUND)
def deadlines_are_never_unset(monkeypatch):
    monkeypatch.setattr(Deadlines, "unset", lambda self, key: None)


@mutation(Promise.SOUND)
def claims_are_never_let_go(monkeypatch):
    monkeypatch.setattr(asks.PeerRequests, "let_go", lambda self, transfer, finished: None)


# --- each bound -------------------------------------------------------------------------------------------------------


def bound(name, first):
    """Everybody sees the bound as it is outside of the simulator; the inspector counts by the small one."""

    def apply(monkeypatch):
        monkeypatch.setitem(small.SEEN, name, getattr(limits, name))

    apply.__name__ = f"the_bound_{name}_is_not_kept"
    mutation(Promise.SOUND, first)(apply)


FIRST = {
    "MAX_CLAIMS_PER_OFFER": 33,
    "MAX_CLAIMS_WAITING": 64,
    "MAX_HANDSHAKES": 16,
    "MAX_REQUESTS_PER_WORKER": 88,
    "MAX_TOMBSTONES": 0,
}
for each in small.COUNTED:
    bound(each, FIRST[each])
