import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import InternalError
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Event,
    Landed,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    ReadRequest,
    Registered,
    RegisterFailed,
)
from kvd.transport.striped import StripedTransport, cut_in_stripes
from tests.conformance.contract import CHECKS, Contract
from tests.support.fake_fabric import FakeFabric, Fault
from tests.support.fake_transport import FakeTransport
from tests.transport.descriptors import descriptors, request
from tests.transport.test_fabric import VirtualLoop
from tests.transport.test_fake import FakeSite

LONG = 4 * limits.SLICE_BYTES


class StripedSite(FakeSite):
    def transport(self) -> StripedTransport:
        return StripedTransport([FakeTransport(next(self._names), self._fabric) for _ in range(3)])


@pytest.mark.parametrize("direct", [False, True], ids=["cut", "shared"])
@pytest.mark.parametrize("check", CHECKS)
async def test_three_stripes_keep_the_contract(check: str, direct: bool) -> None:
    await Contract(StripedSite(direct=direct)).run(check)


rows = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 40_000)), min_size=1, max_size=50
)


@given(rows, st.integers(1, 5))
def test_stripes_move_every_byte_once_in_shares_that_differ_by_a_page_at_most(
    wanted: list[tuple[int, int, int]], count: int
) -> None:
    total = sum(size for *_, size in wanted)
    if not total:
        return
    parts = list(cut_in_stripes(descriptors(wanted), count))
    assert len(parts) <= count
    moved = [
        (int(src), int(dst), int(length))
        for part in parts
        for src, dst, length in zip(part.src, part.dst, part.length, strict=True)
        if length
    ]
    assert _joined(moved) == _joined([row for row in wanted if row[2]])
    assert all(abs(part.bytes - total / count) <= 4096 for part in parts) or total < 4096 * count


def _joined(moved: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours that are adjacent on both sides made one."""
    out: list[tuple[int, int, int]] = []
    for src, dst, length in moved:
        if out and out[-1][0] + out[-1][2] == src and out[-1][1] + out[-1][2] == dst:
            out[-1] = (*out[-1][:2], out[-1][2] + length)
        else:
            out.append((src, dst, length))
    return out


class Scripted:
    """A transport that says what the test makes it say."""

    def __init__(self, agent: str) -> None:
        self.agent, self.metadata = agent, f"metadata of {agent}".encode()
        self.told: list[tuple[Any, ...]] = []
        self.say: Callable[[Event], None]

    def start(self, on_event: Callable[[Event], None]) -> None:
        self.say = on_event

    def __getattr__(self, command: str) -> Callable[..., None]:
        return partial(self._note, command)

    def _note(self, command: str, *arguments: object) -> None:
        self.told.append((command, *arguments))

    def commands(self) -> list[object]:
        return [command for command, *_ in self.told]

    def reads(self) -> list[object]:
        return [arguments[0].read for command, *arguments in self.told if command == "read"]


class Two:
    def __init__(self) -> None:
        self.stripes = Scripted("a"), Scripted("b")
        self.events: list[Event] = []
        self.whole = StripedTransport(self.stripes)
        self.whole.start(self.events.append)

    def both(self, event: Event) -> None:
        for stripe in self.stripes:
            stripe.say(event)

    def read(self, number: int, size: int = LONG) -> None:
        self.whole.read(request(number, descriptors([(0, 0, size)]), "peer"))


@pytest.fixture
def two() -> Two:
    made = Two()
    made.whole.add_peer("peer", b"theirs")
    return made


def test_peers_get_the_first_agents_name_and_metadata(two: Two) -> None:
    assert (two.whole.agent, two.whole.metadata) == ("a", b"metadata of a")
    two.whole.expect_connection()
    two.whole.expect_readers(True)
    assert {("expect_connection",), ("expect_readers", True)} <= set(two.stripes[0].told)
    assert {"expect_connection", "expect_readers"}.isdisjoint(two.stripes[1].commands())


def test_what_goes_to_all_stripes_is_answered_when_all_have_answered(two: Two) -> None:
    two.whole.register(1, 4096, 8192)
    two.whole.ping(5)
    two.whole.deregister(2)
    said = [PeerAdded("peer", "cma/memory"), Registered(1, b"x"), Answered(5), Deregistered(2, b"x")]
    for event in said:
        two.stripes[1].say(event)
    assert two.events == []
    for event in said:
        two.stripes[0].say(event)
    assert ("add_peer", "peer", b"theirs", "cma/memory") in two.stripes[1].told
    assert two.events == [
        PeerAdded("peer", "cma/memory"),
        Registered(1, b"metadata of a"),
        Answered(5),
        Deregistered(2, b"metadata of a"),
    ]


def test_memory_that_one_stripe_cannot_register_is_registered_with_none(two: Two) -> None:
    two.whole.register(1, 4096, 8192)
    two.stripes[0].say(Registered(1, b"x"))
    two.stripes[1].say(RegisterFailed(1, "too much"))
    assert two.events == [RegisterFailed(1, "too much")]
    assert two.stripes[0].commands()[-1] == "deregister"
    two.stripes[0].say(Deregistered(1, b"x"))
    assert len(two.events) == 1


def test_a_long_read_ends_with_its_last_part(two: Two) -> None:
    two.read(1)
    two.stripes[0].say(Landed(1, 2.0, in_post=True))
    assert two.events == []
    two.stripes[1].say(Landed(1, 3.0, in_post=False))
    assert two.events == [Landed(1, 3.0, in_post=False)]


@pytest.mark.parametrize(("first", "second", "whole"), [(7, 7, 7), (7, 8, 0), (7, 0, 0)])
def test_the_stamp_of_a_read_is_what_all_its_parts_found(two: Two, first: int, second: int, whole: int) -> None:
    two.read(1)
    two.stripes[0].say(Landed(1, 1.0, stamp=first))
    two.stripes[1].say(Landed(1, 1.0, stamp=second))
    ended = two.events[-1]
    assert isinstance(ended, Landed)
    assert ended.stamp == whole


def test_slices_of_a_peer_on_this_host_go_to_whichever_stripe_is_free(two: Two) -> None:
    two.both(PeerAdded("peer", "cma/memory"))
    two.events.clear()
    two.read(2)
    shared = [told[-1] for command, *told in (stripe.told[-1] for stripe in two.stripes) if command == "read_share"]
    assert len(shared) == 2
    assert shared[0] is shared[1]
    two.stripes[0].say(Landed(2, 1.0, in_post=True, stamp=7))
    two.stripes[1].say(Landed(2, 0.0))
    assert two.events[-1] == Landed(2, 1.0, in_post=True, stamp=7)
    two.both(PeerAdded("peer", "cma/memory rc_mlx5/mlx5_0:1"))
    two.read(3)
    assert [stripe.commands()[-1] for stripe in two.stripes] == ["read", "read"]


def test_a_part_that_fails_aborts_the_others_and_the_read_ends_with_the_last_of_them(two: Two) -> None:
    two.read(1)
    two.stripes[0].say(ReadFailed(1, "broken"))
    assert two.events == []
    assert two.stripes[1].told[-1] == ("abort", 1)
    two.stripes[1].say(Landed(1, 1.0))
    assert two.events == [ReadFailed(1, "broken")]


def test_short_reads_go_whole_to_the_stripe_with_the_fewest_bytes_open(two: Two) -> None:
    for number in (1, 2, 3):
        two.read(number, 16 * limits.KIB * number)
    assert [stripe.reads() for stripe in two.stripes] == [[1, 3], [2]]
    two.stripes[1].say(Landed(2, 1.0))
    two.read(4, 16 * limits.KIB)
    assert two.stripes[1].reads() == [2, 4]


def test_the_first_stripe_to_lose_a_peer_loses_it_for_all(two: Two) -> None:
    two.stripes[1].say(PeerFailed("peer", "hung up"))
    assert two.events == [PeerFailed("peer", "hung up")]
    assert two.stripes[0].told[-1] == ("remove_peer", "peer")
    two.stripes[0].say(PeerFailed("peer", "hung up here, too"))
    two.stripes[0].say(PeerAdded("peer"))
    assert len(two.events) == 1


def test_a_read_asked_for_twice_is_a_defect(two: Two) -> None:
    two.read(1)
    with pytest.raises(InternalError, match="read 1 was asked for twice"):
        two.read(1)


def test_a_stuck_stripe_keeps_the_whole_read_open_until_it_is_healed() -> None:
    loop = VirtualLoop()
    fabric = FakeFabric(loop, random.Random(1))  # noqa: S311
    source, memory = np.full(LONG, 7, np.uint8), np.zeros(LONG, np.uint8)
    producer = FakeTransport("p", fabric)
    reader = StripedTransport([FakeTransport("d", fabric), FakeTransport("d.1", fabric)])
    events: list[Event] = []
    producer.start(lambda _event: None)
    reader.start(events.append)
    remote, local = fabric.map(source), fabric.map(memory)
    producer.register(1, remote, LONG)
    reader.register(1, local, LONG)
    loop.run()
    reader.add_peer("p", producer.metadata)
    loop.run()
    fabric.fault_next_read("d.1", Fault(stuck=True))
    reader.read(ReadRequest(1, "p", local, remote, descriptors([(0, 0, LONG)])))
    loop.run(3600)
    assert memory[0] == 7
    assert not [event for event in events if isinstance(event, Landed | ReadFailed)]
    fabric.heal()
    loop.run(3600)
    assert isinstance(events[-1], Landed)
    assert memory.all()


class Examiner:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, bytes]] = []
        self.say: list[Callable[[str], None]] = []

    def __call__(self, known: bytes, metadata: bytes, done: Callable[[str], None]) -> None:
        self.asked.append((known, metadata))
        self.say.append(done)


class Examined:
    def __init__(self) -> None:
        self.stripes = Scripted("a"), Scripted("b")
        self.examiner = Examiner()
        self.events: list[Event] = []
        self.whole = StripedTransport(self.stripes, self.examiner)
        self.whole.start(self.events.append)

    def added(self) -> list[object]:
        return [told for told in self.stripes[0].told if told[0] == "add_peer"]


def test_metadata_reaches_a_stripe_when_no_fault_was_found_with_it() -> None:
    run = Examined()
    run.whole.add_peer("peer", b"theirs")
    assert run.added() == []
    run.examiner.say[0]("")
    assert run.added() == [("add_peer", "peer", b"theirs")]
    run.whole.add_peer("peer", b"theirs")
    assert len(run.examiner.asked) == 1  # the same is not examined twice
    run.whole.add_peer("peer", b"newer")
    assert run.examiner.asked == [(b"", b"theirs"), (b"theirs", b"newer")]


def test_metadata_with_a_fault_fails_its_peer_which_all_stripes_forget() -> None:
    run = Examined()
    run.whole.add_peer("peer", b"theirs")
    run.examiner.say[0]("")
    run.whole.add_peer("peer", b"newer")
    run.examiner.say[1]("it ended the process")
    assert run.events == [PeerFailed("peer", "it ended the process")]
    assert all(stripe.told[-1] == ("remove_peer", "peer") for stripe in run.stripes)


def test_what_is_said_of_metadata_that_is_not_the_latest_or_of_a_peer_removed_meanwhile_is_not_heard() -> None:
    run = Examined()
    run.whole.add_peer("peer", b"theirs")
    run.whole.add_peer("peer", b"newer")
    run.examiner.say[0]("bad")
    run.whole.remove_peer("peer")
    run.examiner.say[1]("")
    assert (run.events, run.added()) == ([], [])


def test_metadata_that_a_second_link_brings_while_it_is_examined_reaches_no_stripe_before_that_is_over() -> None:
    run = Examined()
    run.whole.add_peer("peer", b"theirs")
    run.whole.add_peer("peer", b"theirs")
    assert run.added() == []
    run.examiner.say[-1]("it ended the process")
    run.examiner.say[0]("it ended the process")
    assert run.added() == []
    assert run.events == [PeerFailed("peer", "it ended the process")]


def test_a_late_answer_about_a_peers_earlier_metadata_leads_none_that_is_being_examined_to_a_stripe() -> None:
    run = Examined()
    run.whole.add_peer("peer", b"theirs")
    run.examiner.say[0]("")
    run.whole.remove_peer("peer")
    run.whole.add_peer("peer", b"other")
    run.stripes[0].say(PeerAdded("peer"))
    assert "add_peer" not in run.stripes[1].commands()
    run.examiner.say[1]("")
    run.stripes[0].say(PeerAdded("peer"))
    assert run.stripes[1].told[-1] == ("add_peer", "peer", b"other", "")
