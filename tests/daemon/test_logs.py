import io
import json
import sys

import pytest
import structlog
from prometheus_client import CollectorRegistry

from kvd.actors.runtime.actor import Actor, Dispatcher, OnFailure, handles
from kvd.actors.runtime.supervisor import LoggingSupervisor
from kvd.daemon import logs
from kvd.errors import BadRequest, ErrorCode
from kvd.metrics import Metrics
from tests.simulator.virtual.loop import VirtualLoop

SECRET = "kvd1-a-ticket"  # noqa: S105


class Clumsy(Actor):
    name = "gateway"
    on_failure = OnFailure.RESUME

    @handles(str)
    def text(self, message: str) -> None:
        ticket = message
        {}[ticket]

    @handles(int)
    def number(self, message: int) -> None:
        raise BadRequest(ErrorCode.BAD_MESSAGE, "a text of kvd's own")


@pytest.fixture(params=["json", "console"])
def lines(request, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.configure("info", request.param)
    yield lambda: stream.getvalue().splitlines()
    structlog.reset_defaults()


@pytest.fixture
def clumsy(monkeypatch):
    monkeypatch.setattr("kvd.actors.runtime.supervisor._log", structlog.get_logger("kvd.actors"))
    return Clumsy(Dispatcher(VirtualLoop(), LoggingSupervisor(Metrics(CollectorRegistry()), lambda _why: None)))


def test_a_failure_is_logged_with_where_it_happened_and_without_what_the_message_held(lines, clumsy):
    clumsy.tell(SECRET)
    clumsy.loop.run_until(0)
    (line,) = lines()
    assert SECRET not in line
    assert "KeyError" in line
    assert "test_logs.py" in line


def test_the_text_of_an_error_of_kvds_own_is_logged(lines, clumsy):
    clumsy.tell(7)
    clumsy.loop.run_until(0)
    assert "a text of kvd's own" in lines()[0].replace('\\"', "")


def test_messages_that_fail_again_and_again_do_not_fill_the_log(lines, clumsy):
    for _ in range(1000):
        clumsy.tell(SECRET)
    clumsy.loop.run_until(0)
    assert 1 <= len(lines()) <= 20


def test_what_is_logged_as_json_is_json(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.configure("info", "json")
    structlog.get_logger("x").error("failed", exc_info=ValueError(SECRET))
    structlog.reset_defaults()
    assert json.loads(stream.getvalue())["error"] == "ValueError"
