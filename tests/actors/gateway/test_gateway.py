import base64

import pytest

from kvd import limits
from kvd.actors.gateway.admission import Rule
from kvd.actors.runtime.actor import call
from kvd.errors import ErrorCode
from kvd.protocol.status import decode
from kvd.protocol.types import Span
from kvd.protocol.worker import (
    Acknowledge,
    Attach,
    Attached,
    Cancel,
    Detach,
    Detached,
    End,
    Error,
    Offer,
    Offered,
    Pull,
    Refused,
    Status,
    StatusRequest,
)
from tests.actors.scheduler.pulling import start_reading
from tests.actors.stage import CACHE, Stage, ids, make_ticket


@pytest.fixture
def stage():
    stage = Stage()
    stage.attach()
    return stage


def refusal(replies):
    [reply] = replies
    assert isinstance(reply, Error)
    return reply


def test_a_worker_gets_its_pool_and_a_session(stage):
    [attached] = stage.on_sessions
    assert isinstance(attached, Attached)
    assert attached.session == b"\1" * 16
    assert attached.pool_bytes == CACHE.spec.pool_bytes
    assert not attached.kept


def test_a_worker_whose_pool_is_on_a_gpu_learns_which_and_how_much_to_map():
    stage = Stage()
    stage.memory.device, stage.memory.length = "GPU-1", 1 << 21
    stage.attach()
    [attached] = stage.on_sessions
    assert (attached.device, attached.pool_length) == ("GPU-1", 1 << 21)


def test_a_frame_without_a_session_is_refused(stage):
    reply = refusal(stage.request(StatusRequest(9), session=b"nobody"))
    assert reply.code == ErrorCode.NOT_ATTACHED


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa4pull", b"\x91\xa7unknown", b"\xff" * 100])
def test_garbage_is_refused_with_call_0(stage, frame):
    reply = refusal(stage.request(frame))
    assert (reply.call, reply.code) == (0, ErrorCode.BAD_MESSAGE)


def test_a_frame_above_the_bound_is_refused(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_MESSAGE_BYTES", 1000)
    assert refusal(stage.request(b"x" * 1001)).code == ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ((Span(0, 0, ids(8)),), "block id 8"),
        ((Span(0, 0, ids(0, 4_000_000_000)),), "block id 4000000000"),
        ((Span(1, 0, ids(1)),), "group 1"),
        ((Span(0, 0, ids(1)), Span(0, 1, ids(2))), "group 0 is named"),
        ((Span(0, 0, b"\1\0\0"),), "3 bytes"),
    ],
)
def test_blocks_of_no_own_pool_are_refused(stage, spans, text):
    for request in (Offer(3, "o", 4, spans, 1.0, bytes(16)), Pull(3, "p", make_ticket(), spans, 1.0)):
        reply = refusal(stage.request(request))
        assert (reply.call, reply.code) == (3, ErrorCode.BAD_BLOCKS)
        assert text in reply.text


def test_too_many_blocks_are_refused(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BLOCKS_PER_REQUEST", 2)
    assert refusal(stage.offer(blocks=(0, 1, 2))).code == ErrorCode.TOO_LARGE


@pytest.mark.parametrize("text", ["", "kvd2.abc", "kvd1.", "kvd1.!!!", "kvd1.AAAA", "kvd1." + "ö"])
def test_text_that_is_no_ticket_is_refused(stage, text):
    assert refusal(stage.pull(ticket=text)).code == ErrorCode.BAD_TICKET


def test_a_ticket_of_arrays_in_arrays_is_refused(stage):
    packed = bytearray(base64.urlsafe_b64decode(make_ticket()[5:] + "=="))
    packed[0] += 1  # one more element, which a reader skips
    deep = base64.urlsafe_b64encode(bytes(packed) + b"\x91" * 100_000 + b"\xc0").decode().rstrip("=")
    assert refusal(stage.pull(ticket="kvd1." + deep)).code == ErrorCode.BAD_TICKET


@pytest.mark.parametrize("timeout", [0.0, 0.0001])
def test_a_pull_needs_time(stage, timeout):
    reply = refusal(stage.pull(timeout=timeout))
    assert reply.code == ErrorCode.BAD_MESSAGE
    assert "timeout" in reply.text


def test_an_unknown_request_cannot_be_cancelled(stage):
    assert refusal(stage.request(Cancel(4, "nothing"))).code == ErrorCode.UNKNOWN_REQUEST


def test_a_status_has_a_section_of_every_actor(stage):
    [status] = stage.request(StatusRequest(5))
    assert isinstance(status, Status)
    report = decode(status.report)
    assert report.daemon == "d"
    assert report.workers == ["w"]
    assert report.worker_pids.keys() == {"w"}
    assert {actor.name for actor in stage.actors.all} - {"gateway"} <= set(report.__struct_fields__)


# --- sessions


def test_a_session_of_another_version_is_refused(stage):
    stage.connect(2)
    refused = stage.session(Attach("v", b"i" * 16, CACHE.raw, 2), 2, (11,))
    assert (type(refused), refused.code) == (Refused, ErrorCode.BAD_VERSION)
    assert stage.discarded == [11]


def test_garbage_on_a_session_is_refused_and_its_descriptors_closed(stage):
    stage.connect(2)
    assert stage.session(b"\xc1", 2, (11, 12)).code == ErrorCode.BAD_MESSAGE
    assert stage.discarded == [11, 12]


def test_bytes_that_are_no_spec_are_refused(stage):
    stage.connect(2)
    assert stage.session(Attach("v", b"i" * 16, b"\x80"), 2).code == ErrorCode.BAD_SPEC


def test_specs_of_attaches_are_read_one_at_a_time_and_users_take_turns():
    stage, waiting = Stage(rules=(Rule(uid=2000, pools=("*",)),)), []
    stage.actors.gateway.connections._specs._background = lambda work, done: waiting.append((work, done))
    for number in range(1, 6):
        stage.attach(f"many{number}", number, uid=2000, descriptors=(10 + number,))
    stage.attach("one", 6)
    stage.hang_up(3)
    assert stage.discarded == [13]
    read = 0
    while waiting:
        [(work, done)] = waiting
        waiting.clear()
        done(work())
        stage.run()
        read += 1
        assert "one" in stage.actors.gateway._sessions.workers or read < 3
    assert read == 5


def test_a_spec_that_cannot_be_read_for_whatever_reason_leaves_its_turn_to_the_others():
    stage, waiting = Stage(rules=(Rule(uid=2000, pools=("*",)),)), []

    def background(work, done):
        if len(waiting) == 1:
            waiting.append(None)
            raise MemoryError
        waiting.append((work, done))

    stage.actors.gateway.connections._specs._background = background
    for number in range(1, 4):
        stage.attach(f"worker{number}", number, uid=2000, descriptors=(10 + number,))
    for work, done in filter(None, waiting):
        done(work())
        stage.run()
    assert len(waiting) == 3
    assert len(stage.actors.gateway._sessions.workers) == 2
    assert sorted(getattr(answer, "code", "") for answer in stage.on_sessions) == ["", "", ErrorCode.INTERNAL]


@pytest.mark.parametrize("connection", [1, 2])
def test_descriptors_with_a_request_that_needs_none_are_closed_once(stage, connection):
    """Closing one twice could close another file that got its number in between."""
    stage.connect(2)
    stage.session(Detach(), connection, (11, 12))
    assert stage.discarded == [11, 12]


def test_two_descriptors_are_too_many(stage):
    stage.connect(2)
    assert stage.session(Attach("v", b"i" * 16, CACHE.raw), 2, (11, 12)).code == ErrorCode.BAD_MESSAGE
    assert stage.discarded == [11, 12]


def test_a_session_attaches_once(stage):
    assert stage.session(Attach("v", b"i" * 16, CACHE.raw)).code == ErrorCode.WRONG_STATE


def test_a_session_that_is_not_attached_cannot_detach(stage):
    stage.connect(2)
    assert stage.session(Detach(), 2).code == ErrorCode.NOT_ATTACHED


def test_a_frame_of_a_connection_that_is_gone_is_dropped(stage):
    stage.session(b"x", 99, (13,))
    assert stage.discarded == [13]


def test_too_many_connections_are_hung_up_on(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_WORKERS", 1)
    stage.connect(2)
    assert stage.on_sessions[-1].code == ErrorCode.OVERLOADED
    assert stage.hung_up == [2]


# --- queues


def test_a_worker_whose_queue_takes_no_answer_is_hung_up_on(stage):
    stage.room = False
    stage.offer()
    assert stage.hung_up == [1]
    assert stage.offer("o2") == []  # its session is over


def test_a_worker_whose_queue_takes_no_refusal_is_hung_up_on(stage):
    stage.room = False
    stage.request(b"garbage")
    assert stage.hung_up == [1]


def test_notifications_wait_until_there_is_room(stage):
    [offered] = stage.offer()
    assert isinstance(offered, Offered)
    stage.room = False
    stage.request(Cancel(5, "o"))
    stage.run(1.0)
    assert stage.notified == []
    stage.room = True
    stage.run(0.1)
    assert [item.offer for item in stage.notified] == ["o"]
    assert stage.hung_up == []


def test_a_worker_that_acknowledges_nothing_gets_nothing_new(stage, monkeypatch):
    monkeypatch.setattr(limits, "MAX_UNACKNOWLEDGED", 2)
    for name in ("a", "b"):
        stage.offer(name)
        stage.request(Cancel(5, name))
    reply = refusal(stage.offer("c"))
    assert reply.code == ErrorCode.OVERLOADED
    stage.request(Acknowledge(2))
    assert isinstance(stage.offer("c")[0], Offered)


def test_a_session_that_waits_for_a_pool_to_end_may_ask_for_a_status_meanwhile():
    stage = Stage(attach_wait=2 * limits.SESSION_IDLE_SECONDS)
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.process_ends()
    stage.connect(9)
    stage.session(End("w"), 9)
    assert isinstance(stage.session(StatusRequest(1), 9), Status)
    stage.run(limits.SESSION_IDLE_SECONDS + 1.0)
    assert stage.hung_up == []
    stage.landed(1)
    assert stage.on_sessions[-1] == Detached()


@pytest.mark.parametrize("asks", [StatusRequest(1), End("w")])
def test_a_session_is_not_closed_for_its_silence_if_it_asks_for_something_before_that_is_done(asks):
    stage = Stage(attach_wait=60.0)
    stage.attach()
    start_reading(stage, timeout=3600.0)
    stage.hang_up()
    stage.process_ends()
    stage.connect(9)
    stage.session(asks, 9)
    call(stage.actors.gateway.connections._close_idle, 9)
    stage.run()
    assert stage.hung_up == []
