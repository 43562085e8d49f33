"""What Prometheus scrapes: base units, `kvd_` prefix, labels of bounded number and never a request's id."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TIMES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The instruments of one daemon, in a registry of their own."""

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
        self.pulls_active = gauge("kvd_pulls_active", "Pulls without an outcome.")
        self.quarantined = gauge("kvd_pulls_quarantined", "Ended pulls whose blocks may still be written to.")
        self.offers = counter(
            "kvd_offers_total", "Offers that ended, by reason (read, expired, withdrawn, shutdown).", "reason"
        )
        self.leases_active = gauge("kvd_leases_active", "Offers whose blocks are promised.")
        self.claims = counter("kvd_claims_total", "Claims of peers, by answer (granted, refused).", "answer")
        self.claims_active = gauge("kvd_claims_active", "Claims of peers that are held.")
        self.fences = counter("kvd_fences_total", "Fences of peers, by answer (held, broken).", "answer")
        self.peers = gauge("kvd_peers", "Peers that this daemon connects to, by state.", "state")
        self.peers_lost = counter("kvd_peers_lost_total", "Times that a peer was lost.")
        self.peers_rejected = counter(
            "kvd_peers_rejected_total",
            "Connections and messages of daemons that are not let in (unknown_key, wrong_name, no_handshake).",
            "reason",
        )
        self.workers = gauge("kvd_workers", "Workers that are attached.")
        self.pool_bytes = gauge("kvd_pool_bytes", "Bytes in pools, by what they are made of.", "backing")
        self.notifications = counter("kvd_notifications_total", "Notifications for workers.")
        self.unacknowledged = gauge("kvd_notifications_unacknowledged", "Notifications kept until acknowledged.")
        self.refused = counter(
            "kvd_requests_refused_total", "Requests refused, by socket and error code.", "socket", "code"
        )
        self.actor_failures = counter("kvd_actor_failures_total", "Messages that an actor could not handle.", "actor")
        self.ready = gauge("kvd_ready", "1 while the daemon takes new work.")
