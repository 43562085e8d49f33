"""The JSON in `Status.report`: what each room of a daemon tells of itself. Readers ignore unknown fields."""

import itertools
import math

import msgspec

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.protocol.types import Count


class PoolStatus(msgspec.Struct, frozen=True):
    """A pool; `state` is one of `kvd.actors.pools.pool.State`, `device` the UUID of the GPU that has it."""

    worker: str
    bytes: Count
    backing: str | None
    state: str
    uid: Count
    device: str = ""
    epoch: Count = 0


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
    incarnation: Count | None = None


class LeaseStatus(msgspec.Struct, frozen=True):
    """Active offers, how many are claimed, and claims that wait for an offer; `blocks` by what they stand for."""

    active: Count
    claimed: Count
    claims_held: Count
    claims_waiting: Count
    blocks: dict[str, Count] = {}
    last_generation: Count = 0


class PullStatus(msgspec.Struct, frozen=True):
    """Pulls without an outcome, their transfers by state, and ended pulls whose blocks may still be written to.

    `blocks` are those of pulls by what they stand for, `busy_blocks` those of each worker. `connecting` pulls wait for
    a peer; `routes` between layouts are kept.
    """

    pulls: Count
    transfers: dict[str, Count]
    quarantined: Count
    busy_blocks: dict[str, Count]
    blocks: dict[str, Count] = {}
    connecting: Count = 0
    routes: Count = 0


class LogStatus(msgspec.Struct, frozen=True):
    """Notifications that one worker has not acknowledged, and the number of the next one."""

    kept: Count
    next: Count = 0


class Totals(msgspec.Struct, frozen=True):
    """Counters since the daemon started: two statuses give a rate."""

    seconds: float
    read_bytes: Count
    read_descriptors: Count
    pulls: dict[str, Count]
    refused: Count
    peers_lost: Count
    pull_buckets: dict[str, Count]
    """Pulls by duration: `le` in seconds, numbers that rise from 0, to cumulative counts."""


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


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon's process tells of itself; `not_ready` says why, by condition."""

    daemon: str
    version: str
    pid: Count
    address: str
    http: str
    device: str
    ready: bool
    not_ready: dict[str, str]
    totals: Totals
    processor: ProcessorStatus = ProcessorStatus(0.0, {})
    incarnation: Count = 0


class StatusReport(ProcessStatus, frozen=True, kw_only=True):
    """One daemon at one moment: its process, and each of its actors by name."""

    workers: list[str]
    pools: list[PoolStatus]
    handshake: list[PeerStatus]
    leases: LeaseStatus
    scheduler: PullStatus
    completion: dict[str, LogStatus]
    worker_pids: dict[str, Count] = {}
    """In the daemon's PID namespace; 0 for a worker that is outside of it."""


_decoder = msgspec.json.Decoder(StatusReport)


def decode(report: bytes) -> StatusReport:
    """The status in `report`.

    Raises:
        BadRequest: `BAD_MESSAGE`, it is not a status of this version, or no UTF-8.

    """
    try:
        status = _decoder.decode(report.decode())
        _check_histogram(status.totals.pull_buckets)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also what is no UTF-8, or no number
        raise refusal(ErrorCode.BAD_MESSAGE, f"this is no status of this release: {error}") from error
    return status


def _check_histogram(buckets: dict[str, Count]) -> None:
    """Raises ValueError for what is no histogram, or has no bound to tell as a quantile."""
    bounds = [float(bound) for bound in buckets]
    # NaN is not above 0; infinity is above all others, so it can only be the last bound.
    if not all(below < bound for below, bound in itertools.pairwise([0.0, *bounds])) or bounds[:1] == [math.inf]:
        raise ValueError("the bounds of its buckets do not rise from 0, or the first one is infinite")
    if any(count > following for count, following in itertools.pairwise(buckets.values())):
        raise ValueError("the counts of its buckets fall")
