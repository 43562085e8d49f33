"""The thread of transfers, without a daemon."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.engines.sglang.transfers import Transfers
from kvd.errors import ErrorCode, refusal
from tests.support.patience import PATIENCE


class Client:
    """Refuses the first cancels."""

    def __init__(self, *codes: ErrorCode) -> None:
        self._codes = list(codes)
        self.cancelled: list[str] = []
        self.taken = threading.Event()

    def cancel(self, name: str) -> None:
        if self._codes:
            raise refusal(self._codes.pop(0), "not now")
        self.cancelled.append(name)
        self.taken.set()


@pytest.fixture
def transfers() -> Iterator[Any]:
    made = Transfers()
    yield made
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
