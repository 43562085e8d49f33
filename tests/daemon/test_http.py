"""The HTTP port, asked by those who mean well, slowly and badly."""

import contextlib
import gc
import os
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from kvd import limits
from kvd.daemon.health import Health
from kvd.daemon.http import HttpServer
from kvd.errors import BadRequest
from kvd.metrics import Metrics
from tests.support.fleet import until
from tests.support.patience import MOMENT

SLOW = 2000
REST_SECONDS = 0.001


class Served:
    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.health = Health(self.metrics)
        self.server = HttpServer("127.0.0.1:0", self.metrics.registry, self.health)
        host, _, port = self.server.address.rpartition(":")
        self.place = host, int(port)

    def get(self, path: str) -> tuple[int, str]:
        self.health.beat()  # no event loop is here that could hang
        try:
            with urllib.request.urlopen(f"http://{self.server.address}{path}", timeout=MOMENT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def send(self, data: bytes) -> bytes:
        with socket.create_connection(self.place, timeout=MOMENT) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "kvd-http"] == []


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * SLOW), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_three_paths_say_how_the_daemon_is(served: Served) -> None:
    assert served.get("/livez") == (200, "alive\n")
    assert served.get("/readyz") == (503, "starting: the daemon has not finished starting\n")
    served.health.set("starting", None)
    assert served.get("/readyz?verbose") == (200, "ready\n")
    served.health.note("peer x", "its memory is not reached", 7.0)
    served.health.note("peer y", "nor its", 70.0)
    noted = "ready\npeer y: for 70 s, nor its\npeer x: for 7 s, its memory is not reached\n"
    assert served.get("/readyz") == (200, noted)
    served.health.note("peer x", None, 0.0)
    served.health.note("peer y", None, 0.0)
    assert served.get("/readyz") == (200, "ready\n")
    status, text = served.get("/metrics")
    assert status == 200
    assert "kvd_ready 1.0" in text
    assert served.get("/else") == (404, "paths: /metrics, /livez, /readyz\n")


def test_what_is_no_request_is_refused_and_changes_nothing(served: Served) -> None:
    assert served.send(b"\x00\xff\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert served.send(b"POST /livez HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    long = b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2 * limits.MAX_HTTP_REQUEST_BYTES
    assert served.send(long).startswith(b"HTTP/1.1 431 ")
    assert served.get("/livez") == (200, "alive\n")


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=abc", "text/plain;version=z;escaping=values"])
def test_a_format_that_is_none_is_refused_counted_and_logged_by_nobody(served: Served, accept: str, caplog) -> None:
    said = served.send(f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode())
    assert said.startswith(b"HTTP/1.1 400 ")
    assert accept.encode() in said
    assert served.send(b"\x00\xff\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert "kvd_http_malformed_total 2.0" in served.get("/metrics")[1]
    assert caplog.records == []


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/nowhere"])
def test_head_is_answered_as_get_is_without_the_body(served: Served, path: str) -> None:
    request = f"{{}} {path} HTTP/1.1\r\nHost: x\r\n\r\n"
    head, _, body = served.send(request.format("GET").encode()).partition(b"\r\n\r\n")
    assert body
    same = served.send(request.format("HEAD").encode())
    assert same.endswith(b"\r\n\r\n")
    assert same.partition(b"\r\n")[0] == head.partition(b"\r\n")[0]
    if path != "/metrics":  # which differ from one moment to the next
        assert same == head + b"\r\n\r\n"


def test_a_request_that_fails_by_a_defect_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()
    monkeypatch.setattr(served.server, "_answer", lambda _request: 1 / 0)
    with capture_logs() as logs:
        for _ in range(3):
            assert served.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        served.server.close()
        gc.collect()
    assert [type(entry["exc_info"]) for entry in logs] == [ZeroDivisionError]
    assert not caplog.records  # asyncio's own, of errors that nobody asked about


@given(steps=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 0.1)), min_size=1))
def test_who_rests_as_it_is_told_has_no_more_than_its_share_of_a_core(steps: list[tuple[float, float]]) -> None:
    served = Served()
    served.server.close()  # its thread is not there to rest
    began = now = 10.0
    used = 0.0
    for idle, work in steps:
        now, used = now + idle + work, used + work
        now += served.server._rest(now, used)
        assert used <= limits.HTTP_SHARE * (now - began) + 1e-9


@pytest.fixture
def did(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the thread does from now on: a "read", the "end" of a connection, a "rest", of a millisecond here."""
    steps: list[str] = []
    receive = served.server._loop.sock_recv

    async def read(connection: socket.socket, size: int) -> bytes:
        received = await receive(connection, size)
        steps.append("read" if received else "end")
        return received

    def rest(_now: float, _used: float) -> float:
        steps.append("rest")
        return REST_SECONDS

    monkeypatch.setattr(served.server._loop, "sock_recv", read)
    monkeypatch.setattr(served.server, "_rest", rest)
    monkeypatch.setattr(limits, "HTTP_SECONDS", MOMENT)  # a busy machine wakes the thread late, hundreds of times
    return steps


def rests(did: list[str], connections: int) -> int:
    """How often the thread has rested: once for each of `connections`, and after each read from them, to their end."""
    for _ in until("the end of all connections", MOMENT):
        if did.count("end") == connections and did[-1] == "rest":
            break
    text = " ".join(did).replace("read rest", "").replace("end rest", "")
    assert text.split() == ["rest"] * connections
    return did.count("rest")


def test_it_rests_after_each_of_very_many_requests(served: Served, did: list[str]) -> None:
    began = time.monotonic()
    for _ in range(100):
        assert served.get("/livez")[0] == 200
    assert rests(did, 100) == 300
    assert time.monotonic() - began >= 100 * REST_SECONDS


def test_so_it_does_for_what_follows_a_request(served: Served, did: list[str]) -> None:
    began = time.monotonic()
    size = 4 * limits.MIB
    served.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(size))
    times = rests(did, 1)
    assert times >= size // limits.MAX_HTTP_REQUEST_BYTES
    assert time.monotonic() - began >= (times - 1) * REST_SECONDS


def test_so_it_does_for_a_request_in_single_bytes(served: Served, did: list[str], monkeypatch) -> None:
    receive = served.server._loop.sock_recv
    monkeypatch.setattr(served.server._loop, "sock_recv", lambda connection, _size: receive(connection, 1))
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    began = time.monotonic()
    assert served.send(request).startswith(b"HTTP/1.1 200 ")
    assert rests(did, 1) == len(request) + 2
    assert time.monotonic() - began >= len(request) * REST_SECONDS


def test_a_request_of_very_many_lines_is_not_read_to_its_end(served: Served) -> None:
    """A thousand short headers take as long to read as fifty requests."""
    head = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
    assert served.send(head + b"a:\r\n" * (limits.MAX_HTTP_LINES - 3) + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert served.send(head + b"a:\r\n" * (limits.MAX_HTTP_LINES - 2) + b"\r\n").startswith(b"HTTP/1.1 431 ")


def test_nobody_waits_for_long_for_what_the_thread_has_done_for_others() -> None:
    served = Served()
    served.server.close()  # its thread is not there to rest
    assert served.server._rest(1000.0, 50.0) == limits.HTTP_REST_SECONDS
    assert served.server._rest(1000.5, 50.0) == limits.HTTP_REST_SECONDS - 0.5


@pytest.mark.usefixtures("many_descriptors")
def test_two_thousand_slow_connections_take_neither_threads_nor_descriptors_nor_liveness(served: Served) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.enumerate()
    with contextlib.ExitStack() as stack:
        for number in range(SLOW):
            slow = stack.enter_context(socket.create_connection(served.place, timeout=MOMENT))
            with contextlib.suppress(OSError):  # it was hung up on already
                slow.send(b"GET /livez HTTP/1.1\r\nX: ")
            if number % (limits.HTTP_BACKLOG // 2) == 0:  # so the kernel's queue never overflows
                assert served.get("/livez") == (200, "alive\n")
        assert served.get("/livez") == (200, "alive\n")
        assert set(threading.enumerate()) <= set(threads)
        until = time.monotonic() + MOMENT
        while len(os.listdir("/proc/self/fd")) > before + SLOW + limits.MAX_HTTP_CONNECTIONS:
            assert time.monotonic() < until
            assert served.get("/livez") == (200, "alive\n")


def test_a_connection_that_says_nothing_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_SECONDS", 0.2)
    assert served.send(b"GET /livez") == b""


@pytest.mark.parametrize("host", ["é..b", "a" * 70])
def test_a_host_that_is_no_name_is_refused(served: Served, host: str) -> None:
    with pytest.raises(BadRequest, match=f"http: cannot listen on '{host}:0'"):
        HttpServer(f"{host}:0", CollectorRegistry(), served.health)


def test_an_address_that_cannot_be_bound_is_named(served: Served) -> None:
    with pytest.raises(BadRequest, match=f"http: cannot listen on '{served.server.address}'"):
        HttpServer(served.server.address, CollectorRegistry(), served.health)
