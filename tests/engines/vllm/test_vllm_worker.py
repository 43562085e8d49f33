"""The worker's half against a client that is scripted: what vLLM is told of each request, and when."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kvd.client import Blocks, Cancelled, Disconnected, Done, Failed, Freed, OfferRefused, Reattached, Released
from kvd.engines.kernels import Kernels
from kvd.engines.vllm import worker as worker_module
from kvd.engines.vllm.metadata import HoldOrder, OfferOrder, PullOrder, Results, StepMetadata
from kvd.engines.vllm.worker import PATIENCE_SECONDS, WorkerSide
from kvd.errors import BadRequest, ErrorCode, Unavailable
from kvd.layout import Axis, CacheSpec, Full, Group, Shard, View

T = TypeVar("T")

BLOCKS = (Blocks(0, 0, [1, 2]),)
SECRET = bytes(16)
PULL = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True)
HOLD = HoldOrder("r", "r#0", "kvd1.x")
OFFER = OfferOrder("r", "r#1", 8, BLOCKS, SECRET)


class Client:
    """A `kvd.client.Worker` whose events the test writes."""

    daemon, address = "d", "tcp://h:1"

    def __init__(self) -> None:
        self.connected, self.incarnation = True, 7
        self.events: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _call(self, *call: Any) -> None:
        if not self.connected:
            raise Unavailable(ErrorCode.DAEMON_LOST, "away")
        if self.error is not None:
            raise self.error
        self.calls.append(call)

    def pull(
        self, request: str, ticket: str, *, blocks: Any, timeout: float, consumer: str = "", hold: bool = False
    ) -> None:
        self._call("pull", request, ticket, blocks, timeout, *([consumer] if consumer else []), *["hold"] * hold)

    def offer_nowait(self, offer: str, *, tokens: int, blocks: Any, ttl: float, consumers: int, secret: bytes) -> None:
        self._call("offer", offer, tokens, blocks, ttl, consumers, secret)

    def cancel(self, request: str) -> None:
        self._call("cancel", request)

    def poll(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.calls.append(("close",))


@pytest.fixture
def client() -> Client:
    return Client()


def spec() -> CacheSpec:
    view = View(
        component="kv", offset=0, axes=(Axis("block", 4, 64), Axis("token", 4, 16), Axis("byte", 16, 1)), layers=(0,)
    )
    group = Group(window=Full(), block_tokens=4, num_blocks=4, views=(view,))
    return CacheSpec(dtype="int8", pool_bytes=256, groups=(group,), shard=Shard(stages=((0, 1),)))


@pytest.fixture
def side(client: Client) -> WorkerSide:
    return WorkerSide(client, "vllm-0", spec(), offer_ttl=9.0, pull_timeout=8.0, kernels=Kernels(GPU.record))


class Gpu:
    """What `torch.cuda.Event` shows of a GPU: `busy` is False once it has done what it was given."""

    busy = False

    def record(self) -> "Gpu":
        return self

    def query(self) -> bool:
        return not self.busy


GPU = Gpu()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    yield GPU
    GPU.busy = False


def step(side: WorkerSide, client: Client, *events: Any, metadata: StepMetadata | None = None) -> Results:
    side.begin(metadata or StepMetadata())
    client.events += events
    return side.end()


def test_a_pull_is_sent_when_the_step_begins(side: WorkerSide, client: Client) -> None:
    side.begin(StepMetadata(pulls=[PULL]))
    assert client.calls == [("pull", "r#1", "kvd1.x", BLOCKS, 8.0)]


def test_done_reports_the_request_as_received_once_and_counts_it(side: WorkerSide, client: Client) -> None:
    results = step(side, client, Done("r#1"), metadata=StepMetadata(pulls=[PULL]))
    assert (results.received, results.failed) == ({"r"}, set())
    assert step(side, client).received == set()
    counts = side.take_counts()
    assert (counts.pull_blocks, counts.pull_bytes, len(counts.pull_seconds)) == ([2], [128], 1)
    assert side.take_counts().pull_blocks == []


def test_a_failed_pull_is_reported_as_failed_and_received(side: WorkerSide, client: Client) -> None:
    failed = Failed("r#1", "peer_lost", "gone", quarantined=False, blocks=BLOCKS)
    results = step(side, client, failed, metadata=StepMetadata(pulls=[PULL]))
    assert (results.received, results.failed) == ({"r"}, {"r"})
    assert side.take_counts().failed_pulls == 1


def test_blocks_in_quarantine_are_not_given_back_before_they_are_freed(side: WorkerSide, client: Client) -> None:
    failed = Failed("r#1", "deadline", "stuck", quarantined=True, blocks=BLOCKS)
    results = step(side, client, failed, metadata=StepMetadata(pulls=[PULL]))
    assert (results.received, results.failed) == (set(), {"r"})
    results = step(side, client, Freed("r#1", BLOCKS))
    assert (results.received, results.failed) == ({"r"}, set())


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_cancelled_pull_gives_its_blocks_back_when_nothing_writes_to_them(
    side: WorkerSide, client: Client, quarantined: bool
) -> None:
    step(side, client, metadata=StepMetadata(pulls=[PULL]))
    cancelled = Cancelled("r#1", quarantined=quarantined, blocks=BLOCKS)
    results = step(side, client, cancelled, metadata=StepMetadata(cancels=["r#1"]))
    assert client.calls[-1] == ("cancel", "r#1")
    assert (results.received, results.failed) == (set() if quarantined else {"r"}, set())
    if quarantined:
        assert step(side, client, Freed("r#1", BLOCKS)).received == {"r"}


def test_a_pull_that_only_lets_go_reports_nothing(side: WorkerSide, client: Client) -> None:
    order = PullOrder("r", "r#1", "kvd1.x", (), waits=False)
    failed = Failed("r#1", "peer_lost", "gone", quarantined=False, blocks=())
    assert step(side, client, failed, metadata=StepMetadata(pulls=[order])) == Results()


def test_a_refused_ticket_fails_without_asking_the_daemon(side: WorkerSide, client: Client) -> None:
    order = PullOrder("r", "r#1", "", BLOCKS, waits=True, refused="no ticket")
    results = step(side, client, metadata=StepMetadata(pulls=[order]))
    assert (results.received, results.failed, client.calls) == ({"r"}, {"r"}, [])


def test_a_ticket_of_another_prompt_fails_and_lets_the_producer_go(side: WorkerSide, client: Client) -> None:
    order = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, refused="another prompt")
    results = step(side, client, metadata=StepMetadata(pulls=[order]))
    assert (results.received, results.failed) == ({"r"}, {"r"})
    assert client.calls == [("pull", "r#1", "kvd1.x", (), 8.0)]
    assert step(side, client, Done("r#1")) == Results()


AWAY = Unavailable(ErrorCode.DAEMON_LOST, "away")
FULL = Unavailable(ErrorCode.OVERLOADED, "the queue to the daemon is full")


@pytest.mark.parametrize("trouble", [AWAY, FULL], ids=["away", "its queue is full"])
@pytest.mark.parametrize("cancelled", [False, True], ids=["recomputed", "ended by vLLM"])
def test_a_refused_ticket_is_reported_once_however_long_the_daemon_cannot_be_told(
    side: WorkerSide, client: Client, trouble: Unavailable, cancelled: bool
) -> None:
    """vLLM's engine ends at a second report: it knows the request no more, or runs it."""
    client.error = trouble
    order = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, refused="another prompt")
    results = step(side, client, metadata=StepMetadata(pulls=[order]))
    assert (results.received, results.failed) == ({"r"}, {"r"})
    cancels = StepMetadata(cancels=["r#1"] if cancelled else [])
    assert [step(side, client, metadata=metadata) for metadata in (cancels, StepMetadata())] == [Results()] * 2
    assert side.take_counts().failed_pulls == 1
    client.error = None
    assert step(side, client) == Results()
    assert client.calls == [("pull", "r#1", "kvd1.x", (), 8.0)]


def test_a_refused_ticket_is_reported_once_where_the_daemon_stays_away(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PATIENCE_SECONDS", 0.0)
    client.connected = False
    order = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, refused="another prompt")
    results = step(side, client, metadata=StepMetadata(pulls=[order]))
    assert (results.received, results.failed, side.take_counts().failed_pulls) == ({"r"}, {"r"}, 1)
    client.connected = True
    assert step(side, client) == Results()
    assert client.calls == []


@pytest.mark.parametrize(
    "event",
    [
        Done("r#1"),
        Failed("r#1", "peer_lost", "gone", quarantined=True, blocks=BLOCKS),
        Cancelled("r#1", quarantined=False, blocks=BLOCKS),
    ],
)
def test_an_offer_is_held_from_before_the_pull_until_the_pull_has_ended(
    side: WorkerSide, client: Client, event: Any
) -> None:
    step(side, client, metadata=StepMetadata(holds=[HOLD]))
    assert client.calls == [("pull", "r#0", "kvd1.x", (), 3600.0, "hold")]
    pull = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, consumer="r#0")
    step(side, client, metadata=StepMetadata(pulls=[pull]))
    assert client.calls[1:] == [("pull", "r#1", "kvd1.x", BLOCKS, 8.0, "r#0")]
    step(side, client, event)
    assert client.calls[2:] == [("cancel", "r#0")]
    assert step(side, client, Cancelled("r#0", quarantined=False, blocks=())) == Results()


@pytest.mark.parametrize("reached", [True, False], ids=["at once", "when its daemon is back"])
def test_what_is_held_is_let_go_of_by_the_end_of_the_hold(side: WorkerSide, client: Client, reached: bool) -> None:
    """VLLM makes no more steps for a request that it has ended."""
    step(side, client, metadata=StepMetadata(holds=[HOLD]))
    client.error = None if reached else FULL
    step(side, client, metadata=StepMetadata(pulls=[PullOrder("r", "r#1", "kvd1.x", (), waits=False, consumer="r#0")]))
    assert side.changed_unsent() is (None if reached else True)
    client.error = None
    step(side, client)
    assert client.calls[1:] == [("cancel", "r#0")]
    assert not side.changed_unsent()
    assert step(side, client, Cancelled("r#0", quarantined=False, blocks=())) == Results()
    assert len(client.calls) == 2


def test_a_hold_that_was_lost_with_a_session_is_sent_again_while_its_request_queues(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_HOLD_SECONDS", 0.0)
    lost = Failed("r#0", "cancelled", "the session has ended", quarantined=False, blocks=())
    step(side, client, metadata=StepMetadata(holds=[HOLD]))
    step(side, client, lost)
    assert client.calls == [("pull", "r#0", "kvd1.x", (), 3600.0, "hold")] * 2
    client.connected = False
    step(side, client, lost)
    step(side, client, metadata=StepMetadata(pulls=[PullOrder("r", "r#1", "kvd1.x", (), waits=False, consumer="r#0")]))
    client.connected = True
    step(side, client)
    assert [call[:2] for call in client.calls[2:]] == [("pull", "r#0"), ("cancel", "r#0")]


def test_a_hold_that_a_daemon_fails_at_once_is_not_sent_again_with_each_step(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = Failed("r#0", "peer_lost", "no daemon can be met there", quarantined=False, blocks=())
    step(side, client, metadata=StepMetadata(holds=[HOLD]))
    monkeypatch.setattr(side._clock, "look", lambda: None)
    step(side, client, unmet)
    step(side, client)
    assert len(client.calls) == 1
    assert not side.changed_unsent()
    side._clock.now += 1.0
    step(side, client)
    assert client.calls == [("pull", "r#0", "kvd1.x", (), 3600.0, "hold")] * 2
    step(side, client, unmet)
    step(side, client, metadata=StepMetadata(pulls=[PullOrder("r", "r#1", "kvd1.x", (), waits=False, consumer="r#0")]))
    side._clock.now += 1.0
    step(side, client)
    assert [call[:2] for call in client.calls[2:]] == [("pull", "r#1")]  # nobody wants it held any more


@pytest.mark.parametrize("trouble", [AWAY, FULL], ids=["away", "its queue is full"])
def test_a_hold_is_cancelled_however_long_the_daemon_cannot_be_told(
    side: WorkerSide, client: Client, trouble: Unavailable, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(side, client, metadata=StepMetadata(holds=[HOLD]))
    step(
        side, client, metadata=StepMetadata(pulls=[PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, consumer="r#0")])
    )
    monkeypatch.setattr(worker_module, "PATIENCE_SECONDS", 0.0)
    client.error = trouble
    assert step(side, client, Done("r#1")).received == {"r"}
    step(side, client)
    assert len(client.calls) == 2
    client.error = None
    step(side, client)
    assert client.calls[2:] == [("cancel", "r#0")]
    step(side, client)
    assert len(client.calls) == 3


def test_a_pull_is_cancelled_when_the_daemon_takes_requests_again(side: WorkerSide, client: Client) -> None:
    step(side, client, metadata=StepMetadata(pulls=[PULL]))
    client.error = FULL
    assert step(side, client, metadata=StepMetadata(cancels=["r#1"])) == Results()
    client.error = None
    assert step(side, client) == Results()
    assert client.calls[1:] == [("cancel", "r#1")]


def test_a_cancel_of_what_has_ended_meanwhile_is_dropped(side: WorkerSide, client: Client) -> None:
    step(side, client, metadata=StepMetadata(pulls=[PULL]))
    client.error = FULL
    step(side, client, metadata=StepMetadata(cancels=["r#1"]))
    client.error = BadRequest(ErrorCode.UNKNOWN_REQUEST, "no pull is called so")
    assert step(side, client, Done("r#1")).received == {"r"}
    client.error = None
    step(side, client)
    assert len(client.calls) == 1


def test_a_hold_is_not_overtaken_by_its_requests_pull_where_the_daemons_queue_was_full(
    side: WorkerSide, client: Client
) -> None:
    pull = PullOrder("r", "r#1", "kvd1.x", BLOCKS, waits=True, consumer="r#0")
    refusals = iter([FULL, None, None])
    client.pull = lambda *_, **more: client.calls.append(_raised(next(refusals)) or more)  # type: ignore[method-assign]
    side.begin(StepMetadata(holds=[HOLD], pulls=[pull]))
    assert client.calls == []
    side.end()
    assert [call.get("hold", False) for call in client.calls] == [True, False]


def _raised(error: Exception | None) -> None:
    if error is not None:
        raise error


def pass_patience(step: Callable[[], T], monkeypatch: pytest.MonkeyPatch) -> list[T]:
    """Makes a step each second, until the time is over for what has to wait."""
    began, results = time.monotonic(), []
    for second in range(1, math.ceil(PATIENCE_SECONDS) + 2):
        monkeypatch.setattr(time, "monotonic", lambda now=began + second: now)
        results.append(step())
    return results


def test_a_long_step_of_the_engine_is_not_taken_for_its_daemons_absence(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may have been away for a moment of it, and is seen to be back a step later."""
    client.connected = False
    side.begin(StepMetadata(pulls=[PULL], offers=[OFFER]))
    now = time.monotonic() + 10 * PATIENCE_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert side.end() == Results()
    client.connected = True
    side.begin(StepMetadata())
    assert [call[0] for call in client.calls] == ["pull", "offer"]


def test_vllm_is_to_make_steps_while_orders_wait_and_no_longer_than_they_are_tried(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make none for a request that it has ended; of a cancel, which is never given up, no more than that."""
    step(side, client, metadata=StepMetadata(pulls=[PULL]))
    assert side.changed_unsent() is None
    client.error = FULL
    step(side, client, metadata=StepMetadata(cancels=["r#1"]))
    assert side.changed_unsent() is True
    assert side.changed_unsent() is None
    pass_patience(lambda: step(side, client), monkeypatch)
    assert side.changed_unsent() is False
    client.error = None
    step(side, client)
    assert client.calls[1:] == [("cancel", "r#1")]


def test_a_hold_of_an_offer_that_is_gone_is_left_to_the_pull(side: WorkerSide, client: Client) -> None:
    gone = Failed("r#0", "offer_gone", "expired", quarantined=False, blocks=())
    assert step(side, client, gone, metadata=StepMetadata(holds=[HOLD])) == Results()
    assert len(client.calls) == 1


def test_an_offer_ends_when_it_is_released(side: WorkerSide, client: Client) -> None:
    assert step(side, client, metadata=StepMetadata(offers=[OFFER])).sent == set()
    assert client.calls == [("offer", "r#1", 8, BLOCKS, 9.0, 1, SECRET)]
    assert step(side, client, Released("r#1", "expired")).sent == {"r"}
    assert side.take_counts().expired_offers == 1


def test_an_offer_that_is_refused_gives_its_blocks_back(side: WorkerSide, client: Client) -> None:
    assert step(
        side, client, OfferRefused("r#1", "overloaded", "full"), metadata=StepMetadata(offers=[OFFER])
    ).sent == {"r"}
    assert side.take_counts().refused_offers == 1


def test_orders_wait_for_a_daemon_that_comes_back(side: WorkerSide, client: Client) -> None:
    client.connected = False
    lost = Disconnected("daemon_lost", "end of session")
    assert step(side, client, lost, metadata=StepMetadata(pulls=[PULL])) == Results()
    client.connected = True
    step(side, client, Reattached(8, same=False))
    assert client.calls == [("pull", "r#1", "kvd1.x", BLOCKS, 8.0)]


def test_a_loss_during_idleness_is_noticed_before_orders_are_sent(side: WorkerSide, client: Client) -> None:
    client.poll = lambda: setattr(client, "connected", False) or []  # type: ignore[method-assign]
    side.begin(StepMetadata(pulls=[PULL], offers=[OFFER]))
    assert client.calls == []
    client.poll = lambda: setattr(client, "connected", True) or []  # type: ignore[method-assign]
    assert step(side, client) == Results()
    assert [call[0] for call in client.calls] == ["pull", "offer"]


def test_orders_fail_when_the_daemon_stays_away(
    side: WorkerSide, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PATIENCE_SECONDS", 0.0)
    client.connected = False
    offer = OfferOrder("s", "s#2", 8, BLOCKS, SECRET)
    results = step(side, client, metadata=StepMetadata(pulls=[PULL], offers=[offer]))
    assert (results.received, results.failed, results.sent) == ({"r"}, {"r"}, {"s"})


def test_an_order_that_waits_and_is_cancelled_lets_the_producer_go_when_the_daemon_is_back(
    side: WorkerSide, client: Client
) -> None:
    client.connected = False
    side.begin(StepMetadata(pulls=[PULL]))
    results = step(side, client, metadata=StepMetadata(cancels=["r#1"]))
    assert (results.received, results.failed) == ({"r"}, set())
    client.connected = True
    assert step(side, client) == Results()
    assert client.calls == [("pull", "r#1", "kvd1.x", (), 8.0)]
    assert step(side, client, Done("r#1")) == Results()


def test_what_the_client_refuses_fails_at_once(side: WorkerSide, client: Client) -> None:
    client.error = BadRequest(ErrorCode.BAD_BLOCKS, "id")
    results = step(side, client, metadata=StepMetadata(pulls=[PULL]))
    assert (results.received, results.failed) == ({"r"}, {"r"})


def test_the_place_is_told_when_it_changes(side: WorkerSide, client: Client) -> None:
    assert side.changed_endpoint() is not None
    assert side.changed_endpoint() is None
    client.connected = False
    assert side.endpoint.incarnation == 0
    assert side.changed_endpoint() is not None
    client.connected, client.incarnation = True, 8
    endpoint = side.changed_endpoint()
    assert endpoint is not None
    assert endpoint.incarnation == 8


@pytest.mark.parametrize("metadata", [StepMetadata(offers=[OFFER]), StepMetadata(pulls=[PULL])], ids=["offer", "pull"])
def test_nothing_is_offered_or_pulled_while_kernels_of_earlier_steps_may_use_the_blocks(
    side: WorkerSide, client: Client, gpu: Gpu, metadata: StepMetadata
) -> None:
    gpu.busy = True
    side.launched()
    step(side, client, metadata=metadata)
    assert client.calls == []
    gpu.busy = False
    side.end()
    assert len(client.calls) == 1


@pytest.mark.parametrize(
    "metadata",
    [
        StepMetadata(holds=[HOLD]),
        StepMetadata(pulls=[PullOrder("s", "s#1", "kvd1.x", (), waits=False, consumer="s#0")]),
        StepMetadata(pulls=[PullOrder("s", "s#1", "kvd1.x", BLOCKS, waits=True, refused="another prompt")]),
        StepMetadata(cancels=["r#1"]),
        StepMetadata(cancels=["early"]),
    ],
    ids=["hold", "let go", "refused", "cancel", "cancel of a pull that waits"],
)
def test_what_names_no_blocks_waits_for_no_kernels_and_overtakes_what_does(
    side: WorkerSide, client: Client, gpu: Gpu, metadata: StepMetadata
) -> None:
    """VLLM makes no steps in which it could leave later once the engine is idle."""
    step(side, client, metadata=StepMetadata(pulls=[PULL]))
    gpu.busy = True
    side.launched()
    step(side, client, metadata=StepMetadata(pulls=[PullOrder("q", "early", "kvd1.x", BLOCKS, waits=True)]))
    assert len(client.calls) == 1
    side.begin(metadata)
    assert len(client.calls) == 2


def test_kernels_that_take_long_are_no_reason_to_give_an_order_up(
    side: WorkerSide, client: Client, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PATIENCE_SECONDS", 0.0)
    gpu.busy = True
    side.launched()
    assert step(side, client, metadata=StepMetadata(pulls=[PULL])) == Results()
    gpu.busy = False
    assert side.end() == Results()
    assert len(client.calls) == 1


TURN = OfferOrder("r", "r#2", 8, BLOCKS, SECRET, turn_ttl=70.0)


def test_a_kept_turn_lasts_for_a_time_of_its_own_and_ends_beside_the_requests(side: WorkerSide, client: Client) -> None:
    results = step(side, client, Released("r#2", "read"), metadata=StepMetadata(offers=[TURN]))
    assert client.calls == [("offer", "r#2", 8, BLOCKS, 70.0, 1, SECRET)]
    assert results.sent == set()
    assert side.take_turn_ends() == [("r#2", "read")]
    assert side.take_turn_ends() == []


def test_a_turn_that_is_given_up_is_withdrawn_and_ends_when_the_daemon_says_so(
    side: WorkerSide, client: Client
) -> None:
    step(side, client, metadata=StepMetadata(offers=[TURN]))
    step(side, client, metadata=StepMetadata(withdrawals=["r#2"]))
    assert client.calls[-1] == ("cancel", "r#2")
    assert side.take_turn_ends() == []
    step(side, client, Released("r#2", "withdrawn"))
    assert side.take_turn_ends() == [("r#2", "withdrawn")]
    step(side, client, metadata=StepMetadata(withdrawals=["r#2"]))
    assert client.calls[-1] == ("cancel", "r#2")  # not again: it has ended


def test_a_turn_that_is_given_up_before_it_is_offered_is_not_offered(
    side: WorkerSide, client: Client, gpu: Gpu
) -> None:
    gpu.busy = True
    side.launched()
    step(side, client, metadata=StepMetadata(offers=[TURN]))
    step(side, client, metadata=StepMetadata(withdrawals=["r#2"]))
    assert side.take_turn_ends() == [("r#2", "withdrawn")]
    gpu.busy = False
    step(side, client)
    assert client.calls == []


def test_a_turn_that_the_daemon_refuses_has_ended(side: WorkerSide, client: Client) -> None:
    refused = OfferRefused("r#2", ErrorCode.BAD_BLOCKS, "no")
    step(side, client, refused, metadata=StepMetadata(offers=[TURN]))
    assert side.take_turn_ends() == [("r#2", "refused")]
