"""The JSON in `Status.report`, as a reader decodes it; unknown fields are ignored."""

import msgspec

from kvd import limits
from kvd.errors import ErrorCode, refusal


class PoolStatus(msgspec.Struct, frozen=True):
    """A pool; `state` is one of `kvd.actors.pools.record.PoolState`, `device` the UUID of the GPU that has it."""

    worker: str
    bytes: int
    backing: str | None
    state: str
    uid: int
    device: str = ""


class PeerStatus(msgspec.Struct, frozen=True):
    """A peer that the daemon connects to; `path` names the transports of its bytes, `slow` why they are slow.

    `unreached_seconds` is for how long the transport has not reached its memory; None if it does, or has not tried.
    """

    address: str
    daemon: str | None
    state: str
    silent_seconds: float
    path: str = ""
    slow: str | None = None
    last_loss: str = ""
    unreached_seconds: float | None = None


class LeaseStatus(msgspec.Struct, frozen=True):
    """Active offers, how many are claimed, and claims that wait for an offer; `blocks` by what they stand for."""

    active: int
    claimed: int
    claims_held: int
    claims_waiting: int
    blocks: dict[str, int] = {}


class PullStatus(msgspec.Struct, frozen=True):
    """Pulls without an outcome, their transfers by state, and ended pulls whose blocks may still be written to.

    `blocks` are those of pulls by what they stand for, `busy_blocks` those of each worker.
    """

    pulls: int
    transfers: dict[str, int]
    quarantined: int
    busy_blocks: dict[str, int]
    blocks: dict[str, int] = {}


class LogStatus(msgspec.Struct, frozen=True):
    """Notifications that one worker has not acknowledged."""

    kept: int


class Totals(msgspec.Struct, frozen=True):
    """Counters since the daemon started: two statuses give a rate."""

    seconds: float
    read_bytes: int
    read_descriptors: int
    pulls: dict[str, int]
    refused: int
    peers_lost: int
    pull_buckets: dict[str, int]
    """Pulls by duration, cumulative: `le` in seconds to count."""


class ProcessorStatus(msgspec.Struct, frozen=True):
    """How many seconds the daemon's threads waited for a processor, of the last `seconds`.

    By kind (`loop`, `copy`, ...), threads of a kind together; empty if the kernel does not say.
    """

    seconds: float
    waited: dict[str, float]

    @property
    def text(self) -> str:
        """The figures, for people."""
        each = ", ".join(f"{kind} {waited:.1f} s" for kind, waited in self.waited.items())
        return f"in the last {self.seconds:.0f} s threads waited for a processor: {each}"

    @property
    def starved(self) -> bool:
        """Whether that is so long that requests are late."""
        return max(self.waited.values(), default=0.0) > limits.STARVED_SHARE * self.seconds


class StatusReport(msgspec.Struct, frozen=True):
    """One daemon at one moment."""

    daemon: str
    version: str
    pid: int
    address: str
    http: str
    device: str
    ready: bool
    not_ready: dict[str, str]
    workers: list[str]
    pools: list[PoolStatus]
    handshake: list[PeerStatus]
    leases: LeaseStatus
    scheduler: PullStatus
    completion: dict[str, LogStatus]
    totals: Totals
    processor: ProcessorStatus = ProcessorStatus(0.0, {})
    worker_pids: dict[str, int] = {}
    """In the daemon's PID namespace; 0 for a worker that is outside of it."""


_decoder = msgspec.json.Decoder(StatusReport)


def decode(report: bytes) -> StatusReport:
    """The status in `report`.

    Raises:
        BadRequest: `BAD_MESSAGE`, it is not a status of this version.

    """
    try:
        return _decoder.decode(report)
    except msgspec.MsgspecError as error:
        raise refusal(ErrorCode.BAD_MESSAGE, f"this is no status of this release: {error}") from error
