import errno
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from kvd import limits
from kvd.client import (
    Blocks,
    Cancelled,
    DaemonError,
    Disconnected,
    Done,
    Event,
    Failed,
    Freed,
    NotExtended,
    Offered,
    OfferRefused,
    Reattached,
    Released,
    Worker,
    connection,
    driver,
    waits,
)
from kvd.client.connection import Phase
from kvd.client.dealer import Dealer
from kvd.client.driver import Driver
from kvd.client.requests import inbox
from kvd.client.requests.inbox import ACKNOWLEDGE_SECONDS
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.net import workers
from kvd.net.interface import SessionClosed
from kvd.net.unix import Credentials
from kvd.protocol import worker as wire
from kvd.protocol.status import Totals
from tests.client.conftest import ScriptedDaemon, Spec
from tests.support.patience import MOMENT
from tests.support.statuses import status_report

BLOCKS = (Blocks(group=0, first=0, ids=[3, 1, 2]),)


STRANGER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as place:
    place.bind(sys.argv[1])
    os.setgid(65534), os.setuid(65534)
    place.listen()
    print("listens", flush=True)
    connected, _ = place.accept()
    print("got", len(connected.recv(1 << 20)), "bytes", flush=True)
    connected.recv(1)
"""
"""Another user's process at the path of the first argument."""


@pytest.fixture
def worker(daemon: ScriptedDaemon) -> Iterator[Worker]:
    with Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=MOMENT) as worker:
        yield worker


class Number:
    """Of another type than messages take, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def wait_for(worker: Worker, count: int) -> list[Event]:
    """Exactly the next `count` events."""
    events: list[Event] = []
    while len(events) < count:
        arrived = worker.wait(MOMENT)
        assert arrived, f"only {events} arrived"
        events += arrived
    assert len(events) == count, events
    return events


def eventually(condition: Callable[[], bool], worker: Worker) -> None:
    until = time.monotonic() + MOMENT
    while not condition():
        assert time.monotonic() < until
        worker.wait(0.01)


def pull(worker: Worker, daemon: ScriptedDaemon, request: str = "req-1", timeout: float = 30.0) -> wire.Pull:
    worker.pull(request, "a ticket", blocks=BLOCKS, timeout=timeout)
    return daemon.expect(wire.Pull)


class TestAttaching:
    def test_the_pool_is_mapped_and_written_to_from_both_sides(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        assert len(worker.pool) == Spec().pool_bytes
        worker.pool[10:14] = b"work"
        descriptor = daemon.pools["prefill-0"].descriptor
        assert os.pread(descriptor, 4, 10) == b"work"
        os.pwrite(descriptor, b"here", 65_532)
        assert bytes(worker.pool[-4:]) == b"here"

    def test_the_worker_knows_who_lent_the_pool(self, worker: Worker) -> None:
        facts = (worker.daemon, worker.address, worker.incarnation, worker.backing, worker.kept, worker.connected)
        assert facts == ("daemon-0", "tcp://127.0.0.1:7071", 1, "plain", False, True)

    def test_a_successor_gets_the_pool_with_its_bytes(self, daemon: ScriptedDaemon) -> None:
        with Worker.attach(daemon.path, name="prefill-0", spec=Spec()) as first:
            first.pool[:4] = b"kept"
        with Worker.attach(daemon.path, name="prefill-0", spec=Spec()) as second:
            assert second.kept
            assert bytes(second.pool[:4]) == b"kept"
        assert daemon.attaches[0].instance != daemon.attaches[1].instance

    def test_a_refusal_is_raised_as_the_error_it_is(self, daemon: ScriptedDaemon) -> None:
        daemon.refusal = BadRequest(ErrorCode.BAD_SPEC, "two views overlap")
        with pytest.raises(BadRequest, match="two views overlap") as caught:
            Worker.attach(daemon.path, name="prefill-0", spec=Spec())
        assert caught.value.code is ErrorCode.BAD_SPEC
        assert len(daemon.attaches) == 1

    def test_a_refusal_that_may_pass_is_tried_again_until_the_time_is_over(
        self, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        daemon.refusal = Unavailable(ErrorCode.POOL_BUSY, "another process has prefill-0")
        over_once_tried_again = SimpleNamespace(
            monotonic=lambda: time.monotonic() + MOMENT * (len(daemon.attaches) > 1)
        )
        monkeypatch.setattr(waits, "time", over_once_tried_again)
        with pytest.raises(Unavailable, match=r"within 60\.0 s: another process has prefill-0") as caught:
            Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=MOMENT)
        assert caught.value.code is ErrorCode.POOL_BUSY
        assert len(daemon.attaches) > 1

    def test_where_nobody_listens_the_error_names_the_path(self, socket_path: str) -> None:
        with pytest.raises(Unavailable, match=rf"cannot connect to {socket_path}: No such file") as caught:
            Worker.attach(socket_path, name="prefill-0", spec=Spec(), timeout=0.05)
        assert caught.value.code is ErrorCode.DAEMON_LOST

    def test_a_daemon_that_does_not_answer_is_not_waited_for_longer_than_asked(self, daemon: ScriptedDaemon) -> None:
        daemon.silent = True
        with pytest.raises(Unavailable, match=r"no pool from .* within 0\.05 s"):
            Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=0.05)

    def test_a_pool_of_another_size_is_not_accepted(self, daemon: ScriptedDaemon) -> None:
        with pytest.raises(BadRequest, match="asked for a pool of 4096 bytes, the daemon lent 65536"):
            Worker.attach(daemon.path, name="prefill-0", spec=Spec(4096))

    def test_detaching_gives_the_pool_back_and_closes(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        worker.detach()
        assert daemon.expect(SessionClosed)
        with pytest.raises(BadRequest, match="the worker is closed"):
            worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=1)
        assert worker.poll() == []

    def test_detaching_closes_also_where_the_daemon_cannot_be_reached(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        daemon.stop()
        wait_for(worker, 1)
        with pytest.raises(Unavailable, match="the daemon cannot be reached, so it cannot take the pool back"):
            worker.detach()
        with pytest.raises(BadRequest, match="the worker is closed"):
            worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=1)

    def test_whoever_waits_at_a_closed_worker_gets_its_last_events_and_then_an_error(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon)
        daemon.notify(1, wire.Done("req-1"))
        until = time.monotonic() + MOMENT
        while "req-1" not in worker._driver.core.events:
            assert time.monotonic() < until
            worker._driver.step(time.monotonic())
        worker.close()
        assert worker.wait(MOMENT) == [Done("req-1")]
        with pytest.raises(BadRequest, match="the worker is closed"):
            worker.wait(MOMENT)
        assert worker.poll() == []

    def test_memory_that_is_still_looked_at_stays_mapped_after_closing(self, worker: Worker) -> None:
        tensor = worker.pool[:8]
        worker.close()
        tensor[:4] = b"safe"
        assert bytes(tensor[:4]) == b"safe"
        tensor.release()


class TestOffers:
    def test_an_offer_returns_its_ticket(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        worker.offer_nowait("req-1", tokens=1000, blocks=BLOCKS, ttl=60)
        offer = daemon.expect(wire.Offer)
        assert (offer.offer, offer.tokens, offer.ttl) == ("req-1", 1000, 60)
        assert offer.spans[0].ids == bytes([3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])
        daemon.send(wire.Offered(offer.call, "the ticket"))
        assert wait_for(worker, 1) == [Offered("req-1", "the ticket")]
        daemon.notify(1, wire.Released("req-1", "read"))
        assert wait_for(worker, 1) == [Released("req-1", "read")]

    def test_a_local_ticket_is_the_one_that_the_daemon_gives(self, worker: Worker) -> None:
        from kvd.protocol import ticket  # noqa: PLC0415

        decoded = ticket.decode(worker.ticket("req-1", 1000, BLOCKS, bytes(16)))
        rank = decoded.ranks[0]
        assert (rank.daemon, rank.address, rank.incarnation) == ("daemon-0", "tcp://127.0.0.1:7071", 1)
        assert (rank.pool, rank.offer, decoded.tokens) == ("prefill-0", "req-1", 1000)
        assert rank.secret == bytes(16)

    def test_an_offer_that_grows_is_opened_extended_and_closed(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        worker.open_offer_nowait("req-1", ttl=60, secret=bytes(16))
        offer = daemon.expect(wire.Offer)
        assert (offer.tokens, offer.spans, offer.secret, offer.grows) == (0, (), bytes(16), True)
        daemon.send(wire.Offered(offer.call, "the ticket"))
        assert wait_for(worker, 1) == [Offered("req-1", "the ticket")]
        worker.extend_offer("req-1", tokens=40, blocks=BLOCKS)
        extend = daemon.expect(wire.Extend)
        assert (extend.offer, extend.tokens, extend.closes, len(extend.spans[0].ids)) == ("req-1", 40, False, 12)
        daemon.send(wire.Extended(extend.call))
        worker.close_offer("req-1", tokens=48)
        close = daemon.expect(wire.Extend)
        assert (close.tokens, close.spans, close.closes) == (48, (), True)
        daemon.send(wire.Extended(close.call))
        daemon.notify(1, wire.Released("req-1", "read"))
        assert wait_for(worker, 1) == [Released("req-1", "read")]
        with pytest.raises(BadRequest, match="no offer of this worker is called 'req-1'; it may have ended"):
            worker.extend_offer("req-1", tokens=50)

    def test_opening_waits_for_the_ticket(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        with pytest.raises(Unavailable, match="no answer to the offer 'req-1'"):
            worker.open_offer("req-1", ttl=60, timeout=0.01)
        assert daemon.expect(wire.Offer).grows

    def test_an_extension_that_is_refused_is_told_once_and_the_offer_stands(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        worker.open_offer_nowait("req-1", ttl=60)
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket"))
        assert wait_for(worker, 1) == [Offered("req-1", "the ticket")]
        worker.extend_offer("req-1", tokens=40, blocks=BLOCKS)
        daemon.send(wire.Error(daemon.expect(wire.Extend).call, "bad_blocks", "they leave a gap"))
        assert wait_for(worker, 1) == [NotExtended("req-1", "bad_blocks", "they leave a gap")]
        worker.close_offer("req-1", tokens=40, blocks=BLOCKS)
        assert daemon.expect(wire.Extend).closes

    def test_an_extension_of_what_has_ended_meanwhile_is_no_news_of_its_own(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        worker.open_offer_nowait("req-1", ttl=60)
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket"))
        worker.extend_offer("req-1", tokens=40, blocks=BLOCKS)
        daemon.send(wire.Error(daemon.expect(wire.Extend).call, "offer_gone", "the offer has ended (read)"))
        daemon.notify(1, wire.Released("req-1", "read"))
        assert wait_for(worker, 2) == [Offered("req-1", "the ticket"), Released("req-1", "read")]

    def test_the_ticket_of_an_offer_that_grows_names_no_blocks(self, worker: Worker) -> None:
        from kvd.protocol import ticket  # noqa: PLC0415

        decoded = ticket.decode(worker.growing_ticket("req-1", bytes(range(16))))
        [rank] = decoded.ranks
        assert (decoded.grows, decoded.tokens, decoded.blocks) == (True, 0, ((),))
        assert (rank.daemon, rank.address, rank.incarnation) == ("daemon-0", "tcp://127.0.0.1:7071", 1)
        assert (rank.pool, rank.offer, rank.secret) == ("prefill-0", "req-1", bytes(range(16)))

    def test_a_refused_offer_can_be_made_again(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        worker.offer_nowait("req-1", tokens=1000, blocks=BLOCKS, ttl=60)
        daemon.send(wire.Error(daemon.expect(wire.Offer).call, "bad_blocks", "block 3 is not yours"))
        assert wait_for(worker, 1) == [OfferRefused("req-1", "bad_blocks", "block 3 is not yours")]
        worker.offer_nowait("req-1", tokens=1000, blocks=BLOCKS, ttl=60)
        assert daemon.expect(wire.Offer)

    def test_an_offer_without_an_answer_is_withdrawn(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        with pytest.raises(Unavailable, match=r"no answer to the offer 'req-1' within 0\.05 s") as caught:
            worker.offer("req-1", tokens=1000, blocks=BLOCKS, ttl=60, timeout=0.05)
        assert caught.value.code is ErrorCode.DEADLINE
        worker.poll()
        offer, cancel = daemon.expect(wire.Offer), daemon.expect(wire.Cancel)
        assert cancel.request == "req-1"
        daemon.send(wire.Offered(offer.call, "late"))
        daemon.notify(1, wire.Released("req-1", "withdrawn"))
        assert wait_for(worker, 2) == [Offered("req-1", "late"), Released("req-1", "withdrawn")]

    def test_waiting_for_a_ticket_ends_with_the_offer_whose_answer_was_lost(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        request = partial(worker.offer_nowait, "req-1", tokens=1000, blocks=BLOCKS, ttl=60)
        offering = worker._offering("req-1", request, MOMENT)
        next(offering)
        daemon.expect(wire.Offer)
        daemon.notify(1, wire.Released("req-1", "expired"))
        with pytest.raises(Unavailable, match="the daemon's answer was lost") as caught:
            worker._run(offering)
        assert caught.value.code is ErrorCode.DAEMON_LOST
        assert worker.poll() == []

    def test_an_offer_without_an_answer_that_never_stood_is_refused(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        with pytest.raises(Unavailable):
            worker.offer("req-1", tokens=1000, blocks=BLOCKS, ttl=60, timeout=0.01)
        worker.poll()
        daemon.expect(wire.Offer)
        daemon.send(wire.Error(daemon.expect(wire.Cancel).call, "unknown_request", "no such offer", upcoming=1))
        assert isinstance(wait_for(worker, 1)[0], OfferRefused)


class TestPulls:
    @pytest.mark.parametrize(
        ("word", "event"),
        [
            (wire.Done("req-1"), Done("req-1")),
            (wire.Failed("req-1", "peer_lost", "gone", False), Failed("req-1", "peer_lost", "gone", False, BLOCKS)),
            (wire.Cancelled("req-1", False), Cancelled("req-1", False, BLOCKS)),
        ],
    )
    def test_the_outcome_is_told_once_and_the_name_is_free_again(
        self, daemon: ScriptedDaemon, worker: Worker, word: wire.Notification, event: Event
    ) -> None:
        asked = pull(worker, daemon)
        assert (asked.request, asked.ticket, asked.timeout) == ("req-1", "a ticket", 30)
        daemon.notify(1, word)
        assert wait_for(worker, 1) == [event]
        worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=30)

    def test_quarantined_blocks_are_told_free_later_and_the_name_with_them(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon)
        daemon.notify(1, wire.Failed("req-1", "deadline", "late", True))
        assert wait_for(worker, 1) == [Failed("req-1", "deadline", "late", True, BLOCKS)]
        with pytest.raises(BadRequest, match="'req-1' names an open pull"):
            worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=30)
        daemon.notify(2, wire.Freed("req-1"))
        assert wait_for(worker, 1) == [Freed("req-1", BLOCKS)]

    def test_an_immediate_refusal_is_a_failure_with_the_blocks(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        asked = pull(worker, daemon)
        daemon.send(wire.Error(asked.call, "bad_ticket", "cut short"))
        assert wait_for(worker, 1) == [Failed("req-1", "bad_ticket", "cut short", False, BLOCKS)]

    def test_a_name_in_use_is_refused_without_asking_the_daemon(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        for attempt in (
            lambda: worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=30),
            lambda: worker.offer_nowait("req-1", tokens=1, blocks=BLOCKS, ttl=60),
        ):
            with pytest.raises(BadRequest) as caught:
                attempt()
            assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
        assert daemon.inbox.empty()

    @pytest.mark.parametrize(
        ("change", "code"),
        [
            ({"request": ""}, ErrorCode.BAD_MESSAGE),
            ({"request": "x" * 257}, ErrorCode.BAD_MESSAGE),
            ({"timeout": -1.0}, ErrorCode.BAD_MESSAGE),
            ({"blocks": [Blocks(-1, 0, [1])]}, ErrorCode.BAD_MESSAGE),
            ({"blocks": [Blocks(0, 0, [-1])]}, ErrorCode.BAD_BLOCKS),
            ({"blocks": [Blocks(0, 0, [1 << 32])]}, ErrorCode.BAD_BLOCKS),
            ({"blocks": [Blocks(0, 0, b"123")]}, ErrorCode.BAD_BLOCKS),
            ({"blocks": [Blocks(0, 0, bytearray(b"123"))]}, ErrorCode.BAD_BLOCKS),
            ({"blocks": [(0, 0, [1])]}, ErrorCode.BAD_BLOCKS),
            ({"blocks": None}, ErrorCode.BAD_BLOCKS),
            ({"blocks": [Blocks(Number(0), 0, [1])]}, ErrorCode.BAD_MESSAGE),
            ({"blocks": [Blocks(0, 1 << 64, [1])]}, ErrorCode.BAD_MESSAGE),
            ({"ticket": "x" * (limits.MAX_MESSAGE_BYTES + 1)}, ErrorCode.TOO_LARGE),
            ({"ticket": "kvd1.\ud800"}, ErrorCode.BAD_MESSAGE),
            ({"request": "\ud800"}, ErrorCode.BAD_MESSAGE),
            ({"consumer": "\udfff"}, ErrorCode.BAD_MESSAGE),
        ],
    )
    def test_what_the_daemon_could_not_read_is_not_sent(
        self, daemon: ScriptedDaemon, worker: Worker, change: dict[str, object], code: ErrorCode
    ) -> None:
        arguments = {"request": "req-1", "ticket": "a ticket", "blocks": BLOCKS, "timeout": 30.0} | change
        with pytest.raises(BadRequest) as caught:
            worker.pull(**arguments)
        assert caught.value.code is code
        core = worker._driver.core
        assert (core._calls._waiting, core._calls._of) == ({}, {}), "something is kept of a request that was never made"
        pull(worker, daemon)  # the name was not used up, and the first thing that the daemon hears is this

    @pytest.mark.parametrize(
        "change",
        [
            {"offer": "\ud800"},
            {"tokens": -1},
            {"tokens": 1 << 64},
            {"secret": b"short"},
            {"blocks": [Blocks(0, 0, [-1])]},
        ],
    )
    def test_of_an_offer_that_the_daemon_could_not_read_nothing_is_kept(
        self, daemon: ScriptedDaemon, worker: Worker, change: dict[str, object]
    ) -> None:
        arguments = {"offer": "offer-1", "tokens": 1, "blocks": BLOCKS, "ttl": 60.0} | change
        with pytest.raises(BadRequest):
            worker.offer_nowait(**arguments)
        core = worker._driver.core
        assert (core._calls._waiting, core._calls._of, len(core._offers)) == ({}, {}, 0)
        worker.offer_nowait("offer-1", tokens=1, blocks=BLOCKS, ttl=60.0)
        assert daemon.expect(wire.Offer).offer == "offer-1"

    @pytest.mark.parametrize(
        "change",
        [{"tokens": -1}, {"tokens": "x"}, {"tokens": Number(1)}, {"secret": b"short"}, {"offer": "x" * 1000}],
        ids=str,
    )
    def test_a_ticket_that_nobody_could_read_is_not_made(self, worker: Worker, change: dict[str, object]) -> None:
        arguments = {"offer": "o", "tokens": 10, "blocks": BLOCKS, "secret": bytes(16)} | change
        with pytest.raises(BadRequest) as caught:
            worker.ticket(**arguments)
        assert caught.value.code is ErrorCode.BAD_TICKET

    def test_a_ticket_of_a_name_that_is_not_unicode_is_refused(self, worker: Worker) -> None:
        with pytest.raises(BadRequest, match="surrogates") as caught:
            worker.ticket("\ud800", 1, BLOCKS, bytes(16))
        assert caught.value.code is ErrorCode.BAD_TICKET

    def test_a_time_that_is_no_number_is_refused_before_anything_is_sent(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        for attempt in (
            lambda: worker.wait(math.nan),
            lambda: worker.status(timeout=math.nan),
            lambda: worker.offer("offer-1", tokens=1, blocks=BLOCKS, ttl=60.0, timeout=math.nan),
            lambda: worker.detach(timeout=math.nan),
            lambda: worker.wait("5"),
            lambda: worker.wait(None),
            lambda: Worker.attach(daemon.path, name="decode-1", spec=Spec(), timeout=math.nan),
        ):
            with pytest.raises(BadRequest, match="not a number"):
                attempt()
        assert daemon.inbox.empty()
        pull(worker, daemon)

    def test_cancelling_asks_the_daemon_and_the_outcome_follows(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        worker.cancel("req-1")
        assert daemon.expect(wire.Cancel).request == "req-1"
        daemon.notify(1, wire.Cancelled("req-1", False))
        assert wait_for(worker, 1) == [Cancelled("req-1", False, BLOCKS)]

    def test_a_cancel_that_came_too_late_is_no_event(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        worker.cancel("req-1")
        cancel = daemon.expect(wire.Cancel)
        daemon.send(wire.Error(cancel.call, "unknown_request", "no pull and no offer is called 'req-1'"))
        daemon.notify(1, wire.Done("req-1"))
        assert wait_for(worker, 1) == [Done("req-1")]

    def test_cancelling_what_is_not_there_is_refused(self, worker: Worker) -> None:
        with pytest.raises(BadRequest, match="'req-9'") as caught:
            worker.cancel("req-9")
        assert caught.value.code is ErrorCode.UNKNOWN_REQUEST

    def test_a_daemon_that_says_nothing_does_not_keep_a_pull_open(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon, timeout=0.01)
        (failed,) = wait_for(worker, 1)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined, failed.blocks) == (ErrorCode.DEADLINE, True, BLOCKS)
        worker.poll()
        assert daemon.expect(wire.Cancel).request == "req-1"
        daemon.notify(1, wire.Done("req-1"))
        assert wait_for(worker, 1) == [Freed("req-1", BLOCKS)]

    def test_a_pull_that_the_daemon_never_heard_of_is_freed_when_all_it_said_has_arrived(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon, timeout=0.01)
        wait_for(worker, 1)
        worker.poll()
        cancel = daemon.expect(wire.Cancel)
        text = "no pull and no offer is called 'req-1'"
        daemon.send(wire.Error(cancel.call, "unknown_request", text, upcoming=2))
        assert worker.wait(0.05) == []
        daemon.notify(1, wire.Released("an offer of long ago", "read"))
        assert wait_for(worker, 1) == [Freed("req-1", BLOCKS)]


class TestNotifications:
    def test_what_was_seen_already_is_dropped(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        for number in range(1, 5):
            pull(worker, daemon, f"req-{number}")
        daemon.notify(1, wire.Done("req-1"), wire.Done("req-2"))
        daemon.notify(1, wire.Done("req-1"), wire.Done("req-2"), wire.Done("req-3"))
        daemon.notify(2, wire.Done("req-2"))
        daemon.notify(4, wire.Done("req-4"))
        assert wait_for(worker, 4) == [Done(f"req-{number}") for number in range(1, 5)]

    def test_what_polls_have_returned_is_acknowledged_by_a_later_one_in_one_message(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        for number in range(1, 4):
            pull(worker, daemon, f"req-{number}")
        daemon.notify(1, wire.Done("req-1"), wire.Done("req-2"))
        wait_for(worker, 2)
        assert daemon.inbox.empty()
        worker.wait(2 * ACKNOWLEDGE_SECONDS)
        assert daemon.expect(wire.Acknowledge).sequence == 2
        daemon.notify(3, wire.Done("req-3"))
        wait_for(worker, 1)
        worker.wait(2 * ACKNOWLEDGE_SECONDS)
        assert daemon.expect(wire.Acknowledge).sequence == 3
        assert daemon.inbox.empty()

    def test_what_was_returned_is_acknowledged_before_the_session_ends(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon, "req-1")
        daemon.notify(1, wire.Done("req-1"))
        wait_for(worker, 1)
        worker.close()
        assert daemon.expect(wire.Acknowledge).sequence == 1

    def test_a_gap_that_the_daemon_closes_is_no_reason_to_attach_again(
        self, daemon: ScriptedDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inbox, "GAP_SECONDS", 600.0)
        for number in range(1, 3):
            pull(worker, daemon, f"req-{number}")
        daemon.notify(2, wire.Done("req-2"))
        assert worker.wait(0.05) == []
        daemon.notify(1, wire.Done("req-1"), wire.Done("req-2"))
        assert wait_for(worker, 2) == [Done("req-1"), Done("req-2")]
        assert len(daemon.attaches) == 1

    def test_a_gap_that_stays_makes_the_worker_attach_again_and_nothing_is_lost(
        self, daemon: ScriptedDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inbox, "GAP_SECONDS", 0.05)
        for number in range(1, 3):
            pull(worker, daemon, f"req-{number}")
        daemon.notify(2, wire.Done("req-2"))
        lost, back = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert back == Reattached(1, same=True)
        assert daemon.attaches[0].instance == daemon.attaches[1].instance
        assert daemon.expect(SessionClosed)
        while not daemon.try_notify(1, wire.Done("req-1"), wire.Done("req-2")):
            worker.wait(0.01)
        assert wait_for(worker, 2) == [Done("req-1"), Done("req-2")]


class TestStatus:
    def test_it_is_the_daemons_document(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        asking = worker._asking_status(MOMENT)
        next(asking)
        report = msgspec.json.encode(status_report(Totals(1.0, 2, 3, {}, 4, 5, {})))
        daemon.send(wire.Status(daemon.expect(wire.StatusRequest).call, report))
        assert worker._run(asking) == msgspec.json.decode(report)

    @pytest.mark.parametrize("report", [b"{}", b"\xff", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
    def test_what_is_no_status_is_refused(self, daemon: ScriptedDaemon, worker: Worker, report: bytes) -> None:
        asking = worker._asking_status(MOMENT)
        next(asking)
        daemon.send(wire.Status(daemon.expect(wire.StatusRequest).call, report))
        with pytest.raises(BadRequest, match="this is no status of this release"):
            worker._run(asking)

    def test_no_answer_is_a_deadline(self, worker: Worker) -> None:
        with pytest.raises(Unavailable, match=r"no status within 0\.01 s"):
            worker.status(timeout=0.01)

    def test_an_answer_that_comes_too_late_is_not_kept(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        with pytest.raises(Unavailable):
            worker.status(timeout=0.01)
        daemon.send(wire.Status(daemon.expect(wire.StatusRequest).call, b"{}"))
        daemon.notify(1, wire.Done("req-1"))
        pull(worker, daemon)
        daemon.notify(2, wire.Done("req-1"))
        assert wait_for(worker, 1) == [Done("req-1")]
        core = worker._driver.core
        assert (core._calls._waiting, core._reports) == ({}, {})


class TestLosingTheDaemon:
    def test_the_same_daemon_is_found_again_and_pulls_go_on(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        worker.pool[:4] = b"kept"
        daemon.hang_up()
        lost, back = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert back == Reattached(1, same=True)
        pull(worker, daemon, "req-2")
        daemon.notify(1, wire.Done("req-1"), wire.Done("req-2"))
        assert wait_for(worker, 2) == [Done("req-1"), Done("req-2")]
        assert bytes(worker.pool[:4]) == b"kept"

    def test_an_offer_whose_answer_was_lost_is_withdrawn_from_the_same_daemon(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        worker.offer_nowait("req-1", tokens=1, blocks=BLOCKS, ttl=60)
        daemon.expect(wire.Offer)
        daemon.hang_up()
        wait_for(worker, 2)
        worker.poll()
        assert daemon.expect(wire.Cancel).request == "req-1"
        daemon.notify(1, wire.Released("req-1", "withdrawn"))
        assert wait_for(worker, 1) == [Released("req-1", "withdrawn")]

    def test_a_new_daemon_gets_the_same_bytes_and_what_the_old_one_did_ends(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon)
        worker.offer_nowait("req-2", tokens=1, blocks=BLOCKS, ttl=60)
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "a ticket"))
        wait_for(worker, 1)
        worker.offer_nowait("req-3", tokens=1, blocks=BLOCKS, ttl=60)
        daemon.expect(wire.Offer)
        worker.pool[:4] = b"kept"
        daemon.stop()
        assert isinstance(wait_for(worker, 1)[0], Disconnected)
        assert not worker.connected
        with pytest.raises(Unavailable) as caught:
            worker.pull("req-4", "a ticket", blocks=BLOCKS, timeout=30)
        assert caught.value.code is ErrorCode.DAEMON_LOST
        successor = ScriptedDaemon(daemon.path, incarnation=2)
        failed, released, refused, back = wait_for(worker, 4)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined, failed.blocks) == (ErrorCode.DAEMON_LOST, False, BLOCKS)
        assert released == Released("req-2", "daemon lost")
        assert isinstance(refused, OfferRefused)
        assert back == Reattached(2, same=False)
        assert (worker.incarnation, worker.kept) == (2, True)
        assert os.pread(successor.pools["prefill-0"].descriptor, 4, 0) == b"kept"
        assert successor.attaches[0].instance == daemon.attaches[0].instance
        pull(worker, successor, "req-1")
        successor.notify(1, wire.Done("req-1"))
        assert wait_for(worker, 1) == [Done("req-1")]
        successor.stop()

    @pytest.mark.real
    def test_a_pull_ends_as_soon_as_the_daemons_process_has(self, socket_path: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", DAEMON_PROCESS, socket_path], stdout=subprocess.PIPE, env={"PYTHONPATH": "."}
        )
        assert process.stdout is not None
        with process, Worker.attach(socket_path, name="prefill-0", spec=Spec(), timeout=MOMENT) as worker:
            worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=600)
            worker.wait(0.01)
            process.send_signal(signal.SIGSTOP)
            assert worker.wait(0.1) == []
            process.kill()
            lost, failed = wait_for(worker, 2)
            assert isinstance(lost, Disconnected)
            assert isinstance(failed, Failed)
            assert (failed.code, failed.quarantined) == (ErrorCode.DAEMON_LOST, False)
        for name in os.listdir(os.path.dirname(socket_path)):
            os.unlink(os.path.join(os.path.dirname(socket_path), name))

    def test_a_daemon_whose_sockets_are_closed_may_write_until_its_process_has_ended(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        pull(worker, daemon)
        daemon.close()
        (lost,) = wait_for(worker, 1)
        assert isinstance(lost, Disconnected)
        successor = ScriptedDaemon(daemon.path, incarnation=2)
        eventually(lambda: len(successor.attaches) >= 2, worker)
        assert not worker.connected
        assert worker.wait(0.01) == []
        daemon.end_process()
        failed, back = wait_for(worker, 2)
        assert isinstance(failed, Failed)
        assert not failed.quarantined
        assert back == Reattached(2, same=False)
        successor.stop()

    def test_a_daemon_that_hung_up_but_lives_may_still_write(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon, timeout=0.2)
        daemon.silent = True
        daemon.hang_up()
        lost, failed = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined) == (ErrorCode.DEADLINE, True)

    @pytest.mark.parametrize("stranger", ["another user", "another PID namespace"])
    def test_whoever_is_not_like_the_lender_is_sent_nothing_and_said_once(
        self, daemon: ScriptedDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch, stranger: str
    ) -> None:
        """It would get the descriptor of the pool, which it could write to."""
        us = Credentials(os.getpid(), os.getuid(), os.getgid())
        other = us._replace(uid=us.uid + 1) if stranger == "another user" else us._replace(pid=0)
        monkeypatch.setattr(connection, "credentials", lambda _socket: other)
        daemon.hang_up()
        lost, refused = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert isinstance(refused, Disconnected)
        assert refused.code == ErrorCode.NOT_PERMITTED
        assert daemon.path in refused.text
        assert f"user {other.uid}" in refused.text
        assert worker.wait(0.6) == []
        assert len(daemon.attaches) == 1
        monkeypatch.setattr(connection, "credentials", lambda _socket: us)
        assert wait_for(worker, 1) == [Reattached(1, same=True)]

    @pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
    def test_another_users_process_at_the_daemons_place_gets_no_byte(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        worker.pool[:4] = b"mine"
        daemon.stop()
        assert isinstance(wait_for(worker, 1)[0], Disconnected)
        command = [sys.executable, "-c", STRANGER, daemon.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "listens\n"
            (refused,) = wait_for(worker, 1)
            assert (refused.code, stranger.stdout.readline()) == (ErrorCode.NOT_PERMITTED, "got 0 bytes\n")
            stranger.kill()
        os.unlink(daemon.path)
        successor = ScriptedDaemon(daemon.path, incarnation=2)
        assert wait_for(worker, 1) == [Reattached(2, same=False)]
        assert os.pread(successor.pools["prefill-0"].descriptor, 4, 0) == b"mine"
        successor.stop()

    def test_a_daemon_that_will_not_have_the_worker_any_more_is_said_by_every_request(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        daemon.refusal = BadRequest(ErrorCode.BAD_POOL, "that is no pool")
        daemon.hang_up()
        eventually(lambda: worker._driver.failed is not None, worker)
        with pytest.raises(BadRequest, match="that is no pool"):
            worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=30)
        assert len(daemon.attaches) == 2

    def test_a_worker_that_is_refused_is_told_so_and_of_the_end_of_the_daemon_that_had_its_requests(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        worker.offer_nowait("offer-1", tokens=10, blocks=BLOCKS, ttl=60)
        daemon.send(wire.Offered(daemon.expect(wire.Offer).call, "the ticket"))
        pull(worker, daemon)
        assert wait_for(worker, 1) == [Offered("offer-1", "the ticket")]
        daemon.refusal = BadRequest(ErrorCode.NOT_PERMITTED, "user 1 may not attach")
        daemon.hang_up()
        lost, refused = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert refused == Disconnected("not_permitted", "user 1 may not attach")
        daemon.end_process()
        failed, released = wait_for(worker, 2)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.quarantined) == (ErrorCode.DAEMON_LOST, False)
        assert released == Released("offer-1", "daemon lost")
        assert not worker._driver._looks_for_daemon

    def test_requests_of_a_worker_that_is_refused_keep_nothing_of_those_who_made_them(self, worker: Worker) -> None:
        worker.close()
        errors = []
        for _ in range(2):
            with pytest.raises(BadRequest, match="the worker is closed") as caught:
                worker.pull("req-1", "a ticket", blocks=BLOCKS, timeout=30)
            errors.append(caught.value)
        assert errors[0] is not errors[1]

    def test_another_pool_than_before_is_not_put_under_the_engines_tensors(
        self, daemon: ScriptedDaemon, worker: Worker
    ) -> None:
        daemon.pools["prefill-0"].close()
        daemon.pools["prefill-0"] = daemon._provider.allocate("other", Spec().pool_bytes)
        daemon.hang_up()
        eventually(lambda: worker._driver.failed is not None, worker)
        with pytest.raises(BadRequest, match="another pool than before"):
            worker.offer("req-1", tokens=1, blocks=BLOCKS, ttl=60)

    def test_polling_without_a_daemon_takes_about_no_time(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        daemon.stop()
        wait_for(worker, 1)
        taken = []
        for _ in range(200):
            before = time.thread_time()
            worker.poll()
            taken.append(time.thread_time() - before)
            worker.wait(0.001)
        assert statistics.median(taken) < 0.001  # what a virtual machine was deprived of counts in a few of them


class TestWithoutDescriptors:
    """The engine has no descriptor left for the socket of requests, once."""

    @pytest.fixture(autouse=True)
    def refused(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many more sockets for requests the kernel refuses."""
        left = [0]

        def make(path: bytes, routing_id: bytes) -> Dealer:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return Dealer(path, routing_id)

        monkeypatch.setattr(connection, "Dealer", make)
        return left

    def test_the_first_attach_is_tried_again(self, daemon: ScriptedDaemon, refused: list[int]) -> None:
        refused[0] = 1
        with Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=MOMENT) as worker:
            worker.pool[:4] = b"work"
            assert worker.connected

    def test_the_pool_that_was_lent_meanwhile_goes_to_nobody_else(
        self, daemon: ScriptedDaemon, refused: list[int]
    ) -> None:
        refused[0] = 1000
        driver = Driver(daemon.path, "prefill-0", b"a spec", Spec().pool_bytes)
        while driver.pool is None:
            driver.step(time.monotonic())
        with pytest.raises(BadRequest, match="but the pool was lent by a process of user"):
            driver._connection._check_lender(Credentials(1, 65534, 65534))
        driver.close()

    def test_a_worker_that_lost_its_session_tries_again(
        self, daemon: ScriptedDaemon, worker: Worker, refused: list[int]
    ) -> None:
        refused[0] = 1
        daemon.hang_up()
        events = wait_for(worker, 2)
        assert [type(event) for event in events] == [Disconnected, Reattached]
        assert refused == [0]

    def test_so_does_one_whose_daemon_was_restarted(
        self, daemon: ScriptedDaemon, worker: Worker, refused: list[int]
    ) -> None:
        refused[0] = 1
        daemon.stop()
        successor = ScriptedDaemon(daemon.path, incarnation=2)
        lost, back = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert back == Reattached(2, same=False)
        successor.stop()


class TestGarbage:
    @pytest.mark.parametrize("garbage", [b"", b"\xff\x00garbage", b"\x93\xa7offered", bytes(100_000)])
    def test_on_the_requests_socket_it_makes_the_worker_attach_again(
        self, daemon: ScriptedDaemon, worker: Worker, garbage: bytes
    ) -> None:
        pull(worker, daemon)
        daemon.send_raw(garbage)
        lost, back = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert lost.code == ErrorCode.BAD_MESSAGE
        assert back == Reattached(1, same=True)

    @pytest.mark.parametrize("garbage", [b"", b"\xff\x00garbage", b"\x91\xa8detached\x00"])
    def test_on_the_session_it_makes_the_worker_attach_again(
        self, daemon: ScriptedDaemon, worker: Worker, garbage: bytes
    ) -> None:
        daemon.send_session(garbage)
        lost, back = wait_for(worker, 2)
        assert isinstance(lost, Disconnected)
        assert back == Reattached(1, same=True)

    def test_a_message_that_the_daemon_could_not_read_is_an_event(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        daemon.send(wire.Error(0, "bad_message", "no message: truncated"))
        assert wait_for(worker, 1) == [DaemonError("bad_message", "no message: truncated")]

    def test_outcomes_of_requests_that_never_were_are_ignored(self, daemon: ScriptedDaemon, worker: Worker) -> None:
        pull(worker, daemon)
        daemon.notify(1, wire.Done("req-9"), wire.Freed("req-8"), wire.Released("req-7", "read"), wire.Done("req-1"))
        daemon.send(wire.Offered(999, "a ticket"), wire.Status(998, b"{}"), wire.Error(997, "internal", "?"))
        daemon.notify(5, wire.Done("req-1"))
        assert wait_for(worker, 1) == [Done("req-1")]


def test_requests_of_a_worker_that_does_nothing_more_all_get_out(daemon: ScriptedDaemon, worker: Worker) -> None:
    with daemon.held():
        for number in range(1000):
            worker.offer_nowait(f"offer-{number}", tokens=48, blocks=BLOCKS, ttl=30.0)
    assert [daemon.expect(wire.Offer).offer for _ in range(1000)] == [f"offer-{number}" for number in range(1000)]


def test_a_request_is_not_lost_where_the_daemon_has_no_room_for_its_connection_yet(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms, has_room = iter([False, True]), workers._has_room
    monkeypatch.setattr(workers, "_has_room", lambda uid, users: next(rooms) and has_room(uid, users))
    with Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=MOMENT) as worker:
        worker.offer_nowait("offer-1", tokens=48, blocks=BLOCKS, ttl=30.0)
        assert daemon.expect(SessionClosed)
        assert daemon.expect(wire.Offer).offer == "offer-1"
        assert worker.wait(0) == []


def test_a_worker_whose_connection_for_requests_alone_ends_attaches_again(
    daemon: ScriptedDaemon, worker: Worker
) -> None:
    worker.offer_nowait("offer-1", tokens=48, blocks=BLOCKS, ttl=30.0)
    daemon.expect(wire.Offer)
    daemon.hang_up_on_requests()
    lost, back = wait_for(worker, 2)
    assert isinstance(lost, Disconnected)
    assert back == Reattached(1, same=True)


def test_the_poll_that_hears_the_daemons_answer_has_attached(
    daemon: ScriptedDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "WELCOME_SECONDS", MOMENT)
    for _ in range(3):
        daemon.hang_up_on_requests()
        eventually_polled(lambda: not worker.connected, worker)
        eventually_polled(lambda: worker.connected, worker)


def eventually_polled(condition: Callable[[], bool], worker: Worker) -> None:
    """Polls as an engine does: never while it waits."""
    until = time.monotonic() + MOMENT
    while not condition():
        assert time.monotonic() < until
        worker.poll()
        assert worker._driver._connection.phase is not Phase.JOINING


def test_an_offer_of_the_last_moment_gets_out_before_the_session_ends(daemon: ScriptedDaemon) -> None:
    for number in range(20):
        with Worker.attach(daemon.path, name=f"prefill-{number}", spec=Spec(), timeout=MOMENT) as worker:
            worker.offer_nowait("offer-1", tokens=48, blocks=BLOCKS, ttl=30.0)
            assert daemon.expect(wire.Offer).offer == "offer-1"  # so the socket of requests is connected
            with daemon.held():
                worker.offer_nowait("offer-2", tokens=48, blocks=BLOCKS, ttl=30.0)
                worker.close()
        assert daemon.expect(wire.Offer).offer == "offer-2"  # it reads two sockets in the order of what came
        daemon.expect(SessionClosed)


def test_an_offer_of_a_worker_that_was_not_accepted_yet_gets_out_too(daemon: ScriptedDaemon) -> None:
    with Worker.attach(daemon.path, name="prefill-0", spec=Spec(), timeout=MOMENT) as worker:
        worker.offer_nowait("offer-1", tokens=48, blocks=BLOCKS, ttl=30.0)
    heard = [type(daemon.inbox.get(timeout=MOMENT)) for _ in range(2)]
    assert set(heard) == {wire.Offer, SessionClosed}  # in any order: the daemon may see the session's end first


DAEMON_PROCESS = """
import sys
from tests.client.conftest import ScriptedDaemon
ScriptedDaemon(sys.argv[1], own_process=True)
"""
