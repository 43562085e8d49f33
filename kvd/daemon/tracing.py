"""OpenTelemetry traces of requests across both daemons: the extra `kvd[otel]`, off unless `traces` is set.

    kvd.pull                  consumer's daemon: a pull, from its arrival to its outcome
      kvd.transfer            a producer rank's share
        kvd.claiming          waiting for the grant (skipped if the ticket names the lease of a short read)
        kvd.reading           until the last byte
        kvd.fencing           until the lease is proven
        kvd.claim             producer's daemon: the hold on the lease, with the moment of the grant

The SDK's own variables say what is exported where and how much is sampled (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, ...). A pull with a `traceparent` continues that trace.
"""

import os
import threading
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kvd
from kvd.errors import KvdError
from kvd.protocol.peer import Claim
from kvd.protocol.worker import Pull

_CLOSE_SECONDS: Final = 2.0
"""How long sending the last spans may delay an exit."""

_propagator = TraceContextTextMapPropagator()


class Traces:
    """The spans of one daemon (a `kvd.actors.runtime.spans.Spans`); `provider` says where they go."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvd", kvd.__version__)

    def pull(self, worker: str, pull: Pull) -> "_PullSpan":
        """Begins a pull's span, under the worker's if it named one."""
        attributes = {"kvd.worker": worker, "kvd.request": pull.request}
        context = _context_of(pull.traceparent)
        span = self._tracer.start_span("kvd.pull", context, SpanKind.SERVER, attributes)
        return _PullSpan(self._tracer, span)

    def claim(self, claim: Claim) -> "_ClaimSpan":
        """Begins a claim's span, under the transfer's at the consumer."""
        context = _context_of(claim.traceparent)
        span = self._tracer.start_span("kvd.claim", context, SpanKind.SERVER)
        span.set_attributes({"kvd.pool": claim.pool, "kvd.offer": claim.offer, "kvd.reader": claim.reader})
        return _ClaimSpan(span)

    def close(self) -> None:
        """Sends the remaining spans, for at most two seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvd-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class _PullSpan:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span

    def transfer(self, daemon: str, pool: str) -> "_TransferSpan":
        attributes = {"kvd.peer": daemon, "kvd.pool": pool}
        context = set_span_in_context(self._span, Context())
        span = self._tracer.start_span("kvd.transfer", context, SpanKind.CLIENT, attributes)
        return _TransferSpan(self._tracer, span)

    def end(self, outcome: str, error: KvdError | None) -> None:
        _end(self._span, outcome, error)


class _TransferSpan:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._phase: Span | None = None

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def enter(self, phase: str) -> None:
        self._end_phase()
        self._phase = self._tracer.start_span(f"kvd.{phase}", set_span_in_context(self._span, Context()))

    def end(self, outcome: str) -> None:
        self._end_phase()
        _end(self._span, outcome, None)

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None


class _ClaimSpan:
    def __init__(self, span: Span) -> None:
        self._span = span

    def granted(self) -> None:
        self._span.add_event("granted")

    def end(self, outcome: str, error: KvdError | None = None) -> None:
        _end(self._span, outcome, error)


def exporting(daemon: str) -> Traces:
    """Traces exported to an OpenTelemetry collector by OTLP over HTTP."""
    attributes = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "kvd"), SERVICE_INSTANCE_ID: daemon}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def _context_of(traceparent: str | None) -> Context:
    return Context() if traceparent is None else _propagator.extract({"traceparent": traceparent}, Context())


def _end(span: Span, outcome: str, error: KvdError | None) -> None:
    span.set_attribute("kvd.outcome", outcome)
    if error is not None:
        span.set_attribute("kvd.error", error.code)
        span.set_status(Status(StatusCode.ERROR, error.text))
    span.end()
