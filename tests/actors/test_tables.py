import pytest

from kvd.actors.handshake import peer_table as peer
from kvd.actors.leases import claim, content, lease
from kvd.actors.pools import pool
from kvd.actors.runtime.machine import Step
from kvd.actors.scheduler import pull, transfer
from kvd.errors import InternalError

MODULES = (pull, transfer, claim, lease, content, peer, pool)
MACHINES = pytest.mark.parametrize("module", MODULES, ids=[module.TABLE.name for module in MODULES])


def reachable(table):
    found, todo = {table.initial}, [table.initial]
    while todo:
        state = todo.pop()
        for (start, _), step in table.steps.items():
            if start == state and step.state not in found:
                found.add(step.state)
                todo.append(step.state)
    return found


@MACHINES
def test_every_state_can_be_reached(module):
    assert reachable(module.TABLE) == set(module.State)


@MACHINES
def test_final_states_are_left_by_no_event(module):
    for (state, _), step in module.TABLE.steps.items():
        assert state not in module.TABLE.final or step.state == state


@MACHINES
def test_every_event_and_every_effect_is_used(module):
    assert {event for _, event in module.TABLE.steps} == set(module.Event)
    assert {effect for step in module.TABLE.steps.values() for effect in step.effects} == set(module.Effect)


@MACHINES
def test_an_event_is_a_step_or_ignored_but_never_both(module):
    for state, events in module.TABLE.ignored.items():
        for event in events:
            assert (state, event) not in module.TABLE.steps


@MACHINES
def test_every_state_has_an_answer_to_every_event_that_can_come(module):
    """What has no answer is listed here, with the reason why it cannot come."""
    table = module.TABLE
    without = {
        (state, event)
        for state in module.State
        for event in module.Event
        if (state, event) not in table.steps and event not in table.ignored.get(state, ())
    }
    assert without == IMPOSSIBLE[table.name]


T, C, L, P, U, M = transfer, claim, lease, peer, pull, pool
IMPOSSIBLE = {
    "pull": {
        # A route is made once, and one that waits asks its producers before it waits again.
        *(
            (state, event)
            for state in U.State
            if state not in U.UNROUTED
            for event in (U.Event.MISSING, U.Event.ABSENT, U.Event.RESTARTED, U.Event.ROUTED)
        ),
        (U.State.WAITING, U.Event.ABSENT),
        # Reads are of transfers. Those of a pull in quarantine are stopped: none opens.
        *((state, U.Event.OPENED) for state in U.State if state not in (U.State.ROUTED, U.State.READING)),
        *((state, U.Event.CLOSED) for state in U.State if state not in (U.State.READING, *U.QUARANTINED)),
        # A read that is open is not proven; a transfer that is stopped is proven no more.
        *((state, U.Event.PROVEN) for state in U.State if state is not U.State.ROUTED),
        # The scheduler has forgotten it.
        *((state, U.Event.CANCEL) for state in (*pull.TABLE.final, U.State.LEAVING)),
        (U.State.DONE, U.Event.FAIL),
        (U.State.CANCELLED, U.Event.FAIL),
    },
    "transfer": {
        # It begins once.
        *((state, event) for state in T.State if state is not T.State.NEW for event in (T.Event.BEGIN, T.Event.KNOWN)),
        # Asked of a read that is open, and only until it is claimed.
        *((state, T.Event.LASTS) for state in T.State if state is not T.State.READING),
        # Nothing was asked of the producer yet.
        (T.State.NEW, T.Event.REFUSED),
        # A grant is used once, and only where the claim waits for it.
        *((state, T.Event.GRANTED) for state in T.State if state is not T.State.CLAIMING),
        *((state, T.Event.HOLD) for state in T.State if state is not T.State.CLAIMING),
        *((state, T.Event.GROWS) for state in T.State if state is not T.State.CLAIMING),
        # Whoever passes answers on drops what was asked for no more.
        *((state, T.Event.GREW) for state in T.State if state is not T.State.FOLLOWING),
        # A plan is waited for once, by a claim that is granted or an offer that has grown.
        *((state, T.Event.UNPLANNED) for state in T.State if state not in (T.State.CLAIMING, T.State.FOLLOWING)),
        # Whoever reads no more wants no next part.
        *((state, T.Event.NEXT) for state in T.State if state is not T.State.READING),
        *((state, T.Event.PLANNED) for state in T.State if state is not T.State.PLANNING),
        # The transport speaks only of a read that is open.
        *(
            (state, event)
            for state in T.State
            if state not in (T.State.READING, T.State.DRAINING)
            for event in (T.Event.LANDED, T.Event.PART, T.Event.STAMPED, T.Event.UNPROVEN, T.Event.BROKE)
        ),
        # It tells of a pull that was cancelled before its claim was granted, and of no read that is open.
        *(
            (state, T.Event.LEFT)
            for state in T.State
            if state not in (T.State.NEW, T.State.CLAIMING, T.State.FENCING, T.State.DRAINING)
        ),
        # Whoever passes answers on drops a `held` that nobody asked for.
        *((state, T.Event.PROVEN) for state in T.State if state is not T.State.FENCING and state not in T.TELLING),
    },
    "claim": {
        # A fence is answered by the state that the claim is in; it changes only one that is held.
        *((state, C.Event.FENCE) for state in C.State if state is not C.State.HELD),
        # A claim is judged while it waits, and cancelled once.
        *(
            (state, event)
            for state in C.State
            if state not in (C.State.WAITING, C.State.LEAVING)
            for event in (C.Event.GRANT, C.Event.REFUSE)
        ),
        *((state, C.Event.CANCEL) for state in C.State if state is not C.State.WAITING),
        # Whoever breaks claims knows which ones wait or are held.
        *((state, C.Event.BREAK) for state in claim.TABLE.final),
    },
    # An extension of an offer that has ended is refused before.
    "lease": {(state, L.Event.GROWN) for state in lease.TABLE.final},
    "content": set(),
    "peer": set(),
    "pool": {
        # Whoever uses a pool is asked only there, and one that is forsaken is not to end.
        *(
            (state, event)
            for state in M.State
            if state not in (M.State.QUIESCING, M.State.FORSAKEN, M.State.RENEWING)
            for event in (M.Event.QUIET, M.Event.SPENT)
        ),
        (M.State.FORSAKEN, M.Event.SPENT),
        # The transport and the memory answer what was asked of them.
        *((state, M.Event.UNREGISTERED) for state in M.State if state not in (M.State.MAKING, M.State.RENEWING)),
        *((state, M.Event.DEREGISTERED) for state in M.State if state not in (M.State.RENEWING, M.State.ENDING)),
        *((state, M.Event.FREED) for state in M.State if state not in (M.State.MAKING, M.State.ENDING)),
        # What a pool goes on as is decided when it is registered or quiet, and for one that is kept by an attach or
        # an operator. An attach that finds one awaited is refused, or has whoever waits refused first.
        *(
            (state, M.Event.LEND)
            for state in (M.State.LENT, M.State.AWAITED, M.State.FORSAKEN, M.State.ENDING, M.State.GONE)
        ),
        *((state, M.Event.AWAIT) for state in M.State if state not in (M.State.KEPT, M.State.RENEWING)),
        *(
            (state, M.Event.CLEAR)
            for state in (M.State.LENT, M.State.AWAITED, M.State.QUIESCING, M.State.ENDING, M.State.GONE)
        ),
        *(
            (state, M.Event.UNWANTED)
            for state in M.State
            if state not in (M.State.MAKING, M.State.FORSAKEN, M.State.RENEWING)
        ),
        *((state, M.Event.RENEWED) for state in M.State if state is not M.State.RENEWING),
        # Nobody waits.
        *((state, M.Event.UNAWAITED) for state in (M.State.LENT, M.State.KEPT, M.State.FORSAKEN)),
        # A worker whose session is gone detaches from nothing.
        *((state, M.Event.DETACH) for state in (M.State.KEPT, M.State.AWAITED, M.State.FORSAKEN)),
        # The actor has forgotten it.
        *(
            (M.State.GONE, event)
            for event in (M.Event.DETACH, M.Event.LEFT, M.Event.PROCESS_ENDED, M.Event.RENEW, M.Event.TIME)
        ),
    },
}


def test_an_event_without_an_answer_is_an_internal_error():
    with pytest.raises(InternalError, match="a transfer that is new cannot take landed"):
        transfer.TABLE.step(transfer.State.NEW, transfer.Event.LANDED)


def test_an_ignored_event_changes_nothing():
    assert transfer.TABLE.step(transfer.State.DONE, transfer.Event.STOP) == Step(transfer.State.DONE)


def test_no_transfer_contributes_without_a_proof_after_the_last_byte():
    """Promise 2, read off the table: it is `landed` and then `proven`, or `stamped`, which is both."""
    steps = transfer.TABLE.steps
    ways = {way for way, step in steps.items() if T.Effect.CONTRIBUTE in step.effects}
    assert ways == {(T.State.FENCING, T.Event.PROVEN), (T.State.READING, T.Event.STAMPED)}
    into_fencing = {way for way, step in steps.items() if step.state is T.State.FENCING}
    assert into_fencing == {(T.State.READING, T.Event.LANDED)}
    into_held = {way for way, step in steps.items() if step.state in (T.State.DONE, T.State.SETTLING)}
    assert into_held == ways | {(T.State.SETTLING, T.Event.PROVEN), (T.State.SETTLING, T.Event.REFUSED)}


def test_what_grows_is_fenced_only_after_a_read_that_was_the_last():
    """Promise 2, read off the table: a part that has landed leads back to the producer, and to no proof."""
    steps = transfer.TABLE.steps
    assert steps[T.State.READING, T.Event.PART] == Step(T.State.FOLLOWING, (T.Effect.FOLLOW,))
    after = {step.state for (state, _), step in steps.items() if state is T.State.FOLLOWING}
    assert after == {T.State.READING, T.State.PLANNING, T.State.ENDED}


def test_an_offer_gets_its_proof_once_when_it_is_closed_and_takes_nothing_afterwards():
    steps = content.TABLE.steps
    proved = {way for way, step in steps.items() if content.Effect.PROVE in step.effects}
    assert proved == {(content.State.GROWING, content.Event.CLOSE)}
    for event in content.Event:
        assert steps[content.State.CLOSED, event] == Step(content.State.CLOSED, (content.Effect.REFUSE,))


def test_a_read_is_closed_only_on_the_transports_word():
    """Promise 3, read off the table: nothing but the transport's events ends a read that is open."""
    whole = (T.Event.LANDED, T.Event.PART, T.Event.NEXT, T.Event.STAMPED)
    for (state, event), step in transfer.TABLE.steps.items():
        if state in T.OPEN and step.state not in T.OPEN:
            assert event in (*whole, T.Event.UNPROVEN, T.Event.BROKE, T.Event.LEFT)


def test_a_read_is_opened_by_every_step_into_an_open_state():
    for (state, _), step in transfer.TABLE.steps.items():
        assert (T.Effect.READ in step.effects) == (state not in T.OPEN and step.state in T.OPEN)


BARE = pull.TABLE.final | {U.State.LEAVING}
"""A pull that has its outcome and has given its blocks back."""


def test_blocks_of_a_pull_are_given_back_once_and_with_no_read_open():
    """Promise 3, read off the table: a pull with an open read keeps its blocks until the last read is closed."""
    for (state, event), step in pull.TABLE.steps.items():
        frees = U.Effect.FREE in step.effects
        assert frees == (step.state in BARE and state not in BARE)
        assert not (frees and state in (U.State.READING, *U.QUARANTINED)) or event is U.Event.CLOSED
        assert (U.Effect.TELL_FREED in step.effects) == (state in U.QUARANTINED and frees)


def test_a_pull_tells_one_outcome():
    """Promise 1, read off the table: it is told on the way out of the states that have none, and never again."""
    told = U.QUARANTINED | BARE
    for (state, _), step in pull.TABLE.steps.items():
        assert step.effects.count(U.Effect.CONCLUDE) == (state not in told and step.state in told)
        assert not (state in told and step.state not in told)


def test_every_pull_that_has_no_outcome_can_fail_and_be_cancelled():
    """Promise 1, in time: its deadline ends it, whatever it waits for."""
    for state in set(U.State) - U.QUARANTINED - BARE:
        for event, ends in ((U.Event.FAIL, "failed"), (U.Event.CANCEL, "cancelled")):
            step = pull.TABLE.step(state, event)
            assert U.Effect.CONCLUDE in step.effects
            assert (step.state in U.WAS_CANCELLED) == (ends == "cancelled")
            assert (U.Effect.STOP in step.effects) == (state not in U.UNROUTED)


def test_a_pull_that_has_given_its_blocks_back_begins_no_transfer():
    for (state, _), step in pull.TABLE.steps.items():
        assert not (state in BARE and U.Effect.BEGIN in step.effects)
        assert state not in BARE or step.state in BARE


def test_a_pull_is_done_only_when_all_its_transfers_are_proven():
    into_done = {way for way, step in pull.TABLE.steps.items() if step.state is U.State.DONE}
    assert into_done == {(U.State.ROUTED, U.Event.PROVEN)}


def test_a_lease_breaks_its_claims_before_the_worker_may_write():
    for (state, event), step in lease.TABLE.steps.items():
        if state in L.IN_CLAIM and L.Effect.RELEASE in step.effects and event is not L.Event.UNCLAIMED:
            assert step.effects.index(L.Effect.BREAK) < step.effects.index(L.Effect.RELEASE)


def test_a_lease_whose_time_is_over_ends_at_once_or_with_its_last_claim_unless_it_grows():
    steps = lease.TABLE.steps
    assert steps[L.State.OFFERED, L.Event.EXPIRE] == Step(L.State.EXPIRED, (L.Effect.RELEASE,))
    assert steps[L.State.OVERDUE, L.Event.UNCLAIMED] == Step(L.State.EXPIRED, (L.Effect.RELEASE,))
    ways = {(state, event): step for (state, event), step in steps.items() if state is L.State.OVERDUE}
    assert ways.pop((L.State.OVERDUE, L.Event.GROWN)) == Step(L.State.CLAIMED)
    assert {step.state for step in ways.values()} == {L.State.OVERDUE, *lease.TABLE.final}
    assert steps[L.State.OVERDUE, L.Event.CLAIM].effects == (L.Effect.GRANT,)


def test_a_fence_holds_only_for_a_claim_that_is_held():
    ways = {way for way, step in claim.TABLE.steps.items() if step.state is C.State.FENCED}
    assert ways == {(C.State.HELD, C.Event.FENCE)}


def test_a_claim_that_is_held_leaves_its_lease_however_it_ends():
    for (state, _), step in claim.TABLE.steps.items():
        assert (C.Effect.LEAVE in step.effects) == (state is C.State.HELD)


def test_a_peer_that_is_lost_is_told_to_whoever_waits():
    for (_, event), step in peer.TABLE.steps.items():
        if event in (P.Event.UNREACHABLE, P.Event.SILENT):
            assert P.Effect.LOSE in step.effects


def test_a_pool_goes_to_a_worker_only_new_quiet_or_back_to_the_process_that_had_it():
    """Read off the table: nobody gets one whose leases or reads go on, or that another process may write to."""
    into_lent = {way for way, step in pool.TABLE.steps.items() if step.state is M.State.LENT}
    assert into_lent == {
        (M.State.MAKING, M.Event.LEND),
        (M.State.KEPT, M.Event.LEND),
        (M.State.QUIESCING, M.Event.LEND),
        (M.State.RENEWING, M.Event.LEND),
        (M.State.RENEWING, M.Event.RENEWED),
    }


def test_memory_of_a_pool_is_given_back_only_quiet_and_out_of_every_peers_reach():
    steps = pool.TABLE.steps
    assert {way for way, step in steps.items() if M.Effect.FREE in step.effects} == {
        (M.State.ENDING, M.Event.DEREGISTERED)
    }
    for (state, event), step in steps.items():
        if step.state is M.State.ENDING and state is not M.State.ENDING:
            assert (event, step.effects) in (
                (M.Event.SPENT, (M.Effect.DEREGISTER,)),
                (M.Event.UNREGISTERED, (M.Effect.CLOSE,)),
            )


def test_whoever_uses_a_pool_is_asked_by_every_step_that_quiesces_it():
    asked = {M.State.QUIESCING: M.Effect.QUIESCE, M.State.RENEWING: M.Effect.BREAK}
    for (state, _), step in pool.TABLE.steps.items():
        entered = step.state if step.state is not state else None
        assert set(step.effects) & set(asked.values()) == ({asked[entered]} if entered in asked else set())


def test_every_pool_that_nobody_has_or_waits_for_ends_in_time():
    for state in M.UNUSED:
        assert pool.TABLE.step(state, M.Event.TIME).effects == (M.Effect.LOOK_AGAIN,)
        assert pool.TABLE.step(state, M.Event.CLEAR).state is M.State.QUIESCING
    entering = [step for (state, _), step in pool.TABLE.steps.items() if step.state in M.UNUSED and step.state != state]
    assert all(step.effects == (M.Effect.LINGER,) for step in entering)
