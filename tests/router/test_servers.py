"""Which server gets a request."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.router.limits import AFFINITY_REQUESTS, LONGEST_REST_SECONDS, REST_SECONDS
from kvd.router.servers import Servers, ask, rest, served, unknown

LOADS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def make(loads: list[int]) -> Servers:
    servers = Servers("decode", [f"http://{number}" for number in range(len(loads))])
    for server, load in zip(servers.all, loads, strict=True):
        server.in_flight = load
    return servers


@given(LOADS, st.data())
def test_the_least_busy_server_is_chosen_of_those_that_were_not_tried(loads, data) -> None:
    servers = make(loads)
    tried = data.draw(st.sets(st.sampled_from(servers.all)))
    chosen = servers.choose(0.0, tried=tried)
    left = [server for server in servers.all if server not in tried]
    assert (chosen is None) == (not left)
    if chosen is not None:
        assert chosen in left
        assert chosen.in_flight == min(server.in_flight for server in left)


@given(LOADS, st.integers(1, 3))
def test_servers_that_are_equally_busy_take_turns(loads, rounds) -> None:
    servers = make([5] * len(loads))
    chosen = [servers.choose(0.0) for _ in range(rounds * len(loads))]
    assert all(chosen.count(server) == rounds for server in servers.all)


@given(LOADS, st.integers(1, 200))
def test_requests_that_stay_differ_by_one_at_most_among_servers_that_began_idle(loads, requests) -> None:
    servers = make([0] * len(loads))
    for _ in range(requests):
        servers.choose(0.0).in_flight += 1
    busy = [server.in_flight for server in servers.all]
    assert max(busy) - min(busy) <= 1


@given(LOADS, st.data())
def test_a_server_that_failed_is_chosen_only_if_no_other_is_there(loads, data) -> None:
    servers = make(loads)
    failed = data.draw(st.sets(st.sampled_from(servers.all)))
    for server in failed:
        rest(server, 0.0)
    assert (servers.choose(REST_SECONDS / 2) in failed) == (len(failed) == len(loads))
    assert servers.choose(REST_SECONDS).in_flight == min(loads)


def test_a_server_that_fails_for_ever_is_asked_more_and_more_seldom() -> None:
    bad, good = (servers := make([0, 0])).all
    asked, now = [], 0.0
    while now < 3600:
        chosen = servers.choose(now, known_by=bad)
        ask(chosen, now)
        if chosen is bad:
            asked.append(now)
            now += 2  # until it fails
            rest(bad, now)
        else:
            served(good)
            now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses[0] < pauses[1] < pauses[2]
    assert max(pauses) == pytest.approx(LONGEST_REST_SECONDS, abs=3)
    assert len(asked) < 40


@given(st.lists(st.floats(0, 60), min_size=1, max_size=50).map(sorted))
def test_requests_that_a_server_fails_at_once_count_once(ends) -> None:
    (server,) = make([0]).all
    for end in ends:
        if end < ends[0] + REST_SECONDS:
            rest(server, end)
    assert server.failures == 1
    assert server.rests_until == ends[0] + REST_SECONDS


def test_one_request_finds_out_whether_a_server_still_fails_while_others_go_elsewhere() -> None:
    bad, good = (servers := make([0, 0])).all
    rest(bad, 0.0)
    now = REST_SECONDS
    chosen = [servers.choose(now, known_by=bad)]
    ask(bad, now)
    chosen += [servers.choose(now, known_by=bad) for _ in range(5)]
    assert chosen == [bad] + [good] * 5
    served(bad)
    assert servers.choose(now, known_by=bad) is bad


def test_a_request_that_a_server_refuses_leaves_it_to_the_next_one_whether_it_still_fails() -> None:
    """Otherwise who sends such requests could keep a server out of use that serves all others."""
    bad, good = (servers := make([0, 0])).all
    rest(bad, 0.0)
    now = REST_SECONDS
    for _ in range(5):
        assert servers.choose(now, known_by=bad) is bad
        until = ask(bad, now)
        assert servers.choose(now, known_by=bad) is good
        unknown(bad, until)


def test_a_request_that_finds_out_nothing_leaves_that_to_the_next_one_unless_another_has_found_out() -> None:
    bad, good = (servers := make([0, 0])).all
    assert not ask(bad, 0.0)
    rest(bad, 0.0)
    now = REST_SECONDS
    until = ask(bad, now)
    assert until == now + 2 * REST_SECONDS
    assert not ask(bad, now)
    unknown(bad, until)
    assert bad.failures == 1
    assert servers.choose(now, known_by=bad) is bad
    until = ask(bad, now)
    served(bad)
    rest(bad, now)
    unknown(bad, until)
    assert bad.failures == 1
    assert servers.choose(now, known_by=bad) is good


@given(LOADS, st.data())
def test_a_server_that_knows_the_prompt_is_chosen_unless_it_is_much_busier_or_failed(loads, data) -> None:
    servers = make(loads)
    known = data.draw(st.sampled_from(servers.all))
    failed = data.draw(st.booleans())
    if failed:
        rest(known, 0.0)
    chosen = servers.choose(0.0, known_by=known)
    awake = [server for server in servers.all if server is not known or not failed] or [known]
    near = known in awake and known.in_flight <= min(one.in_flight for one in awake) + AFFINITY_REQUESTS
    assert chosen is known if near else chosen.in_flight == min(server.in_flight for server in awake)


def test_a_request_is_counted_until_it_ends() -> None:
    (server,) = make([0]).all
    with server.busy(), server.busy():
        assert server.in_flight == 2
    assert server.in_flight == 0
