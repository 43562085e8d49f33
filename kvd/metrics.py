"""Metrics for Prometheus: base units, prefix `kvd_`, labels of bounded number and never a request id."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

import kvd
from kvd import limits
from kvd.protocol.status import Totals

S = TypeVar("S", bound=str)

_TIMES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one daemon, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=_TIMES, registry=registry)

        self.pulls = counter("kvd_pulls_total", "Pulls that ended, by outcome (done, failed, cancelled).", "outcome")
        self.pull_failures = counter("kvd_pull_failures_total", "Pulls that failed, by error code.", "code")
        self.pull_seconds = histogram("kvd_pull_duration_seconds", "From a pull's arrival to its outcome.")
        self.read_seconds = histogram("kvd_read_duration_seconds", "From a read's first post to its last byte.")
        self.read_bytes = counter("kvd_read_bytes_total", "Bytes read from peers that landed.")
        self.read_descriptors = counter("kvd_read_descriptors_total", "Descriptors of reads that landed.")
        self.reads_failed = counter("kvd_reads_failed_total", "Reads that the transport ended without all bytes.")
        self.transport_restarts = counter(
            "kvd_transport_restarts_total", "Times that the process which reads from other hosts ended by itself."
        )
        self.pulls_active = gauge("kvd_pulls_active", "Open pulls.")
        self.quarantined = gauge("kvd_pulls_quarantined", "Ended pulls whose blocks may still be written to.")
        self.offers = counter(
            "kvd_offers_total", "Offers that ended, by reason (read, expired, withdrawn, shutdown).", "reason"
        )
        self.leases_active = gauge("kvd_leases_active", "Offers whose blocks are held for consumers.")
        self.held_blocks = gauge(
            "kvd_held_blocks",
            "Blocks of workers that nothing else may use, by what they stand for (offered, claimed, overdue, pulling, "
            "quarantined); a block counts once for each offer or pull that names it.",
            "state",
        )
        self.held_bytes = gauge("kvd_held_bytes", "Bytes of these blocks.", "state")
        self.claims = counter("kvd_claims_total", "Claims of peers, by answer (granted, refused).", "answer")
        self.claims_active = gauge("kvd_claims_active", "Claims of peers in force.")
        self.wrong_proofs = counter(
            "kvd_wrong_proofs_total",
            "Claims of peers that do not have the secret of the offer, or name other blocks or a lease that never was.",
        )
        self.tickets_refused = counter(
            "kvd_tickets_refused_total",
            "Pulls whose ticket a producer refused before anything was read: bad_ticket, or offer_gone (it has ended).",
            "code",
        )
        self.fences = counter("kvd_fences_total", "Fences of peers, by answer (held, broken).", "answer")
        self.peers = gauge("kvd_peers", "Peers that this daemon connects to, by state.", "state")
        self.peers_lost = counter("kvd_peers_lost_total", "Times that a peer was lost.")
        self.peers_rejected = counter(
            "kvd_peers_rejected_total",
            "Connections and messages of refused daemons, by reason (unknown_key, too_many, ...).",
            "reason",
        )
        self.peer_paths = gauge("kvd_peer_paths", "Peers that this daemon reads from, by the kind of path.", "kind")
        self.peers_slow = gauge("kvd_peers_slow", "Peers whose path is slower than the hardware allows.")
        self.peers_unreached = gauge(
            "kvd_peers_unreached", "Peers that answer messages and whose memory the transport does not reach."
        )
        self.slow_paths = counter(
            "kvd_slow_paths_total", "Times that a peer was reached over a slower path than the hardware allows.", "kind"
        )
        self.workers = gauge("kvd_workers", "Workers that are attached.")
        self.pool_bytes = gauge(
            "kvd_pool_bytes", "Bytes in pools, by what they are made of (hugetlb, thp, plain, cuda).", "backing"
        )
        self.notifications = counter("kvd_notifications_total", "Notifications for workers.")
        self.unacknowledged = gauge("kvd_notifications_unacknowledged", "Notifications kept until acknowledged.")
        self.refused = counter(
            "kvd_requests_refused_total", "Requests refused, by socket and error code.", "socket", "code"
        )
        self.actor_failures = counter("kvd_actor_failures_total", "Messages that an actor could not handle.", "actor")
        self.probe_seconds = gauge(
            "kvd_probe_seconds", "How long a part (an actor, the transport) took to answer the watchdog.", "part"
        )
        self.watchdog_misses = counter(
            "kvd_watchdog_misses_total", "Rounds of the watchdog in which a part did not answer.", "part"
        )
        self.processor_wait = counter(
            "kvd_processor_wait_seconds_total",
            "How long threads were ready to run and had no processor, by kind (loop, copy, transport, ...).",
            "thread",
        )
        self.mailbox = gauge("kvd_mailbox_messages", "Messages waiting in an actor's mailbox.", "actor")
        self.ready = gauge("kvd_ready", "1 while the daemon takes new work.")
        bounds = gauge("kvd_limit", "Upper bound of a gauge, by its name.", "metric")
        bounds.labels("kvd_mailbox_messages").set(limits.MAILBOX_MESSAGES)
        bounds.labels("kvd_notifications_unacknowledged").set(limits.MAX_UNACKNOWLEDGED)
        Info("kvd_build", "Which kvd this is.", registry=registry).info({"version": kvd.__version__})

    def watch_held(self, states: Sequence[S], of: Callable[[S], tuple[int, int]]) -> None:
        """Reads from now on blocks and bytes of each state from `of`.

        At a scrape, not as they change: to set a gauge takes a lock and some microseconds, which each pull would pay.
        """
        for state in states:
            self.held_blocks.labels(state).set_function(partial(_part, of, state, 0))
            self.held_bytes.labels(state).set_function(partial(_part, of, state, 1))

    def totals(self, seconds: float) -> Totals:
        """The counters in a status, at the time `seconds` of any clock."""
        return Totals(
            seconds=seconds,
            read_bytes=sum(_values(self.read_bytes).values()),
            read_descriptors=sum(_values(self.read_descriptors).values()),
            pulls=_values(self.pulls),
            refused=sum(_values(self.refused).values()),
            peers_lost=sum(_values(self.peers_lost).values()),
            pull_buckets=_values(self.pull_seconds, "_bucket"),
        )


def _part(of: Callable[[S], tuple[int, int]], state: S, index: int) -> int:
    return of(state)[index]


def _values(metric: MetricWrapperBase, suffix: str = "_total") -> dict[str, int]:
    """The samples of `metric` by the values of their labels."""
    return {
        ",".join(sample.labels.values()): int(sample.value)
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(suffix)
    }
