"""The driver over a simulated connection, step by step."""

import re

import pytest

from kvd import limits
from kvd.client import Blocks, Done, Failed, Worker
from kvd.client.driver import FRAMES_PER_STEP, Dependencies, Driver
from kvd.client.requests.pulls import GRACE_SECONDS
from kvd.errors import BadRequest, ErrorCode
from kvd.net.interface import WorkerFrame
from kvd.protocol import codec
from kvd.protocol import worker as notified
from kvd.protocol.worker import Attached, Cancel, Notifications, Pull
from tests.client.conftest import Spec
from tests.simulator.virtual.cache import make_cache
from tests.simulator.virtual.line import SimConnection, SimPool
from tests.simulator.virtual.loop import Process
from tests.simulator.virtual.network import Network, SimWorkerPort
from tests.simulator.virtual.world import World


class Host:
    """A worker's port that hears everything and answers what the test says."""

    def __init__(self):
        self.world = World(0)
        self.network = Network(self.world)
        self.process = Process(self.world.loop, "daemon")
        self.worker_port = SimWorkerPort(self.network, self.process, "daemon")
        self.requests = []
        self.worker_port.start(self.on_event)

    def on_event(self, event):
        if isinstance(event, WorkerFrame):
            self.requests.append(codec.worker_requests.decode(event.frame))


def lend(host, memory, size, incarnation=1, connection=1):
    """The daemon's answer to an attach."""
    attached = Attached(b"s" * 16, "ipc://d", "d", incarnation, "sim://d", size, "plain", kept=False)
    host.worker_port.send_session(connection, codec.encode(attached), (memory,))


def lent_driver(host):
    cache = make_cache("flash-hnd", 0, 1, num_blocks=4, block_tokens=2, groups=1)
    worker = Process(host.world.loop, "worker")
    connection = SimConnection(host.world.kernel, host, worker, lambda _frame: None)
    dependencies = Dependencies(connection, connection, lambda number, _: SimPool(host.world.kernel, number), b"i" * 16)
    driver = Driver("", "w", cache.raw, cache.spec.pool_bytes, dependencies)
    driver.step(0.0)
    lend(host, host.world.kernel.create("daemon", cache.spec.pool_bytes), cache.spec.pool_bytes)
    host.world.loop.run_until(0.1)
    driver.step(0.1)
    return driver


def attached_driver(host):
    driver = lent_driver(host)
    assert driver.connected
    return driver


def test_a_pull_that_is_given_up_is_asked_for_in_the_same_step():
    host = Host()
    driver = attached_driver(host)
    driver.request(driver.core.pull("r", "ticket", [Blocks(0, 0, [1])], 1.0, 0.1))
    driver.step(1.0 + GRACE_SECONDS)
    driver.step(1.2 + GRACE_SECONDS)
    host.world.loop.run_until(1.0)
    assert [type(request) for request in host.requests] == [Pull, Cancel]


def test_what_came_while_the_engine_stood_still_counts_though_the_pull_is_overdue_and_more_is_there_than_a_step_reads():
    host = Host()
    driver = attached_driver(host)
    count = FRAMES_PER_STEP + 1
    for number in range(count):
        driver.request(driver.core.pull(f"r{number}", "ticket", [Blocks(0, 0, [1])], 1.0, 0.1))
    host.world.loop.run_until(0.2)
    driver.step(0.2)
    for number in range(count):
        host.worker_port.send(b"s" * 16, codec.encode(Notifications(number + 1, (notified.Done(f"r{number}"),))))
    host.world.loop.run_until(5.0)
    for now in (5.0, 5.01):
        driver.step(now)
    assert driver.core.take_events() == [Done(f"r{number}") for number in range(count)]


def test_what_comes_a_moment_after_the_engine_stood_still_counts_too():
    host = Host()
    driver = attached_driver(host)
    driver.request(driver.core.pull("r", "ticket", [Blocks(0, 0, [1])], 1.0, 0.1))
    driver.step(0.2)
    driver.step(5.0)
    assert 5.0 < driver.next_timer() <= 5.0 + limits.LAST_LOOK_SECONDS, "it is looked for again soon"
    host.worker_port.send(b"s" * 16, codec.encode(Notifications(1, (notified.Done("r"),))))
    host.world.loop.run_until(5.05)
    driver.step(5.05)
    assert driver.core.take_events() == [Done("r")]


def test_a_pull_without_an_outcome_ends_though_each_step_of_the_engine_takes_long():
    driver = attached_driver(Host())
    driver.request(driver.core.pull("r", "ticket", [Blocks(0, 0, [1])], 1.0, 0.1))
    for now in (1.0, 2.0, 3.0):
        driver.step(now)
    [failed] = driver.core.take_events()
    assert (type(failed), failed.code) == (Failed, "deadline")


def test_requests_end_with_their_daemon_though_its_successor_is_never_heard_on_the_request_socket(monkeypatch):
    host = Host()
    driver = attached_driver(host)
    driver.request(driver.core.pull("r", "ticket", [Blocks(0, 0, [1])], 60.0, 0.1))
    driver._connection.session.hang_up(lose=True)
    host.world.loop.run_until(0.2)
    driver.step(0.2)
    driver.step(0.3)  # it has connected again, and the process lives
    monkeypatch.setattr(driver._connection._lender, "dead", True)
    monkeypatch.setattr(driver._connection, "join", lambda _seconds: False)
    lend(host, host.world.kernel.dup(driver.pool.descriptor), driver._loan._pool_bytes, incarnation=2, connection=2)
    host.world.loop.run_until(0.4)
    driver.step(0.4)
    assert not driver.connected
    assert [event.code for event in driver.core.take_events() if isinstance(event, Failed)] == ["daemon_lost"]


def test_a_worker_that_has_its_pool_is_told_that_its_requests_are_not_answered(monkeypatch):
    monkeypatch.setattr(SimConnection, "join", lambda _connection, _seconds: False)
    driver = lent_driver(Host())
    assert re.match(r"a pool, but no answer to requests, from .* within 1\.0 s", driver.no_answer(1.0).text)


def test_an_answer_that_is_none_as_it_joins_is_tried_again(monkeypatch):
    def refuse(_connection, _seconds):
        raise BadRequest(ErrorCode.BAD_MESSAGE, "a frame announces 2 GiB")

    monkeypatch.setattr(SimConnection, "join", refuse)
    driver = lent_driver(Host())
    assert not driver.connected
    assert driver.failed is None
    assert driver.next_timer() < 1.0


def test_a_path_that_is_too_long_for_a_socket_is_refused_at_once():
    with pytest.raises(BadRequest, match="has 200 bytes; a socket's has at most 107") as caught:
        Worker.attach(200 * "x", name="w", spec=Spec())
    assert caught.value.code is ErrorCode.BAD_CONFIG
