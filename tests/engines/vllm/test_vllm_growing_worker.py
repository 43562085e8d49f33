"""The worker's half of offers that grow, against a scripted client: what the daemon is told, and what vLLM is told."""

from typing import Any

import pytest

from kvd.client import Blocks, NotExtended, Offered, OfferRefused, Released
from kvd.engines.kernels import Kernels
from kvd.engines.vllm.metadata import ExtendOrder, GrowingOrder, OpenOrder, StepMetadata, WithdrawOrder
from kvd.engines.vllm.worker import WorkerSide
from kvd.errors import BadRequest, ErrorCode, Unavailable
from tests.engines.vllm.test_vllm_worker import Client, pass_patience, spec

SECRET = bytes(16)
OPEN = OpenOrder("r", "o", SECRET, 1)
FIRST = ExtendOrder("r", "o", 4, (Blocks(0, 0, [1]),))
SECOND = ExtendOrder("r", "o", 8, (Blocks(0, 1, [2]),))
CLOSE = ExtendOrder("r", "o", 8, (), closes=True)
WITHDRAW = WithdrawOrder("r", "o")

OPENED = ("open", "o", 9.0, 1, SECRET)
TOLD_FIRST = ("extend", "o", 4, FIRST.blocks)
TOLD_SECOND = ("extend", "o", 8, SECOND.blocks)
CLOSED = ("close", "o", 8, ())
CANCELLED = ("cancel", "o")


class GrowingClient(Client):
    """With the calls for offers that grow."""

    def open_offer_nowait(self, offer: str, *, ttl: float, consumers: int, secret: bytes) -> None:
        self._call("open", offer, ttl, consumers, secret)

    def extend_offer(self, offer: str, *, tokens: int, blocks: Any) -> None:
        self._call("extend", offer, tokens, blocks)

    def close_offer(self, offer: str, *, tokens: int, blocks: Any) -> None:
        self._call("close", offer, tokens, blocks)


class Gpu:
    """Kernels of a step, which end when `done` is set."""

    def __init__(self) -> None:
        self.steps: list[Gpu] = []
        self.done = True

    def launch(self) -> "Gpu":
        made = Gpu()
        made.done = self.done
        self.steps.append(made)
        return made

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        raise AssertionError


class Stage:
    """A worker's half, its client and its GPU."""

    def __init__(self) -> None:
        self.client, self.gpu = GrowingClient(), Gpu()
        self.side = WorkerSide(
            self.client, "vllm-0", spec(), offer_ttl=9.0, pull_timeout=8.0, kernels=Kernels(self.gpu.launch)
        )

    def step(self, *orders: GrowingOrder, launched: bool = True) -> set[str]:
        """A step of the engine; returns the requests whose blocks are vLLM's again."""
        self.side.begin(StepMetadata(growing=list(orders)))
        if launched:
            self.side.launched()
        return self.side.end().sent

    def told(self) -> list[tuple[Any, ...]]:
        """What the daemon was told since the last call."""
        calls, self.client.calls = self.client.calls, []
        return calls

    def says(self, *events: Any) -> None:
        self.client.events += events


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_what_a_step_computes_is_told_as_it_ends_and_its_blocks_are_free_when_the_daemon_lets_go(stage: Stage) -> None:
    assert stage.step(OPEN, FIRST) == set()
    assert stage.told() == [OPENED, TOLD_FIRST]
    stage.says(Offered("o", "kvd1.x"))
    assert stage.step(SECOND) == set()
    assert stage.told() == [TOLD_SECOND]
    assert stage.step(CLOSE) == set()
    assert stage.told() == [CLOSED]
    stage.says(Released("o", "read"))
    assert stage.step() == {"r"}
    assert stage.step() == set()


def test_nothing_is_told_before_its_kernels_have_ended_nor_before_what_is_in_front_of_it(stage: Stage) -> None:
    stage.gpu.done = False
    stage.step(OPEN, FIRST)
    assert stage.told() == [OPENED]
    stage.step(SECOND)
    stage.gpu.steps[1].done = True
    stage.step()
    assert stage.told() == []
    assert stage.side.changed_unsent() is True
    stage.gpu.steps[0].done = True
    stage.step()
    assert stage.told() == [TOLD_FIRST, TOLD_SECOND]


def test_of_steps_whose_launch_vllm_does_not_tell_all_is_told_when_the_next_one_begins(stage: Stage) -> None:
    """Pipeline stages before the last one, where vLLM drafts: it says so of the last stage alone."""
    stage.step(OPEN, FIRST, launched=False)
    assert stage.told() == [OPENED]
    stage.gpu.done = False
    stage.step(SECOND, launched=False)
    stage.step(CLOSE, launched=False)
    assert stage.told() == []
    for kernels in stage.gpu.steps:
        kernels.done = True
    stage.step()
    assert stage.told() == [TOLD_FIRST, TOLD_SECOND, CLOSED]
    stage.says(Released("o", "read"))
    assert stage.step() == {"r"}


def test_a_refused_close_frees_the_blocks_where_vllm_tells_of_no_launch(stage: Stage) -> None:
    stage.step(OPEN, FIRST, launched=False)
    stage.step(CLOSE)
    stage.says(NotExtended("o", ErrorCode.BAD_BLOCKS, "not all blocks"))
    assert stage.step() == set()
    stage.says(Released("o", "withdrawn"))
    assert stage.step() == {"r"}


@pytest.mark.parametrize("lost", [Released("o", "expired"), Released("o", "daemon lost"), Released("o", "withdrawn")])
def test_an_offer_that_ended_before_its_close_is_opened_again_and_told_all_it_had(stage: Stage, lost: Released) -> None:
    stage.step(OPEN, FIRST)
    stage.told()
    stage.says(lost)
    assert stage.step(SECOND) == set()
    assert stage.told() == [OPENED, TOLD_FIRST, TOLD_SECOND]
    stage.step(CLOSE)
    stage.says(Released("o", "expired"))
    assert stage.step() == {"r"}
    assert stage.side.take_counts().expired_offers == 1


def test_an_offer_whose_answer_was_lost_is_opened_again(stage: Stage) -> None:
    stage.step(OPEN)
    stage.says(OfferRefused("o", ErrorCode.DAEMON_LOST, "lost"))
    stage.step()
    assert stage.told() == [OPENED, OPENED]


def test_an_offer_that_its_readers_are_done_with_is_told_nothing_more(stage: Stage) -> None:
    stage.step(OPEN, FIRST)
    stage.says(Released("o", "read"))
    stage.step(SECOND)
    stage.told()
    assert stage.step(CLOSE) == {"r"}
    assert stage.told() == []
    assert stage.side.changed_unsent() is None


@pytest.mark.parametrize("before", [[], [FIRST]])
def test_an_offer_that_is_withdrawn_is_cancelled_and_never_closed(stage: Stage, before: list[Any]) -> None:
    stage.step(OPEN, *before)
    stage.told()
    assert stage.step(WITHDRAW) == set()
    assert stage.told() == [CANCELLED]
    stage.says(Released("o", "withdrawn"))
    assert stage.step() == set()
    assert stage.told() == []
    stage.step(OPEN)
    assert stage.told() == [OPENED]


def test_an_offer_is_withdrawn_before_the_daemon_heard_of_it(stage: Stage) -> None:
    stage.client.connected = False
    stage.step(OPEN)
    stage.step(WITHDRAW)
    stage.client.connected = True
    stage.step()
    assert stage.told() == []


def test_a_refused_offer_is_told_nothing_and_its_request_ends_at_once(stage: Stage) -> None:
    stage.step(OPEN)
    stage.says(OfferRefused("o", ErrorCode.POOL_BUSY, "busy"))
    stage.step(FIRST)
    assert stage.told() == [OPENED]
    assert stage.step(CLOSE) == {"r"}
    assert stage.side.take_counts().refused_offers == 1


def test_a_refused_extension_cancels_the_offer(stage: Stage) -> None:
    stage.step(OPEN, FIRST)
    stage.says(NotExtended("o", ErrorCode.OVERLOADED, "full"))
    stage.step(SECOND)
    assert stage.told() == [OPENED, TOLD_FIRST, CANCELLED]
    assert stage.step(CLOSE) == {"r"}
    stage.says(Released("o", "withdrawn"))
    assert stage.step() == set()


def test_a_refused_close_frees_the_blocks_only_when_the_offer_has_ended(stage: Stage) -> None:
    stage.step(OPEN, FIRST)
    stage.step(CLOSE)
    stage.says(NotExtended("o", ErrorCode.OVERLOADED, "full"))
    assert stage.step() == set()
    assert stage.told()[-1] == CANCELLED
    stage.says(Released("o", "withdrawn"))
    assert stage.step() == {"r"}


def test_orders_wait_for_a_daemon_that_is_away_and_then_fail(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.client.connected = False
    stage.step(OPEN, FIRST)
    assert stage.step(CLOSE) == set()
    assert stage.side.changed_unsent() is True
    assert set().union(*pass_patience(stage.step, monkeypatch)) == {"r"}
    assert stage.side.changed_unsent() is False
    assert stage.side.take_counts().refused_offers == 1


def test_an_offer_that_has_ended_unnoticed_is_opened_again_once_its_end_is_told(stage: Stage) -> None:
    stage.step(OPEN)
    stage.told()
    stage.client.error = BadRequest(ErrorCode.UNKNOWN_REQUEST, "no such offer")
    stage.step(FIRST)
    stage.client.error = None
    stage.says(Released("o", "expired"))
    stage.step()
    assert stage.told() == [OPENED, TOLD_FIRST]


def test_an_offer_that_the_daemon_cannot_be_told_of_is_cancelled_when_it_can(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.step(OPEN, FIRST)
    stage.told()
    stage.client.error = Unavailable(ErrorCode.OVERLOADED, "full")
    stage.step(SECOND)
    pass_patience(stage.step, monkeypatch)
    assert stage.step(CLOSE) == {"r"}
    stage.client.error = None
    stage.step()
    assert stage.told() == [CANCELLED]


def test_a_name_that_still_stands_for_another_request_is_not_used_again(stage: Stage) -> None:
    stage.step(OPEN, FIRST)
    stage.step(WITHDRAW)
    stage.told()
    assert stage.step(OpenOrder("s", "o", SECRET, 1)) == set()
    assert stage.step(ExtendOrder("s", "o", 8, (), closes=True)) == {"s"}
    assert stage.told() == []


@pytest.mark.parametrize("reason", ["read", "expired"])
def test_an_offer_keeps_its_end_though_another_request_is_computed_under_its_name(stage: Stage, reason: str) -> None:
    stage.step(OPEN, FIRST)
    stage.step(SECOND)
    stage.step(CLOSE)
    stage.told()
    assert stage.step(OpenOrder("s", "o", SECRET, 1), ExtendOrder("s", "o", 4, (Blocks(0, 0, [3]),))) == set()
    assert stage.told() == []
    stage.says(Released("o", reason))
    assert stage.step() == {"r"}
    assert stage.step(ExtendOrder("s", "o", 4, (), closes=True)) == {"s"}
    assert stage.told() == []
