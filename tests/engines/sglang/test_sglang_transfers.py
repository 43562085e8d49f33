"""The thread of transfers, without a daemon."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import zmq

from kvd.client import Done, Released
from kvd.client.events import Event
from kvd.engines.sglang.messages import Abandoned, encode
from kvd.engines.sglang.transfers import Transfers
from kvd.errors import ErrorCode, refusal
from tests.support.patience import MOMENT, PATIENCE


class Client:
    """Refuses the first cancels, and has `events`."""

    events: Sequence[Event] = ()

    def __init__(self, *codes: ErrorCode) -> None:
        self._codes = list(codes)
        self.cancelled: list[str] = []
        self.taken = threading.Event()

    def cancel(self, name: str) -> None:
        if self._codes:
            raise refusal(self._codes.pop(0), "not now")
        self.cancelled.append(name)
        self.taken.set()

    async def wait(self, seconds: float) -> Sequence[Event]:
        if not self.events:
            await asyncio.sleep(seconds)
        events, self.events = self.events, ()
        return events


class Half:
    """Fails at the first message and at the first event, and if `broken` also at giving the room up."""

    def __init__(self, *, broken: bool) -> None:
        self._broken = broken
        self.abandoned: list[tuple[int, str]] = []
        self._seen: set[type] = set()
        self.heard: list[object] = []
        self.second = threading.Event()

    def told(self, message: object) -> None:
        if type(message) not in self._seen:
            self._seen.add(type(message))
            raise RuntimeError("odd")
        self.heard.append(message)
        self.second.set()

    on_event = told

    def abandon(self, number: int, reason: str) -> None:
        self.abandoned.append((number, reason))
        if self._broken:
            raise RuntimeError("odd, too")


@pytest.fixture
def transfers() -> Iterator[Any]:
    made = Transfers()
    yield made

    async def end() -> None:
        for task in made._tasks:
            task.cancel()
        await asyncio.gather(*made._tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), made._loop).result(PATIENCE)
    made.call(made._loop.stop)
    for thread in threading.enumerate():
        if thread.name == "kvd":
            thread.join(PATIENCE)
    made._loop.close()


def test_a_cancel_that_the_full_queue_does_not_take_is_sent_again(transfers: Any) -> None:
    transfers.client = Client(ErrorCode.OVERLOADED, ErrorCode.OVERLOADED)
    transfers.call(transfers.cancel, "pull")
    assert transfers.client.taken.wait(PATIENCE)
    assert transfers.client.cancelled == ["pull"]


@pytest.mark.parametrize("code", [ErrorCode.DAEMON_LOST, ErrorCode.UNKNOWN_REQUEST])
def test_a_cancel_of_what_ends_by_itself_is_sent_once(transfers: Any, code: ErrorCode) -> None:
    transfers.client = Client(code)
    transfers.call(transfers.cancel, "pull")
    transfers.call(transfers.cancel, "another")
    assert transfers.client.taken.wait(PATIENCE)
    assert transfers.client.cancelled == ["another"]


@pytest.fixture
def control() -> Iterator[tuple[Any, Any]]:
    """The control socket, and one that sends to it."""
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://control")
    push.connect("inproc://control")
    yield pull, push
    context.destroy(linger=0)


@pytest.mark.parametrize("broken", [False, True])
def test_a_message_that_meets_a_defect_fails_its_room_and_those_behind_it_are_heard(
    control: tuple[Any, Any], transfers: Any, broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transfers.client, half = Client(), Half(broken=broken)
    transfers.serve(half, control[0])
    for room in (7, 8):
        control[1].send(encode(Abandoned(room, bytes(16), "aborted")))
    assert half.second.wait(MOMENT)
    assert half.heard == [Abandoned(8, bytes(16), "aborted")]
    assert half.abandoned == [(7, "a defect: RuntimeError('odd')")]
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("event", [Done("7#a.1"), Released("7#a.1", "read")])
def test_an_event_that_meets_a_defect_fails_its_room_and_those_behind_it_are_heard(
    control: tuple[Any, Any], transfers: Any, event: Event, caplog: pytest.LogCaptureFixture
) -> None:
    transfers.client, half = Client(), Half(broken=False)
    transfers.client.events = (event, event)
    transfers.serve(half, control[0])
    assert half.second.wait(MOMENT)
    assert half.abandoned == [(7, "a defect: RuntimeError('odd')")]
    assert "Traceback" in caplog.text


class Kernels:
    """Run once more, and then nothing is known of them."""

    def __init__(self) -> None:
        self._answers = [False]

    def query(self) -> bool:
        if self._answers:
            return self._answers.pop()
        raise RuntimeError("CUDA error")


def test_who_waits_for_kernels_of_which_nothing_is_known_any_more_is_called(transfers: Any) -> None:
    called = threading.Event()
    transfers.call(transfers.call_after, Kernels(), called.set)
    assert called.wait(MOMENT)
