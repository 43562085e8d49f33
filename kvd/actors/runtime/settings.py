"""The part of the configuration that actors need; `kvd.daemon.config` documents each setting for operators."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds."""

    daemon: str
    incarnation: int
    host: str = ""
    """Names the running kernel. Empty if unknown."""
    rdma: bool = False
    """Whether this host has RDMA devices."""
    heartbeat: float = 1.0
    """Between two pings of a peer, which is lost after three without an answer."""
    retry: float = 0.5
    """Before an unanswered request is resent."""
    claim_ttl: float = 5.0
    """How long a claim lives without being renewed. It is renewed three times in that time."""
    claim_wait: float = 10.0
    """How long a claim waits for an offer that has not come yet."""
    tombstone: float = 60.0
    """How long an ended offer is remembered, so that a late claim or fence gets the reason at once."""
    attach_wait: float = 10.0
    """How long a successor waits for the pool of its predecessor to become quiet."""
    pool_linger: float = 600.0
    """How long the pool of a worker that has gone is kept for its successor."""
    peer_idle: float = 600.0
    """Before a peer that no pull has needed is forgotten."""
    max_quarantined: int = 64
    """Pulls whose blocks are in quarantine; with more of them the daemon is not ready."""
