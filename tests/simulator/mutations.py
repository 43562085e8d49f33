"""Each promise's mechanisms, taken out one at a time: what the simulator must notice."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvd import limits
from kvd.actors.completion.actor import CompletionActor, Sessions, _Log
from kvd.actors.handshake import peer_table as peer_machine
from kvd.actors.handshake.actor import HandshakeActor
from kvd.actors.handshake.peer import MISSED_BEATS, Peer
from kvd.actors.leases import claim as claim_machine
from kvd.actors.leases import content as content_machine
from kvd.actors.leases import lease as lease_machine
from kvd.actors.leases import offers
from kvd.actors.leases.actor import LeasesActor
from kvd.actors.leases.claim import ClaimRecord
from kvd.actors.leases.claims import Claims
from kvd.actors.leases.ended import Tombstones
from kvd.actors.leases.offers import Offers
from kvd.actors.pools import actor as pools
from kvd.actors.pools.actor import PoolsActor
from kvd.actors.pools.pool import Event as PoolEvent
from kvd.actors.pools.pool import PoolRecord
from kvd.actors.pools.pool import State as PoolState
from kvd.actors.pools.requests import AttachPool
from kvd.actors.pools.waits import Waits
from kvd.actors.runtime import deferred as deadlines
from kvd.actors.runtime import pools as runtime_pools
from kvd.actors.runtime.deferred import Deadlines
from kvd.actors.runtime.machine import Step
from kvd.actors.runtime.pools import BlocksInUse, Uses
from kvd.actors.scheduler import actor as scheduler
from kvd.actors.scheduler import pull as pull_machine
from kvd.actors.scheduler import transfer as transfer_machine
from kvd.actors.scheduler import transfer as transfers
from kvd.actors.scheduler.peer_requests import PeerRequests
from kvd.actors.scheduler.routes import Told
from kvd.actors.scheduler.transfers import Transfers
from kvd.daemon.systemd import DescriptorStore
from kvd.memory.stamps import Stamps
from kvd.plan import Section
from kvd.protocol.worker import Cancelled, Failed
from kvd.transport.routed import RoutedTransport
from tests.simulator.checks import bounds as small
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.pieces import Piece
from tests.simulator.virtual.fabric import SimFabric
from tests.simulator.virtual.fleet import HEARTBEAT
from tests.support.fake_fabric import FakeFabric, Reach
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


def steps(monkeypatch, table, **changes):
    monkeypatch.setattr(table, "steps", {**table.steps, **changes.pop("steps")})


# --- 1: every pull ends once, in time --------------------------------------------------------------------------------


@mutation(Promise.ENDS_ONCE)
def deadlines_are_not_kept(monkeypatch):
    monkeypatch.setattr(scheduler.SchedulerActor, "_deadlines_over", lambda self, keys: None)


@mutation(Promise.ENDS_ONCE)
def a_lost_peer_is_not_told_to_its_pulls(monkeypatch):
    original = scheduler.SchedulerActor._step

    def step(self, pull, event, error=None):
        if error is None or error.code != "deadline":
            original(self, pull, event, error)

    monkeypatch.setattr(scheduler.SchedulerActor, "_step", step)


@mutation(Promise.ENDS_ONCE)
def a_pull_is_concluded_again_when_its_reads_have_ended(monkeypatch):
    effect = pull_machine.Effect
    key = (pull_machine.State.FAILING, pull_machine.Event.CLOSED)
    step = Step(pull_machine.State.FAILED, (effect.CONCLUDE, effect.TELL_FREED, effect.FREE))
    steps(monkeypatch, pull_machine.TABLE, steps={key: step})


@mutation(Promise.ENDS_ONCE)
def a_pull_that_failed_is_told_twice(monkeypatch):
    original = CompletionActor.notify

    def notify(self, worker, item):
        original(self, worker, item)
        if isinstance(item, Failed):
            original(self, worker, item)

    monkeypatch.setattr(CompletionActor, "notify", notify)


@mutation(Promise.ENDS_ONCE, first=311)
def a_drain_makes_no_last_call(monkeypatch):
    monkeypatch.setattr(LeasesActor, "_last_call", lambda self: None)


@mutation(Promise.ENDS_ONCE, first=1014)
def a_stop_is_not_told_to_pulls(monkeypatch):
    monkeypatch.setattr(scheduler.SchedulerActor, "stop", lambda self: None)


@mutation(Promise.ENDS_ONCE, first=575)
def a_stop_does_not_end_offers(monkeypatch):
    monkeypatch.setattr(LeasesActor, "stop", lambda self: None)


# --- 2: done means the bytes that were offered ------------------------------------------------------------------------


@mutation(Promise.FENCED)
def the_fence_always_holds(monkeypatch):
    original = Claims._fence

    def fence(self, key, peer, fence):
        if held(self, key):
            original(self, key, peer, fence)
        else:
            self._answers.held(key)

    monkeypatch.setattr(Claims, "_fence", fence)


def held(claims, key):
    return key in claims._records and claims._records[key].state is claim_machine.State.HELD


@mutation(Promise.FENCED)
def nobody_asks_for_the_fence(monkeypatch):
    table = transfer_machine.TABLE
    done = Step(
        transfer_machine.State.DONE,
        (transfer_machine.Effect.RELEASE, transfer_machine.Effect.CONTRIBUTE),
    )
    key = (transfer_machine.State.READING, transfer_machine.Event.LANDED)
    steps(monkeypatch, table, steps={key: done})


@mutation(Promise.FENCED, first=75)
def leases_are_not_broken_when_the_offer_is_withdrawn(monkeypatch):
    key = (lease_machine.State.CLAIMED, lease_machine.Event.REVOKE)
    steps(
        monkeypatch,
        lease_machine.TABLE,
        steps={key: Step(lease_machine.State.REVOKED, (lease_machine.Effect.RELEASE,))},
    )


@mutation(Promise.FENCED, first=479)
def an_expired_claim_still_holds_its_lease(monkeypatch):
    """The consumer goes silent, the offer expires, the blocks are the producer's: and then the fence is asked for."""

    def overdue(self, keys):
        overdue_then(self, [key for key in keys if not held(self, key)])
        for claim in [self._records[key] for key in keys if held(self, key)]:
            claim.lease.let_go(claim)
            self._offers.step(claim.lease, lease_machine.Event.UNCLAIMED, "expired")
            if self._context.loop.time() >= claim.lease.expires:
                self._offers.step(claim.lease, lease_machine.Event.EXPIRE, "expired")
            else:
                claim.lease.hold(claim)

    def fence(self, key, peer, fence):
        if held(self, key):
            self._answers.held(key)
        else:
            fence_then(self, key, peer, fence)

    overdue_then, fence_then = Claims._overdue, Claims._fence

    monkeypatch.setattr(Claims, "_overdue", overdue)
    monkeypatch.setattr(Claims, "_fence", fence)


@mutation(Promise.FENCED)
def stamps_are_not_wiped(monkeypatch):
    monkeypatch.setattr(Stamps, "wipe", lambda self, number: self._free.append(number) if number else None)


@mutation(Promise.FENCED, first=647)
def a_stamp_is_read_before_the_bytes(monkeypatch):
    early = {}
    read_then = FakeTransport._read

    def read(self, request):
        reach = Reach(same_host=True, stamps=True)
        early[self._agent, request.read] = read_now(self._fabric, self._agent, request, reach)
        read_then(self, request)

    read_now = FakeFabric.stamp
    monkeypatch.setattr(FakeTransport, "_read", read)
    monkeypatch.setattr(FakeFabric, "stamp", lambda self, reader, request, reach: early[reader, request.read])


@mutation(Promise.BAD_INPUT, first=640)
def a_stamp_says_nothing_of_the_blocks(monkeypatch):
    for module in (transfers, offers.ticket):
        monkeypatch.setattr(module, "stamp", lambda secret, generation, proof, epoch: generation)


@mutation(Promise.BAD_INPUT, first=193)
def nobody_looks_for_the_stamp_before_the_bytes(monkeypatch):
    read = FakeTransport.read
    monkeypatch.setattr(FakeTransport, "read", lambda self, request: read(self, replace(request, expected=0)))


@mutation(Promise.BAD_INPUT, first=264)
def leases_without_a_stamp_are_not_claimed_first(monkeypatch):
    def names_lease(self):
        return self.rank.generation != 0 and self.view.told_of(self.source.pool, self.rank)

    monkeypatch.setattr(transfers.Transfer, "is_stamped", property(names_lease))


@mutation(Promise.FENCED, first=2264, needs=Piece.REUSED_NAMES)
def generations_are_not_compared(monkeypatch):
    original = Claims._check_fence

    def check_fence(self, key, peer, fence):
        lease = self._records[key].lease if key in self._records else None
        if key not in self._records and fence.unclaimed is not None:
            lease = self._offers.find(fence.unclaimed.pool, fence.unclaimed.offer)
            fence = replace(fence, unclaimed=replace(fence.unclaimed, generation=0))
        return original(self, key, peer, fence if lease is None else replace(fence, generation=lease.generation))

    monkeypatch.setattr(Claims, "_check_fence", check_fence)


@mutation(Promise.FENCED)
def pulls_write_to_what_is_offered(monkeypatch):
    monkeypatch.setattr(BlocksInUse, "offer", lambda self, spans: None)
    monkeypatch.setattr(BlocksInUse, "release", lambda self, spans: None)


@mutation(Promise.FENCED)
def what_pulls_write_to_is_offered(monkeypatch):
    monkeypatch.setattr(Uses, "first_written", lambda self, ids: None)


@mutation(Promise.FENCED, first=647)
def stamps_of_dead_processes_are_believed(monkeypatch):
    monkeypatch.setattr(SimFabric, "knows", lambda self, agent: agent in self._agents or agent in self._outlived)


@mutation(Promise.FENCED, first=6319, needs=Piece.TWO_ADDRESSES)
def a_view_is_announced_by_any_answer_about_its_agent(monkeypatch):
    def added(self, event):
        for peer in self._peers.using(event.agent):
            peer.reached_by(event, self._context)
            self._step(peer, peer_machine.Event.LOADED)

    monkeypatch.setattr(HandshakeActor, "added", added)


@mutation(Promise.FENCED, needs=Piece.GROWING_OFFERS)
def the_last_part_of_an_offer_is_not_read_before_the_fence(monkeypatch):
    more = Told.more

    def told(self, grown, groups):
        after = more(self, grown, groups)
        return dataclasses.replace(after, read=after.tokens) if after.whole else after

    monkeypatch.setattr(Told, "more", told)


@mutation(Promise.FENCED, first=14, needs=Piece.GROWING_OFFERS)
def a_proof_over_a_part_is_enough(monkeypatch):
    monkeypatch.setattr(ClaimRecord, "knows_all", lambda self, fence: True)
    monkeypatch.setattr(transfers.Transfer, "has_landed", lambda self: transfer_machine.Event.LANDED)


@mutation(Promise.FENCED, needs=Piece.GROWING_OFFERS)
def blocks_are_read_before_they_are_full(monkeypatch):
    def full(tokens):
        return -(-tokens // 4) * 4

    monkeypatch.setattr(
        Told, "section", property(lambda self: Section(self.read, None if self.whole else full(self.tokens)))
    )
    monkeypatch.setattr(Told, "landed", lambda self: dataclasses.replace(self, read=full(self.tokens)))


@mutation(Promise.FENCED, needs=Piece.SMALL_BOUNDS)
def a_large_read_is_fenced_before_the_last_part_of_its_plan_has_landed(monkeypatch):
    monkeypatch.setattr(Transfers, "_has_landed", lambda self, transfer: transfer.has_landed())


@mutation(Promise.BAD_INPUT, needs=Piece.GROWING_OFFERS)
def what_is_closed_is_extended(monkeypatch):
    closed = content_machine.State.CLOSED
    changed = {(closed, event): Step(closed) for event in content_machine.Event}
    steps(monkeypatch, content_machine.TABLE, steps=changed)


# --- 3: nothing is written to free blocks -----------------------------------------------------------------------------


@mutation(Promise.QUARANTINE)
def blocks_are_free_before_the_read_has_ended(monkeypatch):
    monkeypatch.setattr(transfer_machine, "OPEN", frozenset())


@mutation(Promise.QUARANTINE, needs=Piece.DYING_TRANSPORTS)
def reads_end_before_the_process_has_that_reads(monkeypatch):
    monkeypatch.setattr(FakeFabric, "_is_over", staticmethod(lambda _read: False))


@mutation(Promise.QUARANTINE)
def a_pull_that_fails_does_not_wait_for_its_open_reads(monkeypatch):
    effect, failed = pull_machine.Effect, pull_machine.State.FAILED
    changed = {
        (pull_machine.State.READING, pull_machine.Event.FAIL): Step(
            failed, (effect.CONCLUDE, effect.STOP, effect.FREE)
        ),
        (failed, pull_machine.Event.CLOSED): Step(failed),
    }
    steps(monkeypatch, pull_machine.TABLE, steps=changed)


@mutation(Promise.QUARANTINE)
def workers_are_not_told_of_quarantine(monkeypatch):
    original = CompletionActor.notify

    def notify(self, worker, item):
        if isinstance(item, Failed):
            item = Failed(item.request, item.code, item.text, quarantined=False)
        elif isinstance(item, Cancelled):
            item = Cancelled(item.request, quarantined=False)
        original(self, worker, item)

    monkeypatch.setattr(CompletionActor, "notify", notify)


# --- 4: no notification is lost, none comes twice ---------------------------------------------------------------------


@mutation(Promise.NOTIFIED)
def notifications_are_not_kept(monkeypatch):
    original = CompletionActor._flush

    def flush(self, log):
        original(self, log)
        log.items.clear()
        log.sent = 0

    monkeypatch.setattr(CompletionActor, "_flush", flush)


@mutation(Promise.NOTIFIED)
def a_reconnecting_worker_gets_a_new_log(monkeypatch):
    original = CompletionActor.session_up

    def session_up(self, worker, tenancy):
        self._logs[worker] = _Log(worker, tenancy)
        original(self, worker, tenancy)

    monkeypatch.setattr(CompletionActor, "session_up", session_up)


# --- 5: only blocks of the own pool -----------------------------------------------------------------------------------


@mutation(Promise.OWN_POOL, first=27)
def block_ids_are_not_checked(monkeypatch):
    monkeypatch.setattr(runtime_pools, "check_ids", lambda group, ids: None)
    for method in ("take", "give_back", "offer", "release"):
        monkeypatch.setattr(BlocksInUse, method, lambda self, spans: None)


# --- 6: bad input is refused and changes nothing ----------------------------------------------------------------------


@mutation(Promise.BAD_INPUT, first=193)
def the_proof_of_a_ticket_is_not_checked(monkeypatch):
    monkeypatch.setattr(offers.hmac, "compare_digest", lambda one, other: True)


@mutation(Promise.BAD_INPUT, first=50)
def refusals_are_not_sent(monkeypatch):
    monkeypatch.setattr(Sessions, "refuse_frame", lambda self, session, call, error: None)


# --- 7: a death costs only what it must -------------------------------------------------------------------------------


@mutation(Promise.QUARANTINE)
def successors_do_not_wait(monkeypatch):
    original = PoolsActor.attach

    def attach(self, request):
        record = self._records.get(request.worker)
        if record is not None and record.state is PoolState.KEPT:
            record.request = request
            self._step(record, PoolEvent.LEND)
        else:
            original(self, request)

    monkeypatch.setattr(PoolsActor, "attach", attach)


@mutation(Promise.FENCED, needs=Piece.LINGERING_PROCESSES)
def successors_do_not_wait_for_the_process(monkeypatch):
    monkeypatch.setattr(PoolRecord, "is_held_beside", lambda self, request: False)


@mutation(Promise.FENCED, first=13026, needs=Piece.LINGERING_PROCESSES)
def a_daemon_knows_no_processes_of_the_run_before_it(monkeypatch):
    monkeypatch.setattr(DescriptorStore, "lent", lambda self, worker, uid, pid: None)


@mutation(Promise.SURVIVES, needs=Piece.IDLE_PROCESSES)
def a_pool_is_given_up_though_its_process_lives(monkeypatch):
    monkeypatch.setattr(PoolRecord, "outlived", property(lambda self: False))


@mutation(Promise.SURVIVES, first=280, needs=Piece.CROWDED_HOSTS)
def a_pool_makes_room_though_its_process_lives(monkeypatch):
    def ends(self):
        return self.ending or (isinstance(self.waiting, AttachPool) and not self.suits(self.waiting))

    monkeypatch.setattr(PoolRecord, "is_spare", property(lambda self: self.state is PoolState.KEPT))
    monkeypatch.setattr(PoolRecord, "ends", property(ends))  # it looks once more at whose process lives


@mutation(Promise.SURVIVES, first=80, needs=Piece.DYING_SUCCESSORS)
def a_successor_that_dies_takes_the_pool_along(monkeypatch):
    original = PoolsActor._stop_waiting

    def stop_waiting(self, record):
        record.ending = record.state is PoolState.QUIESCING
        original(self, record)

    monkeypatch.setattr(PoolsActor, "_stop_waiting", stop_waiting)


@mutation(Promise.SURVIVES, first=579)
def claims_are_not_renewed(monkeypatch):
    monkeypatch.setattr(PeerRequests, "_renew", lambda self: None)


@mutation(Promise.SURVIVES, first=1039)
def lost_requests_are_not_sent_again(monkeypatch):
    monkeypatch.setattr(PeerRequests, "_resend", lambda self, late: None)


@mutation(Promise.SURVIVES, first=779)
def lasting_reads_are_not_claimed(monkeypatch):
    monkeypatch.setattr(PeerRequests, "_claim_lasting", lambda self: None)


@mutation(Promise.SURVIVES, first=1630)
def the_incarnation_of_a_claim_is_not_checked(monkeypatch):
    original = Offers.for_claim
    monkeypatch.setattr(Offers, "for_claim", lambda self, claim: original(self, replace(claim, incarnation=0)))


@mutation(Promise.SURVIVES)
def a_returned_pool_is_not_taken(monkeypatch):
    original = pools.PoolsActor._make

    def make(self, request):
        original(self, type(request)(**{**{f: getattr(request, f) for f in request.__slots__}, "descriptor": -1}))

    monkeypatch.setattr(pools.PoolsActor, "_make", make)


@mutation(Promise.SURVIVES, needs=Piece.STORED_POOLS)
def a_stored_pool_is_not_taken(monkeypatch):
    monkeypatch.setattr(DescriptorStore, "take", lambda self, worker, uid, spec, pid: -1)


@mutation(Promise.SURVIVES, needs=Piece.STORED_POOLS)
def a_pool_that_is_taken_still_counts_as_unclaimed(monkeypatch):
    def keep(self, worker, uid, spec, descriptor):
        received = dict(self._received)
        keep_then(self, worker, uid, spec, descriptor)
        self._received.update({name: self._descriptors.dup(descriptor) for name in received})

    keep_then = DescriptorStore.keep
    monkeypatch.setattr(DescriptorStore, "keep", keep)


@mutation(Promise.SURVIVES, needs=Piece.INVISIBLE_PROCESSES)
def the_end_of_a_process_is_waited_for_though_nothing_tells_it(monkeypatch):
    def succeed(self, record, request):
        if record.is_held_beside(request):
            self._step(record, PoolEvent.AWAIT)
        else:
            self._step(record, PoolEvent.CLEAR)

    monkeypatch.setattr(PoolsActor, "_succeed", succeed)


@mutation(Promise.SOUND, needs=Piece.INVISIBLE_PROCESSES)
def a_pool_is_kept_for_good_for_a_process_whose_end_nothing_tells(monkeypatch):
    def linger(self, record):
        request, record.request = record.request, replace(record.request, watched=True)
        linger_then(self, record)
        record.request = request

    linger_then = Waits.linger
    monkeypatch.setattr(Waits, "linger", linger)


@mutation(Promise.SURVIVES, needs=Piece.SEVERAL_HOSTS)
def a_peer_that_cannot_be_imported_is_not_tried_over_the_network(monkeypatch):
    monkeypatch.setattr(RoutedTransport, "_failed_within_host", lambda self, event: self._on_event(event))


@mutation(Promise.SURVIVES, needs=Piece.STANDSTILLS)
def silence_is_measured_in_seconds(monkeypatch):
    monkeypatch.setattr(Peer, "beat", lambda self, now: now - self.heard > MISSED_BEATS * HEARTBEAT)


@mutation(Promise.SURVIVES, first=50, needs=Piece.STANDSTILLS)
def what_came_during_a_standstill_comes_too_late(monkeypatch):
    monkeypatch.setattr(limits, "STANDSTILL_SECONDS", float("inf"))
    monkeypatch.setattr(limits, "LAST_LOOK_SECONDS", 0.0)


@mutation(Promise.SURVIVES, first=50, needs=Piece.STANDSTILLS)
def a_standstill_is_as_long_as_a_timer_is_late(monkeypatch):
    monkeypatch.setattr(deadlines, "_EXACT", limits.STANDSTILL_SECONDS)


# --- 0: nothing leaks -------------------------------------------------------------------------------------------------


@mutation(Promise.SOUND)
def tombstones_stay(monkeypatch):
    monkeypatch.setattr(Tombstones, "sweep", lambda self: None)


@mutation(Promise.SOUND, first=34, needs=Piece.STORED_POOLS)
def pools_that_nobody_claims_stay_stored(monkeypatch):
    monkeypatch.setattr(DescriptorStore, "drop_unclaimed", lambda self: None)


@mutation(Promise.SOUND, needs=Piece.STORED_POOLS)
def a_pool_that_has_ended_stays_stored(monkeypatch):
    monkeypatch.setattr(DescriptorStore, "drop", lambda self, worker: None)


@mutation(Promise.SOUND, needs=Piece.SEVERAL_HOSTS)
def peers_that_were_forgotten_count_as_of_this_host(monkeypatch):
    def remove_peer(self, agent):
        near = set(self._near)
        remove_then(self, agent)
        self._near |= near

    remove_then = RoutedTransport.remove_peer
    monkeypatch.setattr(RoutedTransport, "remove_peer", remove_peer)


@mutation(Promise.SOUND)
def deadlines_are_never_unset(monkeypatch):
    monkeypatch.setattr(Deadlines, "unset", lambda self, key: None)


@mutation(Promise.SOUND, first=12)
def claims_are_never_released(monkeypatch):
    monkeypatch.setattr(PeerRequests, "release", lambda self, transfer, finished: None)


@mutation(Promise.SOUND)
def who_will_not_come_is_not_counted(monkeypatch):
    monkeypatch.setattr(Transfers, "_left_early", staticmethod(lambda transfer: False))


@mutation(Promise.SOUND)
def who_leaves_before_the_offer_is_forgotten(monkeypatch):
    original = Claims._judge

    def judge(self, claim):
        leaving = claim.state is claim_machine.State.LEAVING
        error = original(self, claim)
        if leaving and claim in self._waiting.all():
            self._end(claim, claim_machine.Event.BREAK, "released")
        return error

    monkeypatch.setattr(Claims, "_judge", judge)


@mutation(Promise.SOUND)
def pulls_that_are_cancelled_before_their_producers_are_known_are_forgotten(monkeypatch):
    effect = pull_machine.Effect
    step = Step(pull_machine.State.CANCELLED, (effect.CONCLUDE, effect.FREE))
    changed = {(state, pull_machine.Event.CANCEL): step for state in pull_machine._CONNECTING}
    steps(monkeypatch, pull_machine.TABLE, steps=changed)


# --- each bound -------------------------------------------------------------------------------------------------------


def bound(name, first):
    """Everybody sees the bound as it is outside of the simulator; the inspector counts by the small one."""

    def apply(monkeypatch):
        monkeypatch.setitem(small.SEEN, name, getattr(limits, name))

    apply.__name__ = f"the_bound_{name}_is_not_kept"
    mutation(Promise.SOUND, first)(apply)


FIRST = {
    "MAX_CLAIMS_PER_OFFER": 33,
    "MAX_CLAIMS_WAITING": 84,
    "MAX_HANDSHAKES": 54,
    "MAX_REQUESTS_PER_WORKER": 120,
    "MAX_TOMBSTONES": 0,
}
for each in small.COUNTED:
    bound(each, FIRST[each])
