"""The client without sockets, against schedules that no test over sockets would meet."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.client.core import Core
from kvd.client.events import Blocks, Cancelled, Done, Event, Failed, Freed, Released
from kvd.client.requests.calls import Kind
from kvd.client.requests.inbox import ACKNOWLEDGE_EVERY, ACKNOWLEDGE_SECONDS, GAP_SECONDS
from kvd.client.requests.pulls import GRACE_SECONDS
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.protocol import codec
from kvd.protocol import worker as wire

BLOCKS = (Blocks(0, 0, [1, 2]),)


def attached(incarnation: int = 1, tenancy: int = 1) -> wire.Attached:
    return wire.Attached(
        b"s" * 16, "ipc://x", "daemon-0", incarnation, "tcp://h:1", 4096, "plain", False, tenancy=tenancy
    )


def connected() -> Core:
    core = Core("w")
    core.on_attached(attached())
    return core


def pulling(*requests: str) -> Core:
    core = connected()
    for request in requests:
        core.pull(request, "t", BLOCKS, 100.0, now=0.0)
    return core


def batch(first: int, *items: wire.Notification) -> bytes:
    return codec.encode(wire.Notifications(first, items))


outcomes = st.sampled_from(["done", "failed", "quarantined", "cancelled"])


@settings(deadline=None)
@given(
    st.lists(outcomes, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_lost_doubled_and_reordered_batches_tell_every_outcome_exactly_once(
    kinds: list[str], deliveries: list[tuple[int, int]], losses: list[int]
) -> None:
    core = connected()
    log: list[wire.Notification] = []
    for number, kind in enumerate(kinds):
        request = f"req-{number}"
        core.pull(request, "t", BLOCKS, 30.0, now=0.0)
        match kind:
            case "done":
                log.append(wire.Done(request))
            case "failed":
                log.append(wire.Failed(request, "peer_lost", "", False))
            case "cancelled":
                log.append(wire.Cancelled(request, False))
            case _:
                log += [wire.Failed(request, "deadline", "", True), wire.Freed(request)]
    events: list[Event] = []
    acknowledged = 0
    for turn, (start, length) in enumerate(deliveries):
        if turn in losses:
            core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "hung up"))
            core.on_attached(attached())
        else:
            first = max(start, acknowledged)  # a daemon drops what was acknowledged
            core.on_frame(batch(first + 1, *log[first : first + length]), now=1.0)
        events += core.take_events()
        for frame in core.take_frames(math.inf):
            message = codec.worker_requests.decode(frame)
            if isinstance(message, wire.Acknowledge):
                assert message.sequence > acknowledged
                acknowledged = message.sequence
    core.on_frame(batch(acknowledged + 1, *log[acknowledged:]), now=2.0)
    events += core.take_events()
    told = Counter((type(event), event.request) for event in events if hasattr(event, "request"))
    assert set(told.values()) <= {1}
    ends = [event.request for event in events if isinstance(event, Done | Failed | Cancelled)]
    assert sorted(ends) == sorted(f"req-{number}" for number in range(len(kinds)))
    freed = [event.request for event in events if isinstance(event, Freed)]
    assert sorted(freed) == sorted(f"req-{number}" for number, kind in enumerate(kinds) if kind == "quarantined")


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    core = connected()
    for number in range(100):
        core.pull(f"pull-{number}", "t", BLOCKS, 30.0, now=0.0)
        core.cancel(f"pull-{number}")
        core.offer(f"offer-{number}", 10, BLOCKS, 60.0, secret=bytes(16))
        core.cancel(f"offer-{number}")
        core.on_frame(
            batch(2 * number + 1, wire.Done(f"pull-{number}"), wire.Released(f"offer-{number}", "withdrawn")), now=0.0
        )
        core.take_events()
        core.take_frames(math.inf)
    assert (len(core._calls._waiting), len(core._calls._of), len(core._pulls), len(core._offers)) == (0, 0, 0, 0)


def test_of_calls_that_were_answered_nothing_is_kept() -> None:
    core = connected()
    core.offer("o", 0, (), 60.0, secret=b"s" * 16, grows=True)
    for answer in (wire.Extended, lambda call: wire.Error(call, "bad_blocks", "not yours")):
        extend = codec.worker_requests.decode(core.extend("o", 10, BLOCKS, closes=False))
        core.on_frame(codec.encode(answer(extend.call)), now=0.0)
    assert core._calls._waiting == {1: (Kind.OFFER, "o")}
    assert core._calls._of == {"o": [1]}


@pytest.mark.parametrize("kind", ["offer", "pull", "cancel", "status"])
def test_nothing_is_kept_of_what_found_no_room(kind: str) -> None:
    core = pulling("open")
    before = (dict(core._calls._waiting), {name: list(calls) for name, calls in core._calls._of.items()})
    for _ in range(3):
        match kind:
            case "offer":
                core.offer("new", 10, BLOCKS, 60.0, secret=bytes(16))
            case "pull":
                core.pull("new", "t", BLOCKS, 30.0, now=0.0)
            case "cancel":
                core.cancel("open")
            case "status":
                core.status()
        core.not_sent()
    assert (core._calls._waiting, core._calls._of) == before
    assert (len(core._pulls), len(core._offers)) == (1, 0)


def test_acknowledgements_wait_for_more_for_a_time() -> None:
    core = pulling("a", "b")
    core.on_frame(batch(1, wire.Done("a")), now=5.0)
    core.take_events()
    assert core.next_timer == 5.0 + ACKNOWLEDGE_SECONDS
    assert core.take_frames(5.0) == []
    core.on_frame(batch(2, wire.Done("b")), now=5.0 + ACKNOWLEDGE_SECONDS / 2)
    core.take_events()
    (frame,) = core.take_frames(5.0 + ACKNOWLEDGE_SECONDS)
    assert codec.worker_requests.decode(frame) == wire.Acknowledge(2)
    assert core.next_timer > 100.0


def test_many_acknowledgements_do_not_wait() -> None:
    names = [f"req-{number}" for number in range(ACKNOWLEDGE_EVERY)]
    core = pulling(*names)
    core.on_frame(batch(1, *map(wire.Done, names)), now=5.0)
    core.take_events()
    (frame,) = core.take_frames(5.0)
    assert codec.worker_requests.decode(frame) == wire.Acknowledge(ACKNOWLEDGE_EVERY)


def test_a_notification_that_nothing_comes_of_is_acknowledged_too() -> None:
    core = connected()
    core.on_frame(batch(1, wire.Done("given-up-long-ago")), now=1.0)
    assert core.take_events() == []
    assert [codec.worker_requests.decode(frame) for frame in core.take_frames(1.0 + ACKNOWLEDGE_SECONDS)] == [
        wire.Acknowledge(1)
    ]


def test_what_the_worker_has_not_taken_is_not_acknowledged() -> None:
    core = pulling("a", "b")
    core.on_frame(batch(1, wire.Done("a")), now=5.0)
    assert core.take_frames(math.inf) == []
    assert core.next_timer > 100.0


def test_a_gap_is_lost_only_after_a_time() -> None:
    core = connected()
    core.on_frame(batch(2, wire.Done("x")), now=5.0)
    assert core.next_timer == 5.0 + GAP_SECONDS
    assert not core.lost_notifications(5.0)
    core.on_frame(batch(3, wire.Done("y")), now=5.5)
    assert core.lost_notifications(5.0 + GAP_SECONDS)


def test_a_pull_is_overdue_at_its_deadline_and_a_grace_and_not_before() -> None:
    core = connected()
    core.pull("late", "t", BLOCKS, 2.0, now=10.0)
    core.pull("later", "t", BLOCKS, 3.0, now=10.0)
    core.on_time(12.0 + GRACE_SECONDS - 0.001)
    assert core.take_events() == []
    core.on_time(12.0 + GRACE_SECONDS)
    (event,) = core.take_events()
    assert isinstance(event, Failed)
    assert (event.request, event.quarantined) == ("late", True)
    assert core.next_timer == 13.0 + GRACE_SECONDS


@pytest.mark.parametrize(
    ("word", "events"),
    [
        (wire.Done("r"), [Freed("r", BLOCKS)]),
        (wire.Failed("r", "peer_lost", "", False), [Freed("r", BLOCKS)]),
        (wire.Cancelled("r", False), [Freed("r", BLOCKS)]),
        (wire.Failed("r", "deadline", "", True), []),
        (wire.Cancelled("r", True), []),
    ],
)
def test_an_overdue_pull_is_never_told_an_outcome_again(word: wire.Notification, events: list[Event]) -> None:
    core = connected()
    core.pull("r", "t", BLOCKS, 1.0, now=0.0)
    core.on_time(10.0)
    core.take_events()
    core.on_frame(batch(1, word), now=10.0)
    assert core.take_events() == events
    if not events:
        core.on_frame(batch(2, wire.Freed("r")), now=10.0)
        assert core.take_events() == [Freed("r", BLOCKS)]


def test_a_daemon_that_is_gone_frees_quarantined_blocks() -> None:
    core = connected()
    for request in ("running", "overdue", "quarantined"):
        core.pull(request, "t", BLOCKS, 1.0 if request == "overdue" else 30.0, now=0.0)
    core.on_time(5.0)
    core.on_frame(batch(1, wire.Failed("quarantined", "deadline", "", True)), now=5.0)
    core.take_events()
    core.on_daemon_gone()
    core.on_daemon_gone()
    failed, *freed = core.take_events()
    assert isinstance(failed, Failed)
    assert (failed.request, failed.quarantined) == ("running", False)
    assert sorted(event.request for event in freed) == ["overdue", "quarantined"]


def test_a_pull_freed_before_it_ended_makes_no_sense() -> None:
    core = connected()
    core.pull("r", "t", BLOCKS, 1.0, now=0.0)
    with pytest.raises(BadRequest, match="freed the pull 'r' before it ended it"):
        core.on_frame(batch(1, wire.Freed("r")), now=0.0)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_reply_or_a_bad_request_and_end_no_pull(frame: bytes) -> None:
    core = connected()
    core.pull("r", "t", BLOCKS, 1.0, now=0.0)
    try:
        core.on_frame(frame, now=0.0)
    except BadRequest:
        assert core.take_events() == []


def unknown(core: Core, upcoming: int) -> None:
    """The daemon does not know the one request that the core asks about."""
    (frame,) = core.take_frames(0.0)
    cancel = codec.worker_requests.decode(frame)
    assert isinstance(cancel, wire.Cancel)
    core.on_frame(codec.encode(wire.Error(cancel.call, "unknown_request", "", upcoming)), now=10.0)


def test_an_overdue_pull_that_the_daemon_does_not_know_is_freed_without_asking_anything_more() -> None:
    core = connected()
    core.pull("r", "t", BLOCKS, 1.0, now=0.0)
    core.on_time(10.0)
    core.take_events()
    unknown(core, upcoming=1)
    assert core.take_events() == [Freed("r", BLOCKS)]
    assert core.take_frames(20.0) == []


def test_a_refusal_without_the_sequence_frees_nothing_until_a_later_session_gives_it() -> None:
    core = connected()
    core.pull("r", "t", BLOCKS, 1.0, now=0.0)
    core.on_time(10.0)
    core.take_events()
    unknown(core, upcoming=0)
    assert core.take_events() == []
    core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "lost"))
    core.on_attached(attached())
    core.take_events()
    unknown(core, upcoming=1)
    assert core.take_events() == [Freed("r", BLOCKS)]


def test_the_end_of_an_offer_whose_answer_was_lost_does_not_count_for_the_next_of_its_name() -> None:
    core = connected()
    core.offer("o", 10, BLOCKS, 60.0, secret=bytes(16))
    core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "lost"))
    core.on_attached(attached())
    core.take_events()
    unknown(core, upcoming=2)
    assert core.take_events() == []  # its `Released` is on the way
    with pytest.raises(BadRequest, match="names an open pull or offer"):
        core.offer("o", 10, BLOCKS, 60.0, secret=bytes(16))
    core.on_frame(batch(1, wire.Released("o", "expired")), now=10.0)
    assert [type(event) for event in core.take_events()] == [Released]
    core.offer("o", 10, BLOCKS, 60.0, secret=bytes(16))


def test_notifications_behind_one_that_makes_no_sense_are_taken_when_they_come_again() -> None:
    core = pulling("a", "b")
    with pytest.raises(BadRequest) as caught:
        core.on_frame(batch(1, wire.Freed("a"), wire.Done("b")), now=0.0)
    core.on_disconnected(caught.value)
    core.on_attached(attached())
    core.take_events()
    core.on_frame(batch(1, wire.Freed("a"), wire.Done("b")), now=0.0)
    assert core.take_events() == [Done("b")]


def test_what_was_cancelled_is_cancelled_again_in_the_next_session_unless_it_has_ended() -> None:
    core = pulling("pull", "ended", "wanted")
    core.offer("offer", 4, BLOCKS, 3600.0, secret=bytes(16))
    core.on_frame(codec.encode(wire.Offered(4, "t")), now=0.0)
    for request in ("pull", "ended", "offer"):
        core.cancel(request)
    core.on_frame(batch(1, wire.Cancelled("ended", False)), now=0.0)
    for _ in range(2):
        core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "hung up"))
        core.on_attached(attached())
        sent = [codec.worker_requests.decode(frame) for frame in core.take_frames(0.0)]
        assert [message.request for message in sent if isinstance(message, wire.Cancel)] == ["pull", "offer"]


def test_what_comes_again_is_acknowledged_again() -> None:
    core = pulling("a", "b")
    core.on_frame(batch(1, wire.Done("a"), wire.Done("b")), now=5.0)
    core.take_events()
    assert len(core.take_frames(6.0)) == 1  # lost with the session
    core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "lost"))
    core.on_attached(attached())
    core.on_frame(batch(1, wire.Done("a"), wire.Done("b")), now=7.0)
    assert not any(isinstance(event, Done) for event in core.take_events())
    (frame,) = core.take_frames(8.0)
    assert codec.worker_requests.decode(frame) == wire.Acknowledge(2)
    assert core.take_frames(9.0) == []


@pytest.mark.parametrize("again", [attached(2), attached(1, tenancy=2)], ids=["incarnation", "tenancy"])
def test_a_new_incarnation_or_tenancy_starts_its_sequence_anew(again: wire.Attached) -> None:
    core = connected()
    core.offer("first", 10, BLOCKS, 60.0, secret=bytes(16))
    core.on_frame(batch(1, wire.Released("first", "read")), now=0.0)
    core.take_events()
    core.on_disconnected(Unavailable(ErrorCode.DAEMON_LOST, "died"))
    core.on_attached(again)
    core.offer("second", 10, BLOCKS, 60.0, secret=bytes(16))
    core.take_events()
    core.on_frame(batch(1, wire.Released("second", "read")), now=0.0)
    assert core.take_events() == [Released("second", "read")]
