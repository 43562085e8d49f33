from hypothesis import given
from hypothesis import strategies as st

from kvd.net.priority_slots import PrioritySlots, _Queue


def emptied(turns):
    """All that wait, in the order in which they run one after the other."""
    order = []
    while (key := turns.next()) is not None:
        order.append(key)
        turns.leave(key)
    return order


def test_as_many_are_in_as_there_are_places_and_the_others_wait_in_order():
    turns = PrioritySlots(2)
    assert [turns.enter(key) for key in "abcd"] == [True, True, False, False]
    assert turns.next() is None
    turns.leave("a")
    assert (turns.next(), turns.next()) == ("c", None)
    turns.leave("b")
    turns.leave("c")
    assert (turns.next(), turns.next()) == ("d", None)


def test_who_is_in_enters_again_without_waiting():
    turns = PrioritySlots(1)
    assert turns.enter("a")
    turns.leave("a")
    assert turns.next() is None


def test_the_urgent_go_first_also_those_that_become_so_while_they_wait():
    turns = PrioritySlots(1)
    turns.enter("a")
    for key in "bcd":
        turns.enter(key)
    turns.hurry("c", "w")
    turns.enter("d", ["w"])
    turns.enter("e", ["w"])
    turns.leave("a")
    assert emptied(turns) == ["c", "d", "e", "b"]


def test_who_is_forgotten_takes_no_place_and_waits_no_more():
    turns = PrioritySlots(1)
    turns.enter("a")
    turns.enter("b", ["w"])
    turns.forget("b")
    turns.leave("a")
    assert turns.next() is None
    turns.enter("c")
    turns.forget("c")
    assert turns.enter("d")


def test_one_that_waits_and_leaves_waits_on():
    turns = PrioritySlots(1)
    turns.enter("a")
    turns.enter("b")
    turns.leave("b")
    turns.leave("a")
    assert turns.next() == "b"


def test_owners_of_urgent_keys_take_turns():
    turns = PrioritySlots(1)
    turns.enter("in", ["a"])
    for key in ("a1", "a2", "a3"):
        turns.enter(key, ["a"])
    turns.enter("late")
    turns.enter("b1", ["b"])
    turns.enter("patient")
    turns.hurry("patient", "c")
    turns.leave("in")
    assert emptied(turns) == ["a1", "b1", "patient", "a2", "a3", "late"]


def test_a_party_has_a_share_and_leaves_the_rest_to_others_however_long_it_takes():
    turns = PrioritySlots(4, share=2)
    assert [turns.enter(f"a{n}", ["w"], party="a") for n in range(4)] == [True, True, False, False]
    assert turns.next() is None
    assert turns.enter("b", ["w"], party="b")
    assert turns.enter("unnamed")
    assert not turns.enter("late", ["w"], party="b")
    turns.leave("unnamed")
    assert (turns.next(), turns.next()) == ("late", None)
    turns.leave("a0")
    assert (turns.next(), turns.next()) == ("a2", None)
    turns.forget("a1")
    turns.leave("b")
    assert (turns.next(), turns.next()) == ("a3", None)


def test_a_key_of_several_owners_runs_once_in_the_turn_that_comes_first():
    turns = PrioritySlots(2, share=1)
    assert [turns.enter(key, ["a"], party="a") for key in ("a0", "a1", "both")] == [True, False, False]
    assert turns.enter("b0", ["b"], party="b")
    assert not turns.enter("both", ["b"], party="b")
    turns.leave("b0")
    assert (turns.next(), turns.next()) == ("both", None)
    turns.leave("a0")
    assert turns.next() == "a1"
    turns.leave("both")
    turns.leave("a1")
    assert turns.next() is None


def test_an_urgent_key_is_hurried_for_another_owner_too():
    turns = PrioritySlots(1)
    turns.enter("in", ["a"])
    for key in ("a1", "a2", "both"):
        turns.enter(key, ["a"])
    turns.hurry("both", "b")
    assert [turns.waits(key) for key in ("in", "both", "c")] == [False, True, False]
    turns.leave("in")
    assert emptied(turns) == ["a1", "both", "a2"]


def test_what_an_owner_that_is_gone_was_in_a_hurry_for_is_not_urgent_any_more():
    turns = PrioritySlots(1)
    turns.enter("in", ["w"])
    for key in ("mine", "both"):
        turns.enter(key, ["gone"])
    turns.hurry("both", "b")
    turns.enter("urgent", ["c"])
    turns.release("gone")
    turns.leave("in")
    assert emptied(turns) == ["both", "urgent", "mine"]


def test_parties_of_one_owner_take_turns():
    turns = PrioritySlots(1)
    turns.enter("in")
    for key in ("a1", "a2", "b1"):
        turns.enter(key, ["w"], party=key[0])
    assert emptied(turns) == []
    turns.leave("in")
    assert emptied(turns) == ["a1", "b1", "a2"]


def test_however_many_wait_for_a_party_that_has_its_share_few_are_looked_at(monkeypatch):
    turns, looks, has_room = PrioritySlots(4, share=2), [], PrioritySlots._has_room
    monkeypatch.setattr(turns, "_has_room", lambda party: looks.append(party) or has_room(turns, party))
    for owner in ("v", "w"):
        for number in range(1000):
            turns.enter(number, [owner], party="slow")
    looks.clear()
    assert turns.next() is None
    assert looks == ["slow"] * 2


def test_however_many_owners_wait_a_key_is_taken_out_of_its_own_queues_alone(monkeypatch):
    discarded, discard = [], _Queue.discard
    monkeypatch.setattr(_Queue, "discard", lambda queue, key: discarded.append(key) or discard(queue, key))
    turns = PrioritySlots(1)
    for number in range(1000):
        turns.enter(number, [f"o{number}"])
    turns.leave(0)
    discarded.clear()
    turns.forget(500)
    assert turns.next() == 1
    assert len(discarded) == 4


STEPS = st.sampled_from(["enter", "hurry", "leave", "forget", "release", "next"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 9)), max_size=60))
def test_a_key_waits_or_runs_and_whoever_waits_comes_when_there_is_room(steps):
    turns, parties, owners = PrioritySlots(3, share=2), ["", "a", "b"], ["v", "w"]
    waits, runs = set(), set()
    for step, key in steps:
        owner = owners[key % 2]
        if step == "enter":
            entered = turns.enter(key, owners[: key % 3], parties[key % 3])
            (runs if entered else waits).add(key)
            waits -= runs
        elif step in ("hurry", "release"):
            turns.hurry(key, owner) if step == "hurry" else turns.release(owner)
        elif step == "next":
            if (began := turns.next()) is not None:
                assert began in waits
                waits.remove(began)
                runs.add(began)
        else:
            getattr(turns, step)(key)
            runs.discard(key)
            if step == "forget":
                waits.discard(key)
        assert {key for key in range(10) if turns.waits(key)} == waits
        assert {key for key in range(10) if key in turns} == runs
        assert len(runs) <= 3
        assert all(sum(parties[key % 3] == party for key in runs) <= 2 for party in "ab")
    for key in runs:
        turns.leave(key)
    assert set(emptied(turns)) == waits
