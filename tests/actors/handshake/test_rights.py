"""What a peer may read, and what becomes of the pools that it was told of when it may not any more."""

import pytest
from structlog.testing import capture_logs

from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode, Unavailable
from kvd.protocol import codec, ticket
from kvd.protocol.peer import Broken, Fence, Grant, Hello, Refuse, Settle, Settled
from kvd.protocol.types import Span
from kvd.protocol.worker import Attached, Detach, Detached, Failed, Offer, Offered, Pull, Released
from kvd.transport.interface import RegisterFailed
from tests.actors.stage import SECRET, Stage, ids, make_claim, make_ticket

ALICE, BOB = "aa" * 32, "bb" * 32


class Firm:
    """A daemon with the workers `one` and `two`; `rights` are patterns of pools by key."""

    def __init__(self) -> None:
        self.rights = {ALICE: ("*",), BOB: ("two", "three*")}
        self.stage = Stage(rights=lambda key: self.rights.get(key, ()))
        for connection, name in enumerate(("one", "two"), 1):
            self.stage.attach(name, connection, bytes([connection]) * 16)

    def hello(self, key):
        [welcome] = self.stage.asked_by_peer(Hello("peer", 3), key.encode()[:4], key)
        return welcome

    def claim(self, key, pool, number=1):
        [answer] = self.stage.asked_by_peer(claim_of(pool, number), key.encode()[:4], key)
        return answer

    def change(self, **rights):
        self.rights = {{"alice": ALICE, "bob": BOB}[name]: pools for name, pools in rights.items()}
        self.stage.commands.clear()
        call(self.stage.actors.peer_server.rights_changed)
        self.stage.run()


def claim_of(pool, number=1):
    return make_claim(number, pool=pool)


@pytest.fixture
def firm():
    return Firm()


def pools_in(welcome):
    return {info.pool: info for info in welcome.pools}


def test_a_peer_hears_of_the_pools_that_it_may_read_with_metadata_of_these_alone(firm):
    assert set(pools_in(firm.hello(ALICE))) == {"one", "two"}
    welcome = firm.hello(BOB)
    assert set(pools_in(welcome)) == {"two"}
    assert welcome.metadata == repr((2,)).encode()
    firm.hello(BOB)
    connects = ("expect_connection",)
    assert firm.stage.commands == [connects, ("describe", (2,)), connects, connects]


def test_the_transport_is_told_that_whoever_got_metadata_will_connect(firm):
    firm.hello(ALICE)
    assert firm.stage.commands == [("expect_connection",)]


def test_a_peer_that_may_read_nothing_hears_of_no_pool(firm):
    firm.rights[BOB] = ()
    welcome = firm.hello(BOB)
    assert (welcome.pools, welcome.metadata) == ((), repr(()).encode())


@pytest.mark.parametrize("order", [(ALICE, BOB), (BOB, ALICE)], ids=["all-first", "nothing-first"])
def test_who_may_read_nothing_and_who_may_read_all_are_told_different_things_whoever_comes_first(firm, order):
    firm.rights[BOB] = ("not-there*",)
    told = {key: firm.hello(key) for key in order}
    assert (told[BOB].pools, told[BOB].metadata) == ((), repr(()).encode())
    assert (set(pools_in(told[ALICE])), told[ALICE].metadata) == ({"one", "two"}, b"meta")


def test_who_may_read_the_same_gets_the_very_same_frame(firm, monkeypatch):
    frames = []
    monkeypatch.setattr(firm.stage.dependencies.peer_port, "answer", lambda _sender, frame: frames.append(frame))
    for key in (ALICE, BOB, ALICE, BOB):
        firm.stage.asked_by_peer(Hello("peer", 3), key=key)
    assert frames[0] is frames[2]
    assert frames[1] is frames[3]
    firm.stage.attach("three-1", 3, bytes([3]) * 16)
    for key in (ALICE, BOB):
        firm.stage.asked_by_peer(Hello("peer", 3), key=key)
    assert set(pools_in(codec.peer_replies.decode(frames[4]))) == {"one", "two", "three-1"}
    assert set(pools_in(codec.peer_replies.decode(frames[5]))) == {"two", "three-1"}


def test_a_pool_that_comes_later_is_told_too_where_its_name_is_covered(firm):
    firm.hello(BOB)
    firm.stage.attach("three-1", 3, bytes([3]) * 16)
    assert set(pools_in(firm.hello(BOB))) == {"two", "three-1"}


def test_a_hello_that_waited_for_metadata_is_answered_by_the_rights_of_then(firm):
    transport = firm.stage.dependencies.transport
    describe, asked = transport.describe, []
    transport.describe = asked.append
    assert firm.stage.asked_by_peer(Hello("peer", 3), b"bob", BOB) == []
    assert asked == [(2,)]
    firm.rights[BOB] = ("one",)
    transport.describe = describe
    before = len(firm.stage.answers)
    transport.describe((2,))
    firm.stage.run()
    [(sender, welcome)] = firm.stage.answers[before:]
    assert (sender, set(pools_in(welcome))) == (b"bob", {"one"})


def test_a_claim_on_a_pool_that_the_peer_may_not_read_is_refused(firm):
    firm.stage.request(Offer(1, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET), b"\1" * 16)
    refuse = firm.claim(BOB, "one")
    assert (type(refuse), refuse.claim, refuse.code) == (Refuse, 1, ErrorCode.NOT_PERMITTED)
    assert isinstance(firm.claim(ALICE, "one"), Grant)


def test_a_fence_on_such_a_pool_does_not_hold_without_a_claim(firm):
    [offered] = firm.stage.request(Offer(1, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET), b"\1" * 16)
    (rank,) = ticket.decode(offered.ticket).ranks
    fence = Fence(1, rank.generation, claim_of("one"))
    [broken] = firm.stage.asked_by_peer(fence, b"bob", BOB)
    assert isinstance(broken, Broken)
    assert firm.stage.asked_by_peer(Settle((fence,)), b"bob", BOB) == [Settled((1,))]
    assert firm.stage.actors.leases.report().claimed == 0
    assert not any(isinstance(item, Released) for item in firm.stage.notified)


@pytest.mark.parametrize("rights", [{}, {"bob": ("one",)}, {"bob": ("three*",)}])
def test_a_pool_is_registered_anew_at_another_address_when_who_was_told_of_it_may_not_read_it_any_more(firm, rights):
    before = pools_in(firm.hello(BOB))["two"]
    firm.change(alice=("*",), **rights)
    assert firm.stage.commands == [("deregister for a while", 2)]
    after = pools_in(firm.hello(ALICE))["two"]
    assert after.epoch != before.epoch
    assert after.base != before.base


def test_a_right_is_withdrawn_too_from_a_peer_that_was_told_before_the_pool_went_to_a_successor(firm):
    before = pools_in(firm.hello(BOB))["two"]
    firm.stage.process_ends(2)
    firm.stage.hang_up(2)
    assert firm.stage.attach("two", 3, b"\3" * 16, pid=9).kept
    firm.change(alice=("*",))
    assert firm.stage.commands == [("deregister for a while", 2)]
    assert pools_in(firm.hello(ALICE))["two"].base != before.base


@pytest.mark.parametrize("keys", ["ended", "renewed"])
def test_a_peer_whose_keys_have_ended_has_nothing_to_lose(firm, keys):
    if keys == "ended":
        firm.hello(BOB)
        firm.stage.session(Detach(), 2)
        firm.stage.attach("two", 3, b"\3" * 16)
    else:
        firm.rights["cc" * 32] = ("two",)
        firm.hello("cc" * 32)
        firm.hello(BOB)
        firm.change(alice=("*",), bob=("two",))
    firm.change(alice=("*",))
    assert firm.stage.commands == []


def test_each_withdrawn_right_is_logged_with_what_a_daemon_of_this_host_can_still_do(firm):
    firm.hello(BOB)
    with capture_logs() as logs:
        firm.change(alice=("*",))
    [entry] = [entry for entry in logs if entry["event"] == "right withdrawn"]
    assert (entry["key"], entry["pool"], entry["log_level"]) == (BOB, "two", "warning")
    assert "detach its worker" in entry["hint"]


def test_nothing_happens_where_nobody_was_told_of_what_it_may_not_read_any_more(firm):
    firm.hello(ALICE)
    firm.change(alice=("*",))
    assert firm.stage.commands == []


def test_leases_of_a_pool_that_is_registered_anew_are_broken_and_its_worker_goes_on_without_attaching(firm):
    firm.hello(BOB)
    offer = Offer(1, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET)
    firm.stage.request(offer, b"\2" * 16)
    assert isinstance(firm.claim(ALICE, "two"), Grant)
    firm.change(alice=("*",))
    assert [type(reply) for _, reply in firm.stage.answers[-1:]] == [Broken]
    assert [item.offer for item in firm.stage.notified if isinstance(item, Released)] == ["o"]
    [offered] = firm.stage.request(Offer(2, "next", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET), b"\2" * 16)
    assert isinstance(offered, Offered)
    (rank,) = ticket.decode(offered.ticket).ranks
    assert rank.epoch == pools_in(firm.hello(ALICE))["two"].epoch


def test_pulls_into_it_fail_with_the_reason(firm):
    firm.hello(BOB)
    firm.stage.request(Pull(2, "p", make_ticket(), (Span(0, 0, ids(2, 3)),), 5.0), b"\2" * 16)
    firm.change(alice=("*",))
    [failed] = [item for item in firm.stage.notified if isinstance(item, Failed)]
    assert (failed.code, "lost its rights" in failed.text) == (ErrorCode.POOL_BUSY, True)


@pytest.fixture
def interrupted(firm):
    """In the middle of a renewal of the pool `two`; `finish` lets it go on."""
    firm.hello(BOB)
    transport = firm.stage.dependencies.transport
    deregister, asked = transport.deregister, []
    transport.deregister = lambda pool, *, returns: asked.append((pool, returns))
    firm.change(alice=("*",))
    assert asked == [(2, True)]

    def finish():
        transport.deregister = deregister
        deregister(2, returns=True)
        firm.stage.run()

    firm.finish = finish
    return firm


def test_the_pool_of_a_worker_that_left_meanwhile_is_kept(interrupted):
    interrupted.stage.hang_up(2)
    interrupted.finish()
    assert interrupted.stage.actors.pools._records["two"].state == "kept"


def test_the_pool_of_a_worker_that_detached_meanwhile_ends(interrupted):
    assert not isinstance(interrupted.stage.session(Detach(), 2), Detached)
    interrupted.finish()
    assert isinstance(interrupted.stage.on_sessions[-1], Detached)
    assert "two" not in interrupted.stage.actors.pools._records


def test_what_a_worker_asks_for_meanwhile_is_refused(interrupted):
    [error] = interrupted.stage.request(Offer(1, "o", 4, (Span(0, 0, ids(0, 1)),), 30.0, SECRET), b"\2" * 16)
    assert error.code == ErrorCode.POOL_BUSY


def test_a_pool_that_cannot_be_mapped_elsewhere_is_registered_anew_where_it_is(firm):
    def move():
        raise Unavailable(ErrorCode.OVERLOADED, "no room")

    firm.stage.memory.move = move
    before = pools_in(firm.hello(BOB))["two"]
    firm.stage.actors.pools.memory._background = attempt
    firm.change(alice=("*",))
    after = pools_in(firm.hello(ALICE))["two"]
    assert (after.base, after.epoch != before.epoch) == (before.base, True)


def test_a_worker_whose_pool_cannot_be_registered_anew_is_hung_up_on_and_attaches_again(interrupted):
    stage = interrupted.stage
    transport = stage.dependencies.transport
    register = transport.register
    transport.register = lambda pool, region: transport.on_event(RegisterFailed(pool, "no room"))
    interrupted.finish()
    assert stage.hung_up == [2]
    assert "two" not in stage.actors.pools._records
    transport.register = register
    assert isinstance(stage.attach("two", 4, bytes([2]) * 16), Attached)


def attempt(work, done):
    try:
        done(work())
    except Unavailable as error:
        done(error)


def test_a_pool_without_a_worker_is_registered_anew_too_and_kept(firm):
    firm.hello(BOB)
    firm.stage.hang_up(2)
    firm.change(alice=("*",))
    assert firm.stage.commands == [("deregister for a while", 2)]
    assert firm.stage.actors.pools._records["two"].state == "kept"
    attached = firm.stage.attach("two", 4, bytes([2]) * 16)
    assert attached.kept
