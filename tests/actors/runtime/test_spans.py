"""One request through the actors of both daemons, traced with the SDK's own exporter in memory."""

from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from kvd.daemon.tracing import Traces
from kvd.errors import ErrorCode
from kvd.protocol.peer import Claim, Fence
from kvd.protocol.types import Span
from kvd.protocol.worker import Cancel, Pull
from kvd.transport.interface import Landed
from tests.actors.stage import Stage, ids

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Pair:
    """Two daemons whose asks and answers this passes on; `spans` has what both exported, in the order of their ends."""

    def __init__(self, sampler=ALWAYS_ON):
        self.exporters = {}
        self.consumer, self.producer = self._daemon("consumer", sampler), self._daemon("producer", sampler)
        self.read = 0

    def _daemon(self, name, sampler):
        self.exporters[name] = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporters[name]))
        stage = Stage()
        stage.context.spans = Traces(provider)
        stage.attach()
        return stage

    def offer(self):
        [offered] = self.producer.offer()
        return offered.ticket

    def pull(self, ticket, name="p", blocks=(2, 3), traceparent=TRACEPARENT):
        self.consumer.request(Pull(2, name, ticket, (Span(0, 0, ids(*blocks)),), 5.0, traceparent))
        self.relay()

    def relay(self):
        while self.consumer.to_peers:
            _, ask = self.consumer.to_peers.pop(0)
            for reply in self.producer.asked_by_peer(ask):
                self.consumer.peer_says(reply)

    def land(self):
        self.read += 1
        self.consumer.transport_says(Landed(self.read, 0.01))
        self.relay()

    def spans(self, daemon):
        return {span.name: span for span in self.exporters[daemon].get_finished_spans()}


def ids_of(span):
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def parent_of(span):
    return f"{span.parent.span_id:016x}" if span.parent else None


def test_a_request_is_one_trace_of_both_daemons_under_the_workers_span():
    pair = Pair()
    pair.pull(pair.offer())
    pair.land()
    ours, theirs = pair.spans("consumer"), pair.spans("producer")
    assert set(ours) == {"kvd.pull", "kvd.transfer", "kvd.claiming", "kvd.reading", "kvd.fencing"}
    assert set(theirs) == {"kvd.claim"}
    assert {ids_of(span)[0] for span in (*ours.values(), *theirs.values())} == {TRACE}
    assert parent_of(ours["kvd.pull"]) == PARENT
    assert parent_of(ours["kvd.transfer"]) == ids_of(ours["kvd.pull"])[1]
    transfer = ids_of(ours["kvd.transfer"])[1]
    assert {parent_of(ours[f"kvd.{phase}"]) for phase in ("claiming", "reading", "fencing")} == {transfer}
    assert parent_of(theirs["kvd.claim"]) == transfer
    assert [event.name for event in theirs["kvd.claim"].events] == ["granted"]
    outcomes = [ours["kvd.pull"], ours["kvd.transfer"], theirs["kvd.claim"]]
    assert [span.attributes["kvd.outcome"] for span in outcomes] == ["done", "done", "held"]


def test_phases_follow_each_other_within_their_transfer():
    pair = Pair()
    pair.pull(pair.offer())
    pair.land()
    spans = pair.spans("consumer")
    phases = [spans[f"kvd.{phase}"] for phase in ("claiming", "reading", "fencing")]
    ends = [span.end_time for span in phases]
    assert ends == sorted(ends)
    assert spans["kvd.transfer"].start_time <= phases[0].start_time
    assert all(after.start_time >= before.end_time for before, after in pairwise(phases))


def test_a_pull_of_a_worker_that_traces_nothing_begins_a_trace_of_its_own():
    pair = Pair()
    pair.pull(pair.offer(), traceparent=None)
    pair.land()
    pull, [claim] = pair.spans("consumer")["kvd.pull"], pair.spans("producer").values()
    assert pull.parent is None
    assert ids_of(claim)[0] == ids_of(pull)[0] != TRACE


def test_a_short_read_that_is_not_claimed_takes_the_producer_into_the_trace_by_its_fence():
    pair = Pair()
    pair.consumer.same_host = True
    pair.pull(pair.offer())
    pair.land()
    for exporter in pair.exporters.values():
        exporter.clear()
    pair.pull(pair.offer(), name="q", blocks=(4, 5))
    pair.land()
    ours, theirs = pair.spans("consumer"), pair.spans("producer")
    assert set(ours) == {"kvd.pull", "kvd.transfer", "kvd.reading", "kvd.fencing"}
    assert parent_of(theirs["kvd.claim"]) == ids_of(ours["kvd.transfer"])[1]
    assert theirs["kvd.claim"].attributes["kvd.outcome"] == "held"


def test_a_refusal_is_an_error_on_both_sides():
    pair = Pair()
    ticket = pair.offer()
    pair.producer.request(Cancel(3, "o"))
    pair.pull(ticket)
    pull, [claim] = pair.spans("consumer")["kvd.pull"], pair.spans("producer").values()
    assert (pull.attributes["kvd.outcome"], claim.attributes["kvd.outcome"]) == ("failed", "refused")
    assert pull.attributes["kvd.error"] == claim.attributes["kvd.error"] == ErrorCode.OFFER_GONE
    assert not pull.status.is_ok
    assert pair.spans("consumer")["kvd.transfer"].attributes["kvd.outcome"] == "ended"


def test_a_cancelled_pull_ends_its_spans_when_its_read_has_ended():
    pair = Pair()
    pair.pull(pair.offer())
    pair.consumer.request(Cancel(3, "p"))
    pair.relay()
    assert "kvd.transfer" not in pair.spans("consumer")
    pair.land()
    assert pair.spans("consumer")["kvd.pull"].attributes["kvd.outcome"] == "cancelled"
    assert pair.spans("consumer")["kvd.transfer"].attributes["kvd.outcome"] == "ended"
    assert pair.spans("producer")["kvd.claim"].attributes["kvd.outcome"] == "released"
    assert pair.producer.actors.leases.claims._records == {}


def test_a_trace_that_is_not_sampled_is_exported_by_neither():
    pair = Pair(sampler=ALWAYS_OFF)
    pair.pull(pair.offer())
    pair.land()
    assert pair.spans("consumer") == pair.spans("producer") == {}


def test_where_nobody_traces_claims_and_fences_carry_nothing():
    pair = Pair()
    pair.consumer.context.spans = None
    ticket = pair.offer()
    pair.consumer.request(Pull(2, "p", ticket, (Span(0, 0, ids(2, 3)),), 5.0, TRACEPARENT))
    [(_, hello)] = pair.consumer.to_peers
    [welcome] = pair.producer.asked_by_peer(hello)
    pair.consumer.peer_says(welcome)
    [claim] = pair.consumer.asks(Claim)
    assert claim.traceparent is None
    pair.consumer.to_peers.clear()
    for reply in pair.producer.asked_by_peer(claim):
        pair.consumer.peer_says(reply)
    pair.consumer.landed(1)
    assert pair.consumer.asks(Fence)[0].unclaimed is None
    pair.relay()
    assert pair.spans("producer") == {}


@pytest.mark.parametrize("text", ["", "00-0-0-01", TRACEPARENT.upper(), TRACEPARENT + "-x", "x" * 4096])
def test_a_traceparent_that_is_none_is_refused(text):
    pair = Pair()
    ticket = pair.offer()
    [error] = pair.consumer.request(Pull(2, "p", ticket, (Span(0, 0, ids(2, 3)),), 5.0, text))
    assert error.code == ErrorCode.BAD_MESSAGE
