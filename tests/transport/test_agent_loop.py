import ctypes
import os
import resource
import struct
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvd import limits
from kvd.memory.mapping import Mapping
from kvd.memory.memfd import MemfdProvider
from kvd.transport.interface import (
    Answered,
    Deregistered,
    Described,
    Event,
    Landed,
    Notified,
    PeerAdded,
    PeerFailed,
    ReadFailed,
    Registered,
)
from kvd.transport.nixl import messages
from kvd.transport.nixl.agent_loop import AgentLoop, Command
from kvd.transport.nixl.messages import Metadata, agent_of, encode
from kvd.transport.nixl.poll_interval import IDLE, RECENT
from kvd.transport.nixl.ucx import UcxEndpoints
from kvd.transport.slices import CHUNK_DESCRIPTORS
from tests.support.descriptors import no_descriptors_left
from tests.transport.descriptors import Descriptors, descriptors, request
from tests.transport.scripted_nixl import FAILURES, Handle, ScriptedNixl, nixlBackendError, nixlRemoteDisconnectError


def nixl_metadata(agent: str, more: bytes = b"") -> bytes:
    return b"nixlSerDes|Agent" + struct.pack("<Q", len(agent)) + agent.encode() + b"|" + more


def metadata(agent: str, more: bytes = b"", process: bytes = b"process1") -> bytes:
    """Of an agent whose daemon has a pool at 0, which is where it is in its process, too."""
    return encode(Metadata(nixl_metadata(agent, more), process, {0: 0}))


def slices(count: int) -> Descriptors:
    return descriptors((i * limits.SLICE_BYTES, i * limits.SLICE_BYTES, limits.SLICE_BYTES) for i in range(count))


class Run:
    """An `AgentLoop`: each poll of the network runs a step of a script."""

    def __init__(self) -> None:
        self.nixl = ScriptedNixl()
        self.events: list[Event] = []
        endpoints = UcxEndpoints("nobody")
        self.queue: list[Command] = []
        self.over = False
        self.loop = AgentLoop(
            self.nixl, FAILURES, endpoints, commands=self._commands, emit=self.events.append, flush=lambda: None
        )
        self.loop._addresses[0] = 0
        self.tell("add_peer", "p", metadata("p"))

    def _commands(self, _seconds: float) -> list[Command] | None:
        if self.over:
            return None
        commands, self.queue = self.queue, []
        return commands

    def tell(self, command: str, *arguments: object) -> None:
        self.queue.append(lambda: getattr(self.loop, command)(*arguments))

    def end(self) -> None:
        """The daemon ends."""
        self.over = True

    def read(self, read: int, what: Descriptors) -> None:
        self.tell("read", request(read, what))

    def go(self, *steps: Callable[[], object]) -> list[Event]:
        settle = [lambda: None] * 100
        self.nixl.script.extend([*settle, *(x for step in steps for x in (step, *settle))])
        self.nixl.script.append(self.end)
        self.loop._poll.seconds = lambda now, in_flight: 0.0  # type: ignore[method-assign]
        self.loop.run()
        return self.events

    def ends(self, read: int) -> list[Event]:
        return [event for event in self.events if isinstance(event, Landed | ReadFailed) and event.read == read]


def set_all(handles: list[Handle], state: str | Exception) -> None:
    for handle in handles:
        handle.state = state


def test_a_read_lands_when_all_its_slices_are_done() -> None:
    run = Run()
    run.read(1, slices(3))
    transfers = run.nixl.transfers
    seen: list[int] = []
    run.go(
        lambda: set_all(transfers[:2], "DONE"),
        lambda: seen.append(len(run.ends(1))),
        lambda: set_all(transfers, "DONE"),
    )
    assert seen == [0]
    assert [type(event) for event in run.events] == [PeerAdded, Landed]
    assert not run.nixl.live


def test_an_aborted_read_stays_open_while_a_posted_slice_may_still_write() -> None:
    run = Run()
    run.read(1, slices(64))
    seen: list[int] = []
    run.go(
        lambda: run.tell("abort", 1),
        lambda: seen.append(len(run.ends(1))),
        lambda: set_all(run.nixl.transfers[1:], "DONE"),
        lambda: seen.append(len(run.ends(1))),
        lambda: set_all(run.nixl.transfers, "DONE"),
    )
    assert seen == [0, 0]
    assert run.ends(1) == [ReadFailed(1, "aborted", aborted=True)]
    assert len(run.nixl.transfers) == limits.MAX_BYTES_IN_FLIGHT // limits.SLICE_BYTES


def test_a_failed_slice_counts_as_posted_until_its_handle_can_be_released() -> None:
    run = Run()
    run.read(1, slices(1))
    seen: list[int] = []

    def fail_and_hold() -> None:
        run.nixl.transfers[0].held = True
        run.nixl.transfers[0].state = nixlBackendError("x")

    run.go(
        fail_and_hold,
        lambda: seen.append(len(run.ends(1))),
        lambda: setattr(run.nixl.transfers[0], "held", False),
    )
    assert seen == [0]
    assert run.ends(1) == [ReadFailed(1, "nixlBackendError: x")]


def test_a_post_that_raises_fails_the_read_with_the_name_of_the_exception() -> None:
    run = Run()
    run.nixl.immediately = nixlBackendError("no route")
    run.read(1, slices(3))
    run.go()
    assert run.ends(1) == [ReadFailed(1, "nixlBackendError: no route")]
    assert not [event for event in run.events if isinstance(event, PeerFailed)]


def test_a_disconnect_fails_the_peer_once_and_each_of_its_reads_once() -> None:
    run = Run()
    for read in range(5):
        run.read(read, slices(2))
    run.go(lambda: set_all(run.nixl.transfers, nixlRemoteDisconnectError("gone")))
    assert len([event for event in run.events if isinstance(event, PeerFailed)]) == 1
    for read in range(5):
        (end,) = run.ends(read)
        assert isinstance(end, ReadFailed)
        assert "nixlRemoteDisconnectError" in end.reason
    assert run.nixl.calls == ["add", "connect", "remove"]
    assert not run.nixl.live


def test_a_disconnect_ends_no_read_that_has_a_slice_in_flight() -> None:
    run = Run()
    run.read(1, slices(2))
    seen: list[int] = []
    run.go(
        lambda: set_all(run.nixl.transfers[:1], nixlRemoteDisconnectError("gone")),
        lambda: seen.append(len(run.ends(1))),
        lambda: set_all(run.nixl.transfers[1:], nixlRemoteDisconnectError("gone")),
    )
    assert seen == [0]
    assert len(run.ends(1)) == 1


def test_a_lost_peer_is_added_again_only_when_its_reads_have_ended() -> None:
    run = Run()
    run.read(1, slices(2))
    added: list[int] = []
    run.go(
        lambda: set_all(run.nixl.transfers[:1], nixlRemoteDisconnectError("gone")),
        lambda: run.tell("add_peer", "p", metadata("p")),
        lambda: added.append(run.nixl.calls.count("add")),
        lambda: set_all(run.nixl.transfers, "DONE"),
    )
    assert added == [1]
    assert run.nixl.calls == ["add", "connect", "remove", "add", "connect"]
    assert [type(event) for event in run.events] == [PeerAdded, PeerFailed, ReadFailed, PeerAdded]


def test_metadata_that_nixl_cannot_merge_is_loaded_afresh() -> None:
    run = Run()
    run.go(
        lambda: setattr(run.nixl, "refuse", nixlBackendError("other key")),
        lambda: run.tell("add_peer", "p", metadata("p", b"newer")),
    )
    assert [type(event) for event in run.events] == [PeerAdded, PeerAdded]
    assert run.nixl.calls == ["add", "connect", "add", "remove", "add", "connect"]


def test_metadata_of_a_peers_next_process_is_loaded_afresh_once_the_reads_of_the_last_one_have_ended() -> None:
    run = Run()
    run.read(1, slices(1))
    run.go(
        lambda: run.tell("add_peer", "p", metadata("p", process=b"process2")),
        lambda: set_all(run.nixl.transfers, nixlBackendError("gone")),
    )
    assert run.nixl.calls == ["add", "connect", "remove", "add", "connect"]
    assert [type(event) for event in run.events] == [PeerAdded, ReadFailed, PeerAdded]


@pytest.mark.parametrize(("here", "there", "whose"), [(8, 0, "we have"), (0, 8, "agent 'p' announced")])
def test_a_read_at_an_address_that_no_pool_has_fails_and_names_it(here: int, there: int, whose: str) -> None:
    run = Run()
    run.tell("read", replace(request(1, slices(1)), local_base=here, remote_base=there))
    run.go()
    assert run.ends(1) == [ReadFailed(1, f"{whose} no pool at 0x8")]
    assert not run.nixl.transfers


def test_a_pool_lies_elsewhere_than_in_the_daemon_and_its_place_reads_as_zeros_once_it_has_ended() -> None:
    run = Run()
    pool = MemfdProvider().allocate("pool", 4096)
    os.pwrite(pool.descriptor, b"bytes", 0)
    mapping = Mapping(pool.descriptor, pool.length)
    run.tell("register", 1, pool.base, pool.size, mapping, False)
    run.tell("deregister", 1)
    run.queue.pop(0)
    run.nixl.script.append(lambda: None)
    run.go()
    registered, deregistered = run.events
    assert isinstance(registered, Registered)
    assert isinstance(deregistered, Deregistered)
    known, left = messages.metadata(registered.metadata), messages.metadata(deregistered.metadata)
    assert known is not None
    assert left is not None
    assert known.addresses == {pool.base: mapping.base}
    assert left.addresses == {}
    assert mapping.base != pool.base
    assert ctypes.string_at(mapping.base, 5) == bytes(5)
    pool.close()


def test_no_metadata_tells_of_memory_that_is_hidden() -> None:
    run = Run()
    pools = [MemfdProvider().allocate("pool", 4096) for _ in range(2)]
    shown, hidden = (Mapping(pool.descriptor, pool.length) for pool in pools)
    run.tell("register", 1, pools[0].base, 4096, shown, False)
    run.tell("register", 2, pools[1].base, 4096, hidden, True)
    run.queue.pop(0)
    run.nixl.script.append(lambda: None)
    run.go()
    for event in run.events:
        assert isinstance(event, Registered)
        known = messages.metadata(event.metadata)
        assert known is not None
        assert known.addresses == {pools[0].base: shown.base}
        assert known.nixl == f"metadata of {[[shown.base, 4096, 0]]}".encode()
    for pool in pools:
        pool.close()


def test_who_may_read_nothing_is_told_how_to_connect_and_of_no_memory() -> None:
    run = Run()
    run.tell("describe", (7,))
    run.queue.pop(0)
    run.nixl.script.append(lambda: None)
    run.go()
    [described] = run.events
    assert isinstance(described, Described)
    known = messages.metadata(described.metadata)
    assert known is not None
    assert (known.nixl, known.addresses) == (b"metadata", {})


def test_metadata_of_another_agent_never_reaches_nixl() -> None:
    run = Run()
    run.tell("add_peer", "q", metadata("p", b"forged"))
    run.go()
    assert run.nixl.calls.count("add") == 1
    assert isinstance(run.events[1], PeerFailed)


@pytest.mark.parametrize(
    "damaged", [b"", b"nixlSerDes|Agent", b"nixlSerDes|Agent\xff\xff\xff\xff\xff\xff\xff\xffab", b"x" * 99]
)
def test_damaged_metadata_names_no_agent_that_is_asked_for(damaged: bytes) -> None:
    assert agent_of(damaged) in (None, "ab")
    assert agent_of(nixl_metadata("ab")) == "ab"


def test_a_defect_escapes_the_loop() -> None:
    run = Run()
    run.tell("deregister", 99)
    with pytest.raises(KeyError):
        run.go()


def test_the_lists_of_a_long_read_are_released_as_it_goes_on() -> None:
    run = Run()
    run.nixl.immediately = "DONE"
    most: list[int] = []
    run.nixl.on_transfer = lambda: most.append(len(run.nixl.live))
    run.read(1, descriptors((2 * i, 2 * i, 1) for i in range(5 * CHUNK_DESCRIPTORS)))
    run.go()
    assert max(most) == 3, "one chunk's two lists and the handle of a slice"
    assert not run.nixl.live


@pytest.mark.parametrize(
    ("command", "arguments", "interval"), [("ping", (1,), IDLE), ("expect_connection", (), RECENT)]
)
def test_a_connection_shortens_the_poll_interval_and_the_watchdogs_ping_does_not(
    command: str, arguments: tuple[int, ...], interval: float
) -> None:
    run = Run()
    run.queue.clear()
    run.tell(command, *arguments)
    run.nixl.script.append(run.end)
    run.loop.run()
    assert run.loop._poll.seconds(time.monotonic(), in_flight=False) == interval


def test_a_ping_is_answered_with_whether_most_descriptors_are_in_use() -> None:
    run = Run()
    run.loop.ping(1)
    with no_descriptors_left():
        run.loop.ping(2)
        most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, hard))  # one is free
        run.loop.ping(3)
    assert run.events == [Answered(1), Answered(2, crowded=True), Answered(3, crowded=True)]


@pytest.mark.parametrize(("posted", "shortens"), [("DONE", False), ("PROC", True)])
def test_a_read_shortens_the_poll_interval_only_if_it_waits_for_the_network(
    posted: str, *, shortens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    touched: list[float] = []
    monkeypatch.setattr(run.loop._poll, "touch", touched.append)
    run.nixl.immediately = posted
    run.read(1, slices(2))
    run.go(lambda: set_all(run.nixl.transfers, "DONE"))
    assert (len(touched) > 1) is shortens  # once for the connection


def test_messages_of_agents_are_passed_on_unless_they_are_too_long_or_too_many():
    run = Run()
    many = [bytes([number]) for number in range(200)]
    run.nixl.messages = [{"p": [b"x" * (limits.MAX_NOTIFICATION_BYTES + 1), b"fits"]}, {"p": many, "q": many}]
    heard = [event for event in run.go() if isinstance(event, Notified)]
    assert heard[0] == Notified("p", b"fits")
    assert [event.agent for event in heard[1:]] == ["p"] * 200 + ["q"] * (limits.MAX_NOTIFICATIONS_AT_ONCE - 200)


def test_messages_under_names_that_no_agent_has_are_dropped_and_each_look_at_them_makes_a_frame_of_its_own():
    """Whoever sends them chooses the names: a frame that is too long would end this process, and the daemon's reads."""
    run, frames = Run(), []
    run.loop._flush = lambda: frames.append(len(run.events))
    run.nixl.messages = [{"x" * (limits.MAX_AGENT_BYTES + 1): [b"long"], "p": [b"1"]}, {"p": [b"2"]}]
    heard = [event for event in run.go() if isinstance(event, Notified)]
    assert heard == [Notified("p", b"1"), Notified("p", b"2")]
    assert {run.events.index(event) + 1 for event in heard} <= set(frames)


def test_messages_to_a_peer_are_sent_and_those_to_others_or_lost_ones_are_not():
    run = Run()
    run.tell("notify", "p", b"hello")
    run.tell("notify", "stranger", b"hello")
    run.go()
    assert run.nixl.sent == [("p", b"hello")]
