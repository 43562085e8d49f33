"""Which transport serves a peer, and what is heard of both. `test_samehost.py` runs the contract over it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    PeerAdded,
    PeerFailed,
    Region,
    Registered,
    RegisterFailed,
)
from kvd.transport.routed import RoutedTransport
from tests.transport.descriptors import descriptors, request

POOL = Region(64, 32, 5)
BLOCK = descriptors([(0, 0, 1)])


class Scripted:
    """A transport that says what the test makes it say."""

    def __init__(self, metadata: bytes) -> None:
        self.agent, self.metadata = "a", metadata
        self.told: list[tuple[Any, ...]] = []
        self.say: Callable[[Event], None]

    def start(self, on_event: Callable[[Event], None]) -> None:
        self.say = on_event

    def __getattr__(self, command: str) -> Callable[..., None]:
        return partial(self._note, command)

    def _note(self, command: str, *arguments: object, **options: object) -> None:
        self.told.append((command, *arguments, *options.values()))

    def reads(self) -> list[object]:
        return [arguments[0].read for command, *arguments in self.told if command == "read"]


class Run:
    def __init__(self, *, network: bool = True) -> None:
        self.near, self.far = Scripted(b"near"), Scripted(b"far")
        self.routed = RoutedTransport(self.near, self.far if network else None)
        self.events: list[Event] = []
        self.routed.start(self.events.append)

    def metadata(self) -> bytes:
        return self.routed.metadata

    def add(self) -> None:
        self.routed.add_peer("p", Run().metadata())


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_peer_of_this_host_is_read_within_it(run: Run) -> None:
    run.add()
    run.near.say(PeerAdded("p", b"near", same_host=True, stamps=True))
    assert run.events == [PeerAdded("p", run.metadata(), same_host=True, stamps=True)]
    run.routed.read(request(1, BLOCK))
    assert (run.near.reads(), run.far.reads()) == ([1], [])
    assert run.far.told == [("remove_peer", "p")]


def test_a_peer_that_cannot_be_read_within_the_host_is_read_over_the_network_and_it_is_said_why(run: Run) -> None:
    run.add()
    run.near.say(PeerFailed("p", "no such socket"))
    assert run.events == []
    assert run.far.told == [("add_peer", "p", b"far")]
    run.far.say(PeerAdded("p", b"far", "tcp/eth0"))
    assert run.events == [PeerAdded("p", run.metadata(), "tcp/eth0", detour="no such socket")]
    run.routed.read(request(1, BLOCK))
    assert (run.near.reads(), run.far.reads()) == ([], [1])


@pytest.mark.parametrize("mine", [False, True])
def test_without_a_network_on_both_sides_a_peer_fails_with_why_the_host_could_not(mine: bool) -> None:
    run = Run(network=mine)
    run.routed.add_peer("p", Run(network=not mine).metadata())
    run.near.say(PeerFailed("p", "no such socket"))
    assert run.events == [PeerFailed("p", "no such socket")]


def test_a_peer_that_was_read_within_the_host_and_is_lost_is_not_tried_over_the_network(run: Run) -> None:
    run.add()
    run.near.say(PeerAdded("p", b"near", same_host=True))
    run.near.say(PeerFailed("p", "it has ended"))
    assert run.events[-1] == PeerFailed("p", "it has ended")
    assert ("add_peer", "p", b"far") not in run.far.told


def test_what_the_network_says_late_of_a_peer_that_is_read_within_the_host_is_not_heard(run: Run) -> None:
    run.add()
    run.near.say(PeerFailed("p", "not yet"))
    run.add()
    run.near.say(PeerAdded("p", b"near", same_host=True))
    run.far.say(PeerAdded("p", b"far", "tcp/eth0"))
    run.far.say(PeerFailed("p", "gone"))
    assert run.events == [PeerAdded("p", run.metadata(), same_host=True)]


@pytest.mark.parametrize("metadata", [b"", b"\xc1", b"\x92\xc4\x00"])
def test_metadata_of_no_known_form_fails_its_peer_and_reaches_neither(run: Run, metadata: bytes) -> None:
    run.routed.add_peer("p", metadata)
    assert [type(event) for event in run.events] == [PeerFailed]
    assert {command for command, *_ in (*run.near.told, *run.far.told)} == {"remove_peer"}


def test_a_pool_is_registered_with_both_and_with_none_if_the_network_cannot(run: Run) -> None:
    run.routed.register(1, POOL)
    assert run.near.told == []
    run.far.say(Registered(1, b"new"))
    assert run.near.told == [("register", 1, POOL)]
    run.near.say(Registered(1, b""))
    assert run.events == [Registered(1, run.metadata())]
    run.routed.register(2, POOL)
    run.far.say(RegisterFailed(2, "no room"))
    assert run.events[1:] == [RegisterFailed(2, "no room")]
    assert len(run.near.told) == 1


def test_a_registration_has_ended_when_it_has_with_both(run: Run) -> None:
    run.routed.deregister(1, returns=True)
    assert run.far.told == [("deregister", 1, True)]
    run.far.say(Deregistered(1, b""))
    assert (run.near.told, run.events) == ([("deregister", 1)], [])
    run.near.say(Deregistered(1, b""))
    assert run.events == [Deregistered(1, run.metadata())]


def test_metadata_of_some_pools_has_what_both_say_of_them(run: Run) -> None:
    run.routed.describe((1, 2))
    run.far.say(Described((1, 2), b"far"))
    run.near.say(Described((1, 2), b"near"))
    assert run.events == [Described((1, 2), run.metadata())]


def test_both_give_a_sign_of_life_before_one_is_told_of(run: Run) -> None:
    run.routed.ping(7)
    run.near.say(Answered(7))
    assert (run.far.told, run.events) == ([("ping", 7)], [])
    run.far.say(Answered(7))
    assert run.events == [Answered(7)]


def test_reads_end_as_their_transport_says_and_both_hear_of_an_abort(run: Run) -> None:
    run.routed.abort(3)
    assert run.near.told == run.far.told == [("abort", 3)]
    run.far.say(Landed(3, 0.1))
    assert run.events == [Landed(3, 0.1)]


def test_a_pool_that_cannot_be_lent_within_the_host_is_taken_back_from_the_network_first(run: Run) -> None:
    failed = RegisterFailed(1, "no descriptors")
    run.routed.register(1, POOL)
    run.far.say(Registered(1, b"far"))
    run.near.say(failed)
    assert run.far.told[-1] == ("deregister", 1)
    assert run.events == []
    run.far.say(Deregistered(1, b"far"))
    assert run.events == [failed]
    assert ("deregister", 1) not in run.near.told


def test_what_is_said_of_older_metadata_is_not_taken_for_an_answer(run: Run) -> None:
    run.add()
    run.near.say(PeerFailed("p", "no such socket"))
    newer = Run()
    newer.near.metadata, newer.far.metadata = b"newer", b"farther"
    run.routed.add_peer("p", newer.metadata())
    run.far.say(PeerAdded("p", b"far", "tcp/eth0"))
    run.near.say(PeerAdded("p", b"near", same_host=True))
    assert run.events == []
    run.near.say(PeerFailed("p", "still none"))
    run.far.say(PeerAdded("p", b"far", "tcp/eth0"))
    assert run.events == []
    run.far.say(PeerAdded("p", b"farther", "tcp/eth0"))
    assert run.events == [PeerAdded("p", newer.metadata(), "tcp/eth0", detour="still none")]
