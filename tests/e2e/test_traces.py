"""Two daemons that export their spans by OTLP to a collector, which is this test."""

import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.fleet import send, until
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.real
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

EXPORTER_SECONDS = 30.0
"""How long the SDK waits for its exporter when it is shut down; the daemon waits two."""


class Collector:
    """Takes spans in; `spans` has (service instance, span)."""

    def __init__(self):
        self.spans = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for of_process in request.resource_spans:
                    named = {entry.key: entry.value.string_value for entry in of_process.resource.attributes}
                    for scope in of_process.scope_spans:
                        collector.spans += [(named["service.instance.id"], span) for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def test_the_spans_of_both_daemons_reach_a_collector_as_one_trace(fleet, collector, monkeypatch):
    monkeypatch.setenv("KVD_TRACES", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    prefill = fleet.worker(fleet.daemon("p"), "prefill")
    decode = fleet.worker(fleet.daemon("d"), "decode")
    ticket = prefill.call("offer", name="o", ids=[1, 2])
    decode.call("pull", name="r", ticket=ticket, ids=[1, 2], traceparent=TRACEPARENT)
    assert decode.outcome("r")["kind"] == "Done"
    for _ in until("the spans of both daemons"):
        if {"kvd.pull", "kvd.transfer", "kvd.claim"} <= {span.name for _, span in collector.spans}:
            break
    by_name = {span.name: (daemon, span) for daemon, span in collector.spans}
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACEPARENT.split("-")[1]}
    assert by_name["kvd.pull"][1].parent_span_id.hex() == TRACEPARENT.split("-")[2]
    assert (by_name["kvd.transfer"][0], by_name["kvd.claim"][0]) == ("d", "p")
    assert by_name["kvd.claim"][1].parent_span_id == by_name["kvd.transfer"][1].span_id


def test_a_collector_that_does_not_answer_costs_no_pull_and_delays_no_exit(fleet, monkeypatch):
    monkeypatch.setenv("KVD_TRACES", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        source = fleet.daemon("p")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        target = fleet.daemon("d")
        prefill, decode = fleet.worker(source, "prefill"), fleet.worker(target, "decode")
        decode.call("pull", name="r", ticket=prefill.call("offer", name="o", ids=[1]), ids=[1])
        assert decode.outcome("r")["kind"] == "Done"
        began = time.monotonic()
        for daemon in (source, target):
            send(daemon.child, signal.SIGTERM)
        with silent.accept()[0]:
            for daemon in (source, target):
                assert daemon.child.wait(PATIENCE)
        assert time.monotonic() - began < EXPORTER_SECONDS
    assert "Exporter" in source.log.read_text() or "export" in source.log.read_text()
