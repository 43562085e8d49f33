from kvd.net.priority_slots import PrioritySlots


def test_as_many_are_in_as_there_are_places_and_the_others_wait_in_order():
    turns = PrioritySlots(2)
    assert [turns.enter(key, urgent=False) for key in "abcd"] == [True, True, False, False]
    assert turns.next() is None
    turns.leave("a")
    assert (turns.next(), turns.next()) == ("c", None)
    turns.leave("b")
    turns.leave("c")
    assert (turns.next(), turns.next()) == ("d", None)


def test_who_is_in_enters_again_without_waiting():
    turns = PrioritySlots(1)
    assert turns.enter("a", urgent=False)
    turns.leave("a")
    assert turns.next() is None


def test_the_urgent_go_first_also_those_that_become_so_while_they_wait():
    turns = PrioritySlots(1)
    turns.enter("a", urgent=False)
    for key in "bcd":
        turns.enter(key, urgent=False)
    turns.hurry("c")
    turns.enter("d", urgent=True)
    turns.enter("e", urgent=True)
    order = []
    turns.leave("a")
    while (key := turns.next()) is not None:
        order.append(key)
        turns.leave(key)
    assert order == ["c", "d", "e", "b"]


def test_who_is_forgotten_takes_no_place_and_waits_no_more():
    turns = PrioritySlots(1)
    turns.enter("a", urgent=False)
    turns.enter("b", urgent=True)
    turns.forget("b")
    turns.leave("a")
    assert turns.next() is None
    turns.enter("c", urgent=False)
    turns.forget("c")
    assert turns.enter("d", urgent=False)


def test_one_that_waits_and_leaves_waits_on():
    turns = PrioritySlots(1)
    turns.enter("a", urgent=False)
    turns.enter("b", urgent=False)
    turns.leave("b")
    turns.leave("a")
    assert turns.next() == "b"


def test_owners_of_urgent_keys_take_turns():
    turns = PrioritySlots(1)
    turns.enter("in", urgent=True, owner="a")
    for key in ("a1", "a2", "a3"):
        turns.enter(key, urgent=True, owner="a")
    turns.enter("late", urgent=False)
    turns.enter("b1", urgent=True, owner="b")
    turns.enter("patient", urgent=False)
    turns.hurry("patient", owner="c")
    came = []
    turns.leave("in")
    while (key := turns.next()) is not None:
        came.append(key)
        turns.leave(key)
    assert came == ["a1", "b1", "patient", "a2", "a3", "late"]


def test_a_party_has_a_share_and_leaves_the_rest_to_others_however_long_it_takes():
    turns = PrioritySlots(4, share=2)
    assert [turns.enter(f"a{n}", urgent=True, owner="w", party="a") for n in range(4)] == [True, True, False, False]
    assert turns.next() is None
    assert turns.enter("b", urgent=True, owner="w", party="b")
    assert turns.enter("unnamed", urgent=False)
    assert not turns.enter("late", urgent=True, owner="w", party="b")
    turns.leave("unnamed")
    assert (turns.next(), turns.next()) == ("late", None)
    turns.leave("a0")
    assert (turns.next(), turns.next()) == ("a2", None)
    turns.forget("a1")
    turns.leave("b")
    assert (turns.next(), turns.next()) == ("a3", None)


def test_a_key_of_several_owners_runs_once_in_the_turn_that_comes_first():
    turns = PrioritySlots(2, share=1)
    assert [turns.enter(key, urgent=True, owner="a", party="a") for key in ("a0", "a1", "both")] == [True, False, False]
    assert turns.enter("b0", urgent=True, owner="b", party="b")
    assert not turns.enter("both", urgent=True, owner="b", party="b")
    turns.leave("b0")
    assert (turns.next(), turns.next()) == ("both", None)
    turns.leave("a0")
    assert turns.next() == "a1"
    turns.leave("both")
    turns.leave("a1")
    assert turns.next() is None


def test_an_urgent_key_is_hurried_for_another_owner_too():
    turns = PrioritySlots(1)
    turns.enter("in", urgent=True, owner="a")
    for key in ("a1", "a2", "both"):
        turns.enter(key, urgent=True, owner="a")
    turns.hurry("both", "b")
    assert [turns.waits(key) for key in ("in", "both", "c")] == [False, True, False]
    came = []
    turns.leave("in")
    while (key := turns.next()) is not None:
        came.append(key)
        turns.leave(key)
    assert came == ["a1", "both", "a2"]


def test_what_an_owner_that_is_gone_was_in_a_hurry_for_is_not_urgent_any_more():
    turns = PrioritySlots(1)
    turns.enter("in", urgent=True)
    for key in ("mine", "both"):
        turns.enter(key, urgent=True, owner="gone")
    turns.hurry("both", "b")
    turns.enter("urgent", urgent=True, owner="c")
    turns.release("gone")
    came = []
    turns.leave("in")
    while (key := turns.next()) is not None:
        came.append(key)
        turns.leave(key)
    assert came == ["both", "urgent", "mine"]
