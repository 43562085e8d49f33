"""What the actors need to know of the configuration. `kvd.daemon.config` documents each for operators."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds."""

    daemon: str
    incarnation: int
    host: str = ""
    """Names the running kernel; empty where it is not known."""
    rdma: bool = False
    """Whether this host has RDMA devices."""
    heartbeat: float = 1.0
    """Between two pings of a peer; three without an answer and it is lost."""
    retry: float = 0.5
    """After which an ask without an answer is sent again."""
    claim_ttl: float = 5.0
    """How long a claim lives without being renewed; it is renewed three times in that span."""
    claim_wait: float = 10.0
    """How long a claim waits for an offer that has not come yet, from its first asking."""
    tombstone: float = 60.0
    """How long an offer that ended is remembered, so that a late claim or fence gets its reason at once."""
    attach_wait: float = 10.0
    """How long a successor waits for the pool of its predecessor to become quiet."""
    pool_linger: float = 600.0
    """How long the pool of a worker that is gone is kept for its successor."""
    peer_idle: float = 600.0
    """After which a peer that nothing was asked of is forgotten."""
    max_quarantined: int = 64
    """Requests whose blocks are in quarantine; with more the daemon is not ready."""
