import struct
import time
from collections.abc import Callable

import pytest

from kvd import limits
from kvd.transport.interface import Event, Landed, PeerAdded, PeerFailed, ReadFailed
from kvd.transport.nixl import agent_thread as module
from kvd.transport.nixl.agent_thread import AgentThread
from kvd.transport.nixl.metadata import agent_of
from kvd.transport.nixl.poll_interval import IDLE, RECENT
from kvd.transport.nixl.ucx_endpoints import UcxEndpoints
from kvd.transport.slices import CHUNK_DESCRIPTORS
from tests.transport.descriptors import Descriptors, descriptors, request
from tests.transport.scripted_nixl import FAILURES, Handle, ScriptedNixl, nixlBackendError, nixlRemoteDisconnectError


def metadata(agent: str, more: bytes = b"") -> bytes:
    return b"nixlSerDes|Agent" + struct.pack("<Q", len(agent)) + agent.encode() + b"|" + more


def slices(count: int) -> Descriptors:
    return descriptors((i * limits.SLICE_BYTES, i * limits.SLICE_BYTES, limits.SLICE_BYTES) for i in range(count))


class Run:
    """An `AgentThread` on the test's own thread: each poll of the network runs a step of a script."""

    def __init__(self) -> None:
        self.nixl = ScriptedNixl()
        self.events: list[Event] = []
        endpoints = UcxEndpoints("nobody")
        self.thread = AgentThread(self.nixl, FAILURES, endpoints, emit=self.events.append, flush=lambda: None)
        self.tell("add_peer", "p", metadata("p"))

    def tell(self, command: str, *arguments: object) -> None:
        self.thread.commands.put(lambda: getattr(self.thread, command)(*arguments))

    def read(self, read: int, what: Descriptors) -> None:
        self.tell("read", request(read, what))

    def go(self, *steps: Callable[[], object], seconds: float = 0.0) -> list[Event]:
        settle = [lambda: None] * 100
        self.nixl.script.extend([*settle, *(x for step in steps for x in (step, *settle))])
        self.nixl.script.append(lambda: self.tell("stop", seconds))
        self.thread._poll.seconds = lambda now, in_flight: 0.0  # type: ignore[method-assign]
        self.thread.run()
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
    assert run.nixl.calls == ["add", "connect", "remove", "add", "connect", "remove"]
    assert [type(event) for event in run.events] == [PeerAdded, PeerFailed, ReadFailed, PeerAdded]


def test_metadata_that_nixl_cannot_merge_is_loaded_afresh() -> None:
    run = Run()
    run.go(
        lambda: setattr(run.nixl, "refuse", nixlBackendError("other key")),
        lambda: run.tell("add_peer", "p", metadata("p", b"newer")),
    )
    assert [type(event) for event in run.events] == [PeerAdded, PeerAdded]
    assert run.nixl.calls == ["add", "connect", "add", "remove", "add", "connect", "remove"]


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
    assert agent_of(metadata("ab")) == "ab"


def test_a_stop_with_a_slice_that_hangs_leaves_the_agent_alone() -> None:
    run = Run()
    before = len(module._abandoned)
    run.tell("register", 1, 0, 4096)
    run.read(1, slices(1))
    run.go(seconds=0.01)
    assert "deregister" not in run.nixl.calls
    assert module._abandoned[before:] == [run.nixl]
    module._abandoned.pop()


def test_a_stop_waits_for_slices_and_then_takes_everything_down_in_order() -> None:
    run = Run()
    run.tell("register", 1, 0, 4096)
    run.read(1, slices(20))
    run.nixl.script.extend([lambda: None] * 310)
    run.nixl.script.append(lambda: set_all(run.nixl.transfers, "DONE"))
    run.tell("stop", 10.0)
    run.thread.run()
    assert run.nixl.calls[-2:] == ["remove", "deregister"]
    assert not run.nixl.live
    assert len(run.nixl.transfers) <= 1


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
    run.thread.commands.get()
    run.tell(command, *arguments)
    run.nixl.script.append(lambda: run.tell("stop", 0.0))
    run.thread.run()
    assert run.thread._poll.seconds(time.monotonic(), in_flight=False) == interval


@pytest.mark.parametrize(("posted", "shortens"), [("DONE", False), ("PROC", True)])
def test_a_read_shortens_the_poll_interval_only_if_it_waits_for_the_network(
    posted: str, *, shortens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    touched: list[float] = []
    monkeypatch.setattr(run.thread._poll, "touch", touched.append)
    run.nixl.immediately = posted
    run.read(1, slices(2))
    run.go(lambda: set_all(run.nixl.transfers, "DONE"))
    assert (len(touched) > 1) is shortens  # once for the connection
