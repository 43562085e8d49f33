"""A pool that is kept for a worker that is gone makes room for another attach, or is ended by an operator."""

import msgspec
import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode, KvdError, NoMemory
from kvd.net.interface import SessionFrame
from kvd.protocol import codec
from kvd.protocol.peer import Release
from kvd.protocol.worker import Attach, Attached, Detach, Detached, End, Refused, StatusRequest
from tests.actors.pools.test_pools import OTHER
from tests.actors.scheduler.pulling import start_reading
from tests.actors.stage import CACHE, Memory, Stage, make_claim

SIZE = CACHE.spec.pool_bytes
SMALL = OTHER.spec.pool_bytes
assert SMALL < SIZE


def stage_with(quota=None, rules=(), attach_wait=1.0):
    rules = rules or (Rule(pools=("*",), uid=1000, max_bytes=quota),)
    stage = Stage(rules=rules, attach_wait=attach_wait, pool_linger=600.0)
    stage.made = {}

    def allocate(name, size):
        stage.memory = stage.made[name] = Memory(size)
        stage.memory.base = len(stage.made) << 32
        return stage.memory

    stage.dependencies.provider.allocate = allocate
    return stage


def kept(stage, name, connection, raw=CACHE.raw, uid=1000):
    """A pool whose worker's process has ended."""
    assert isinstance(stage.attach(name, connection, pid=100 + connection, raw=raw, uid=uid), Attached)
    stage.hang_up(connection)
    stage.process_ends(connection)
    return stage.made[name]


def attach(stage, name, connection, **more):
    return stage.attach(name, connection, instance=b"j" * 16, pid=100 + connection, **more)


def test_the_pool_of_an_engine_that_is_gone_makes_room_within_the_quota_for_one_of_another_name():
    stage = stage_with(quota=SIZE)
    old = kept(stage, "vllm-0-0", 1)
    attached = attach(stage, "prefill-0", 2)
    assert isinstance(attached, Attached)
    assert not attached.kept
    assert old.closed
    assert list(stage.actors.pools._records) == ["prefill-0"]


def test_it_is_ended_only_when_its_process_has_ended_and_until_then_the_attach_is_one_to_try_again():
    stage = stage_with(quota=SIZE)
    stage.attach("old", pid=7)
    stage.hang_up()
    refused = attach(stage, "new", 2)
    assert refused.code == ErrorCode.OVERLOADED
    assert "'old'" in refused.text
    assert "kvd pools end" in refused.text
    assert not stage.made["old"].closed
    stage.process_ends()
    assert isinstance(attach(stage, "new", 3), Attached)


def test_nor_is_one_whose_process_nobody_can_watch():
    stage = stage_with(quota=SIZE)
    stage.attach("old", pid=0, watched=False)
    stage.hang_up()
    assert attach(stage, "new", 2).code == ErrorCode.OVERLOADED
    assert not stage.made["old"].closed


def test_a_pool_of_which_offers_stand_is_not_ended_until_they_have():
    stage = stage_with(quota=SIZE)
    stage.attach("w", pid=7)
    stage.offer()
    stage.asked_by_peer(make_claim(ttl=3600.0))
    stage.hang_up()
    stage.process_ends()
    refused = attach(stage, "new", 2)
    assert refused.code == ErrorCode.OVERLOADED
    assert "offers stand" in refused.text
    assert stage.actors.pools._records["w"].state == "kept"
    stage.asked_by_peer(Release(1, finished=True))
    assert isinstance(attach(stage, "new", 3), Attached)


def test_a_quota_that_pools_in_use_fill_is_refused_for_good():
    stage = stage_with(quota=SIZE)
    stage.attach("used")
    refused = attach(stage, "new", 2)
    assert refused.code == ErrorCode.NOT_PERMITTED
    assert isinstance(stage.session(StatusRequest(1)), object)


def test_no_pool_is_ended_in_vain():
    stage = stage_with(quota=SIZE + SMALL)
    stage.attach("used")
    small = kept(stage, "small", 2, raw=OTHER.raw)
    assert attach(stage, "new", 3).code == ErrorCode.NOT_PERMITTED
    assert not small.closed


def test_another_users_pool_makes_no_room():
    any_user = Rule(pools=("*",), uid=2000), Rule(pools=("*",), uid=1000, max_bytes=SIZE)
    stage = stage_with(rules=any_user)
    theirs = kept(stage, "theirs", 1, uid=2000)
    mine = kept(stage, "mine", 2)
    assert isinstance(attach(stage, "new", 3), Attached)
    assert (theirs.closed, mine.closed) == (False, True)


def test_one_pool_that_is_enough_ends_before_several_that_were_kept_longer():
    stage = stage_with(quota=2 * SMALL + SIZE)
    small = [kept(stage, f"small-{number}", number, raw=OTHER.raw) for number in (1, 2)]
    large = kept(stage, "large", 3)
    assert isinstance(attach(stage, "new", 4), Attached)
    assert [each.closed for each in (*small, large)] == [False, False, True]


def test_of_those_that_are_enough_the_one_ends_that_was_kept_longest():
    stage = stage_with(quota=2 * SIZE)
    one, other = kept(stage, "one", 1), kept(stage, "other", 2)
    stage.run(1.0)
    stage.attach("one", 3, pid=103)  # comes back, and goes again
    stage.hang_up(3)
    stage.process_ends(3)
    assert isinstance(attach(stage, "new", 4), Attached)
    assert (one.closed, other.closed) == (False, True)


def test_two_attaches_do_not_end_one_pool_for_both():
    stage = stage_with(quota=2 * SIZE)
    old = [kept(stage, f"old-{number}", number) for number in (1, 2)]
    assert isinstance(attach(stage, "new", 3), Attached)
    assert isinstance(attach(stage, "newer", 4), Attached)
    assert all(each.closed for each in old)


def test_a_successor_that_wants_more_gets_the_room_of_another_kept_pool():
    stage = stage_with(quota=SMALL + SIZE)
    kept(stage, "w", 1, raw=OTHER.raw)
    other = kept(stage, "other", 2)
    stage.attach("third", 3, raw=OTHER.raw)  # ends the one that is enough and was kept longest
    assert not other.closed
    assert isinstance(attach(stage, "w", 4), Attached)
    assert other.closed


def lacking(stage, until_closed):
    """Memory is short until these pools have ended."""
    allocate = stage.dependencies.provider.allocate

    def short(name, size):
        left = [each for each in until_closed if not each.closed]
        if left:
            raise NoMemory("the host is full", sum(each.size for each in left))
        return allocate(name, size)

    def background(work, done):
        try:
            done(work())
        except KvdError as error:
            done(error)

    stage.dependencies.provider.allocate = short
    stage.actors.pools.memory._background = background


def test_where_memory_is_short_kept_pools_make_room_too_as_many_as_it_takes():
    stage = stage_with()
    old = [kept(stage, f"old-{number}", number) for number in (1, 2)]
    lacking(stage, old)
    assert isinstance(attach(stage, "new", 3), Attached)
    assert all(each.closed for each in old)


def test_where_that_is_not_enough_nothing_ends_and_what_the_last_daemon_left_is_given_up():
    stage = stage_with()
    given_up = []
    stage.actors.pools._bounds._store.give_up = given_up.append
    old = kept(stage, "old", 1)
    lacking(stage, [old, Memory(SIZE)])
    refused = attach(stage, "new", 2)
    assert (refused.code, refused.text) == (ErrorCode.OVERLOADED, "the host is full")
    assert not old.closed
    assert given_up == [1000]
    assert list(stage.actors.pools._records) == ["old"]


def test_a_user_with_as_many_pools_as_it_may_have_gets_room_by_one_that_is_kept(monkeypatch):
    monkeypatch.setattr(limits, "MAX_POOLS_PER_USER", 1)
    stage = stage_with()
    old = kept(stage, "old", 1)
    assert isinstance(attach(stage, "new", 2), Attached)
    assert old.closed


def padded(size, raw=CACHE.raw):
    """A layout of so many bytes, most of them in a field that nobody knows."""
    fields = msgspec.msgpack.decode(raw)
    fields["unknown"] = bytes(size - len(msgspec.msgpack.encode(fields | {"unknown": b""})) - 1)
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("bound", "whose"),
    [
        ("MAX_LAYOUT_BYTES_PER_STRANGER", "user 1000"),
        ("MAX_LAYOUT_BYTES_OF_STRANGERS", "all strangers"),
        ("MAX_LAYOUT_BYTES", "all users"),
    ],
)
def test_layouts_that_peers_could_not_be_told_of_in_one_message_are_refused(monkeypatch, bound, whose):
    monkeypatch.setattr(limits, bound, 2 * len(CACHE.raw) - 1)
    stage = stage_with(rules=[Rule(pools=("*",), uid=uid) for uid in (0, 1000, 1001)])
    assert isinstance(stage.attach("first", 1, pid=7, uid=1000), Attached)
    refused = attach(stage, "second", 2, uid=1000)
    assert refused.code == ErrorCode.OVERLOADED
    assert f"and {len(CACHE.raw)} of other pools of {whose}, are above the bound" in refused.text
    assert isinstance(attach(stage, "third", 3, uid=1001), Attached if whose == "user 1000" else Refused)
    assert isinstance(attach(stage, "of-root", 4, uid=0), Refused if whose == "all users" else Attached)
    stage.hang_up(1)
    stage.process_ends(1)
    assert isinstance(attach(stage, "first", 5, uid=1000), Attached)  # in place of its own


def test_what_peers_are_told_of_a_layout_counts_whatever_the_worker_says_when_it_comes_again(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 1000 + len(CACHE.raw) - 1)
    stage = stage_with()
    kept(stage, "fat", 1, raw=padded(1000))
    assert attach(stage, "fat", 2).kept  # with the layout as it is without padding
    assert f"and 1000 of other pools of user {1000}" in attach(stage, "slim", 3).text


def test_a_successor_that_says_its_layout_with_more_bytes_costs_nobody_anything(monkeypatch):
    """Peers are told of the pool as they were before."""
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 1000 + len(CACHE.raw))
    stage = stage_with()
    kept(stage, "fat", 1, raw=padded(1000))
    other = kept(stage, "other", 2)
    assert attach(stage, "fat", 3, raw=padded(1001)).kept
    assert not other.closed


@pytest.mark.parametrize(
    ("bounds", "quota", "lent"),
    [
        ({"MAX_LAYOUT_BYTES_PER_STRANGER": 1500}, SIZE + SMALL - 1, OTHER.raw),
        ({"MAX_LAYOUT_BYTES_PER_STRANGER": 1500, "MAX_LAYOUT_BYTES_OF_STRANGERS": 1200}, None, OTHER.raw),
        ({"MAX_LAYOUT_BYTES_PER_STRANGER": 1900, "MAX_POOLS_PER_USER": 2}, None, padded(1000)),
    ],
    ids=["layout and quota", "layout and all strangers'", "number and layout"],
)
def test_no_pool_is_ended_for_one_bound_where_another_stands_in_the_way(monkeypatch, bounds, quota, lent):
    for name, bound in bounds.items():
        monkeypatch.setattr(limits, name, bound)
    stage = stage_with(quota=quota)
    spare = kept(stage, "spare", 1, raw=padded(600, OTHER.raw))
    assert isinstance(stage.attach("lent", 2, raw=lent), Attached)
    assert isinstance(attach(stage, "new", 3, raw=padded(1000)), Refused)
    assert not spare.closed


@pytest.mark.parametrize("bound", ["number", "quota"])
def test_one_pool_that_is_enough_for_all_bounds_ends_alone(monkeypatch, bound):
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 2000)
    if bound == "number":
        monkeypatch.setattr(limits, "MAX_POOLS_PER_USER", 2)
    stage = stage_with(quota=SIZE + SMALL if bound == "quota" else None)
    thin, fat = kept(stage, "thin", 1, raw=OTHER.raw), kept(stage, "fat", 2, raw=padded(1500))
    assert isinstance(attach(stage, "new", 3, raw=padded(1000)), Attached)
    assert (thin.closed, fat.closed) == (False, True)


def test_strangers_leave_pools_to_root_and_the_daemons_own_user(monkeypatch):
    monkeypatch.setattr(limits, "MAX_POOLS_OF_STRANGERS", 2)
    stage = stage_with(rules=[Rule(pools=("*",), uid=uid) for uid in (0, 1000, 1001)])
    kept(stage, "a", 1, uid=1000)
    kept(stage, "b", 2, uid=1001)
    third = attach(stage, "c", 3, uid=0)
    assert isinstance(third, Attached)
    fourth = attach(stage, "d", 4, uid=1000)  # in place of the one that it has itself
    assert isinstance(fourth, Attached)
    fifth = attach(stage, "e", 5, uid=1000)
    assert (fifth.code, "have 2 other pools" in fifth.text) == (ErrorCode.OVERLOADED, True)


def test_a_user_that_is_no_stranger_has_room_for_a_layout_as_long_as_there_may_be(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 999)
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_USER", 1000)
    stage = stage_with(rules=[Rule(pools=("*",), uid=uid) for uid in (0, 1000)])
    assert "999" in attach(stage, "theirs", 1, raw=padded(1000), uid=1000).text
    assert isinstance(attach(stage, "of-root", 2, raw=padded(1000), uid=0), Attached)
    assert "bound of 1000;" in attach(stage, "more", 3, uid=0).text


def test_kept_pools_are_not_ended_for_a_layout_that_gets_no_room_by_it(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 2000)
    stage = stage_with()
    small = kept(stage, "small", 1)
    assert isinstance(stage.attach("lent", 2, raw=padded(1500)), Attached)
    assert isinstance(attach(stage, "new", 3, raw=padded(1000)), Refused)
    assert not small.closed


def test_a_kept_pool_makes_room_for_a_layout(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LAYOUT_BYTES_PER_STRANGER", 2 * len(CACHE.raw) - 1)
    stage = stage_with()
    old = kept(stage, "old", 1)
    assert isinstance(attach(stage, "new", 2), Attached)
    assert old.closed


def test_all_layouts_together_leave_room_for_the_rest_of_a_welcome():
    """Names and numbers of all pools beside the layouts, and the transport's metadata."""
    pools = limits.MAX_POOLS * (limits.MAX_NAME_BYTES + 64)
    assert limits.MAX_LAYOUT_BYTES + limits.MAX_METADATA_BYTES + pools < limits.MAX_MESSAGE_BYTES
    assert limits.MAX_SPEC_BYTES <= limits.MAX_LAYOUT_BYTES_PER_USER < limits.MAX_LAYOUT_BYTES
    assert 16 * limits.MAX_LAYOUT_BYTES_PER_STRANGER <= limits.MAX_LAYOUT_BYTES_OF_STRANGERS < limits.MAX_LAYOUT_BYTES


@pytest.fixture
def quarantined():
    """A pool that is to make room, of which a read does not end; the attach waits."""
    stage = stage_with(quota=SIZE)
    stage.attach("w", pid=7)
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.process_ends()
    before = len(stage.on_sessions)
    attach(stage, "new", 2, descriptors=(9,))
    assert len(stage.on_sessions) == before
    return stage


def test_no_pool_is_ended_for_a_second_attach_of_a_name_that_waits_for_room(quarantined):
    refused = attach(quarantined, "new", 9)
    assert (refused.code, "another worker waits for room" in refused.text) == (ErrorCode.POOL_BUSY, True)


def test_an_attach_that_waits_for_room_and_dies_leaves_the_pool_with_its_bytes(quarantined):
    quarantined.hang_up(2)
    assert quarantined.discarded == [9]
    quarantined.landed(1)
    assert not quarantined.made["w"].closed
    assert attach(quarantined, "w", 3).kept


def test_an_attach_that_waits_for_room_in_vain_is_refused_and_told_of_what(quarantined):
    quarantined.run(2.1)
    refused = quarantined.on_sessions[-1]
    assert refused.code == ErrorCode.POOL_BUSY
    assert "the pool 'w', which was to make room, cannot be had: it is in quarantine" in refused.text
    assert not quarantined.made["w"].closed


def test_an_attach_that_dies_at_once_gives_the_pool_that_was_to_make_room_back():
    stage = stage_with(quota=SIZE)
    old = kept(stage, "old", 1)
    stage.connect(2)
    stage.actors.gateway.received(SessionFrame(2, codec.encode(Attach("new", b"i" * 16, CACHE.raw)), (9,)))
    stage.hang_up(2)
    assert stage.discarded == [9]
    assert not old.closed
    assert list(stage.actors.pools._records) == ["old"]


def test_a_pool_that_makes_room_and_is_registered_anew_meanwhile_still_ends(quarantined):
    call(quarantined.actors.pools.renew, "w")
    quarantined.run()
    quarantined.landed(1)
    assert isinstance(quarantined.on_sessions[-1], Attached)
    assert quarantined.made["w"].closed


# --- by an operator -------------------------------------------------------------------------------------------------


def end(stage, name, uid=1000, connection=9):
    stage.connect(connection, pid=9, uid=uid)
    before = len(stage.on_sessions)
    stage.session(End(name), connection)
    return stage.on_sessions[before:]


def test_an_operator_ends_a_kept_pool_and_hears_when_it_has_ended():
    stage = stage_with()
    old = kept(stage, "w", 1)
    assert end(stage, "w") == [Detached()]
    assert old.closed
    assert stage.actors.pools._records == {}


def waiting_for_the_end_of_what_is_read():
    """An operator has a pool ended whose worker is gone and from which a peer reads."""
    stage = stage_with()
    stage.attach("w", pid=7)
    stage.offer()
    stage.asked_by_peer(make_claim(ttl=3600.0))
    stage.hang_up()
    stage.process_ends()
    assert end(stage, "w") == []
    return stage


def test_it_is_read_to_the_end_and_then_ends_though_the_operator_did_not_wait():
    stage = waiting_for_the_end_of_what_is_read()
    stage.hang_up(9)
    stage.asked_by_peer(Release(1, finished=True))
    assert stage.made["w"].closed


def test_an_operator_waits_longer_than_silent_sessions_may():
    stage = stage_with(attach_wait=2 * limits.SESSION_IDLE_SECONDS)
    stage.attach("w", pid=7)
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.process_ends()
    assert end(stage, "w") == []
    stage.run(limits.SESSION_IDLE_SECONDS + 1.0)
    assert 9 not in stage.hung_up
    stage.landed(1)
    assert stage.on_sessions[-1] == Detached()
    stage.run(limits.SESSION_IDLE_SECONDS + 1.0)
    assert 9 in stage.hung_up


def test_an_operator_is_told_of_a_read_that_does_not_end_and_the_pool_ends_with_it(quarantined):
    quarantined.hang_up(2)
    assert end(quarantined, "w") == []
    quarantined.run(2.1)
    refused = quarantined.on_sessions[-1]
    assert (refused.code, "ends later: it is in quarantine" in refused.text) == (ErrorCode.POOL_BUSY, True)
    quarantined.landed(1)
    assert quarantined.made["w"].closed


@pytest.mark.parametrize("uid", [2000, 0])
def test_other_users_than_its_own_the_daemons_and_root_may_not_end_a_pool(uid):
    stage = stage_with(rules=(Rule(pools=("*",), uid=3000),))
    kept(stage, "w", 1, uid=3000)
    (answer,) = end(stage, "w", uid=uid)
    assert getattr(answer, "code", None) == (ErrorCode.NOT_PERMITTED if uid else None)


def test_a_pool_that_a_worker_has_or_may_map_is_not_ended_nor_one_that_is_not_there():
    stage = stage_with()
    stage.attach("lent", 1, pid=7)
    (lent,) = end(stage, "lent")
    assert (lent.code, "is lent: a worker has it" in lent.text) == (ErrorCode.POOL_BUSY, True)
    stage.hang_up(1)
    (held,) = end(stage, "lent", connection=10)
    assert (held.code, "process 7, which had it, lives" in held.text) == (ErrorCode.POOL_BUSY, True)
    (absent,) = end(stage, "absent", connection=11)
    assert (absent.code, "no pool is called 'absent'" in absent.text) == (ErrorCode.BAD_POOL, True)


def test_one_whose_process_nobody_can_watch_may_be_ended():
    stage = stage_with()
    stage.attach("w", pid=0, watched=False)
    stage.hang_up()
    assert end(stage, "w") == [Detached()]


def test_a_worker_ends_its_own_pool_by_detaching():
    stage = stage_with()
    stage.attach("w")
    refused = stage.session(End("w"))
    assert isinstance(refused, Refused)
    assert refused.code == ErrorCode.WRONG_STATE
    assert isinstance(stage.session(Detach()), Detached)


def test_a_session_that_waits_for_a_pool_to_end_attaches_only_afterwards_so_that_its_own_is_not_kept_for_good():
    stage = waiting_for_the_end_of_what_is_read()
    for request in (Attach("mine", b"j" * 16, CACHE.raw), End("w")):
        refused = stage.session(request, 9)
        assert isinstance(refused, Refused)
        assert refused.code == ErrorCode.WRONG_STATE
    stage.asked_by_peer(Release(1, finished=True))
    assert stage.on_sessions[-1] == Detached()
    assert isinstance(stage.session(Attach("mine", b"j" * 16, CACHE.raw), 9), Attached)
    stage.hang_up(9)
    stage.process_ends(9)
    assert isinstance(attach(stage, "mine", 10), Attached)
