import contextlib
import io
import json
import signal
import subprocess
import sys

import pytest
import structlog
from prometheus_client import CollectorRegistry

from kvd.actors.runtime.actor import Actor, Dispatcher, OnFailure, call
from kvd.actors.runtime.supervisor import LoggingSupervisor
from kvd.bench.spec import flat_spec
from kvd.client import Blocks, Worker
from kvd.daemon import logs
from kvd.errors import BadRequest, ErrorCode
from kvd.metrics import Metrics
from tests.simulator.virtual.loop import VirtualLoop
from tests.support.patience import PATIENCE

SECRET = "kvd1-a-ticket"  # noqa: S105


class Clumsy(Actor):
    name = "gateway"
    on_failure = OnFailure.RESUME

    def text(self, message: str) -> None:
        ticket = message
        {}[ticket]

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
    call(clumsy.text, SECRET)
    clumsy.loop.run_until(0)
    (line,) = lines()
    assert SECRET not in line
    assert "KeyError" in line
    assert "test_logs.py" in line


def test_the_text_of_an_error_of_kvds_own_is_logged(lines, clumsy):
    call(clumsy.number, 7)
    clumsy.loop.run_until(0)
    assert "a text of kvd's own" in lines()[0].replace('\\"', "")


def test_messages_that_fail_again_and_again_do_not_fill_the_log(lines, clumsy):
    for _ in range(1000):
        call(clumsy.text, SECRET)
    clumsy.loop.run_until(0)
    assert 1 <= len(lines()) <= 20


def test_what_others_say_moves_no_cursor(lines):
    structlog.get_logger("x").warning("dropped", agent="x\x1b[2Jy\x9b\u202e\u2028z")
    (line,) = lines()
    assert "x\x1b[" not in line
    assert not {"\x9b", "\u202e", "\u2028"}.intersection(line)


def test_what_is_logged_as_json_is_json(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.configure("info", "json")
    structlog.get_logger("x").error("failed", exc_info=ValueError(SECRET))
    structlog.reset_defaults()
    assert json.loads(stream.getvalue())["error"] == "ValueError"


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("level", ["info", "warning", "error", "critical"])
def test_what_logs_goes_on_where_nobody_can_read_the_log(monkeypatch, style, level):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        logs.configure("info", style)
        getattr(structlog.get_logger("kvd.test"), level)("a line that is lost")
        structlog.reset_defaults()
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.real
@pytest.mark.timeout(300)
def test_a_daemon_whose_log_has_lost_its_reader_serves_and_ends_when_it_is_asked_to(tmp_path):
    path = tmp_path / "d.sock"
    command = [sys.executable, "-m", "kvd.cli.main", "serve", "--name", "d", "--socket", str(path)]
    with subprocess.Popen([*command, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        try:
            assert any("serving" in line for line in daemon.stderr)
            daemon.stderr.close()
            daemon.send_signal(signal.SIGHUP)  # logs a line
            with Worker.attach(str(path), name="w", spec=flat_spec(4, 4096), timeout=PATIENCE) as worker:
                assert worker.offer("o", tokens=16, blocks=[Blocks(0, 0, [1])], ttl=60.0, timeout=PATIENCE)
                worker.detach(PATIENCE)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(PATIENCE) == 0
        finally:
            daemon.kill()
    assert not path.exists()
