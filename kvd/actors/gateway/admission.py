"""Which workers are let in, and how often each may ask. The kernel says which user is at the other end of a socket.

Without a policy file, only root and the user that the daemon runs as may attach; everyone else whom the socket's file
mode lets connect may request a status. A policy file, in TOML, admits more users:

    [[workers]]
    uid = 1000              # or gid = 1000, or both: then both must hold
    pools = ["prefill-*"]   # names they may attach under
    max_bytes = 68719476736 # of all pools of one user together; unbounded if left out
"""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from kvd import files, limits
from kvd.actors.runtime.actor import Loop
from kvd.actors.runtime.pace import RateLimit, TokenBucket, TokenBuckets, WarnOnce
from kvd.errors import BadRequest, ErrorCode, refusal

_Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
_ROOT = 0


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some users may do."""

    pools: Annotated[tuple[Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)], ...], Meta(min_length=1)]
    uid: _Id | None = None
    gid: _Id | None = None
    max_bytes: Annotated[int, Meta(gt=0)] | None = None

    def is_about(self, uid: int, gid: int) -> bool:
        """Whether it lets this user attach under some name."""
        return self.uid in (None, uid) and self.gid in (None, gid)

    def covers(self, uid: int, gid: int, pool: str) -> bool:
        """Whether it lets this user attach to this pool."""
        return self.is_about(uid, gid) and any(fnmatch.fnmatchcase(pool, pattern) for pattern in self.pools)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workers: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """`owner` is the user that the daemon runs as. The first rule that covers a worker applies."""

    owner: int
    rules: Sequence[Rule] = ()

    def is_privileged(self, uid: int) -> bool:
        """Whether this is root or the daemon's own user, for whom room is kept."""
        return uid in (self.owner, _ROOT)

    def may_attach(self, uid: int, gid: int) -> bool:
        """Whether this user may attach under some name."""
        return self.is_privileged(uid) or any(rule.is_about(uid, gid) for rule in self.rules)

    def permit(self, uid: int, gid: int, pool: str) -> int | None:
        """The bytes that all pools of this user may have together, None if unbounded.

        Raises:
            BadRequest: `NOT_PERMITTED`, this user may not attach under this name.

        """
        for rule in self.rules:
            if rule.covers(uid, gid, pool):
                return rule.max_bytes
        if self.is_privileged(uid):
            return None
        text = (
            f"user {uid} (group {gid}) may not attach as {pool!r}: run it as user {self.owner}, or add a rule for it "
            "to the daemon's `worker_policy`; a status request needs no rule"
        )
        raise refusal(ErrorCode.NOT_PERMITTED, text)


def load(path: Path) -> tuple[Rule, ...]:
    """The rules in a file.

    Raises:
        BadRequest: `BAD_CONFIG`, the file cannot be read, others own it or may write to it, or a rule is not valid.

    """
    text, status = files.read(path, limits.MAX_CONFIG_BYTES)
    files.check_writers(path, status, "admit themselves")
    try:
        rules = msgspec.convert(files.parse_toml(path, text), _File).workers
    except msgspec.ValidationError as error:
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: {error}") from error
    if any(rule.uid is None and rule.gid is None for rule in rules):
        raise refusal(ErrorCode.BAD_CONFIG, f"{path}: a rule without uid and gid would let everybody in; add one")
    return rules


_ATTACHES = RateLimit(limits.MAX_ATTACHES_PER_SECOND, limits.MAX_WORKERS)
_REQUESTS = RateLimit(limits.MAX_REQUESTS_PER_SECOND, limits.MAX_REQUESTS_PER_WORKER)
_STATUSES = RateLimit(limits.MAX_STATUSES_PER_SECOND, 2 * limits.MAX_STATUSES_PER_SECOND)
_INQUIRIES = RateLimit(limits.MAX_INQUIRIES_PER_SECOND, 2 * limits.MAX_INQUIRIES_PER_SECOND)


@dataclass(slots=True)
class _Allowance:
    """What one connection may still ask for."""

    requests: TokenBucket
    statuses: TokenBucket


class Admission:
    """Applies the policy and the bounds on each user; logs each offender once."""

    def __init__(self, policy: Policy, loop: Loop) -> None:
        self._policy = policy
        self._loop = loop
        # All by user.
        self._attaches: TokenBuckets[int] = TokenBuckets(_ATTACHES)
        self._inquiries: TokenBuckets[int] = TokenBuckets(_INQUIRIES)
        self._sessions: Counter[int] = Counter()
        self._allowances: dict[int, _Allowance] = {}
        """By connection."""
        self._once = WarnOnce(structlog.get_logger("kvd.gateway"), "kvd_requests_refused_total")
        self._open = True

    def close(self) -> None:
        """From now on `check_open` raises."""
        self._open = False

    def check_open(self) -> None:
        """Called before anything new is accepted.

        Raises:
            Unavailable: `SHUTTING_DOWN`, the daemon drains.

        """
        if not self._open:
            raise refusal(ErrorCode.SHUTTING_DOWN, "the daemon is stopping; send new requests elsewhere")

    def admit(self, uid: int, gid: int, worker: str) -> int | None:
        """Counts an attach. Returns the bytes that all pools of this user may have together, None if unbounded.

        Raises:
            BadRequest: `NOT_PERMITTED`, this user may not attach under this name.
            Unavailable: `OVERLOADED`, this user attaches too often.

        """
        try:
            quota = self._policy.permit(uid, gid, worker)
        except BadRequest as error:
            self._once.warn("attach not permitted", uid, uid=uid, worker=worker, text=error.text)
            raise
        if not self._attaches.take(uid, self._loop.time()):
            text = f"user {uid} attaches more than {_ATTACHES.per_second:g} times a second; wait a second, then again"
            raise refusal(ErrorCode.OVERLOADED, text)
        return quota

    def inquire(self, uid: int) -> None:
        """Counts a status request of a session without a pool, or of a user for whom no room is kept.

        Raises:
            Unavailable: `OVERLOADED`, this user's sessions ask too often.

        """
        if not self._inquiries.take(uid, self._loop.time()):
            text = f"user {uid} asks for more than {_INQUIRIES.per_second:g} statuses a second; slow down"
            raise refusal(ErrorCode.OVERLOADED, text)

    def ends_for(self, uid: int) -> int | None:
        """Counts a request to end a pool. Returns the user whose pools this one may end, None if everybody's.

        Raises:
            Unavailable: `OVERLOADED`, this user's sessions ask too often.

        """
        self.inquire(uid)
        return None if self._policy.is_privileged(uid) else uid

    def take_request(self, connection: int) -> None:
        """Counts an offer or a pull.

        Raises:
            Unavailable: `OVERLOADED`, they come too often.

        """
        if not self._allowances[connection].requests.take(self._loop.time()):
            text = f"more than {_REQUESTS.per_second:g} offers and pulls a second from this worker; slow down"
            raise refusal(ErrorCode.OVERLOADED, text)

    def take_status(self, uid: int, connection: int) -> None:
        """Counts a status request of a session with a pool.

        A user may have many of these, and each status takes longer the more pools there are.

        Raises:
            Unavailable: `OVERLOADED`, they come too often.

        """
        if not self._policy.is_privileged(uid):
            self.inquire(uid)
        elif not self._allowances[connection].statuses.take(self._loop.time()):
            text = f"more than {_STATUSES.per_second:g} statuses a second; read kvd's metrics instead"
            raise refusal(ErrorCode.OVERLOADED, text)

    def enter(self, uid: int, connection: int) -> None:
        """One more session of this user.

        Raises:
            Unavailable: `OVERLOADED`, this user has too many, or all users together have.

        """
        others = sum(count for user, count in self._sessions.items() if not self._policy.is_privileged(user))
        if self._sessions.total() >= limits.MAX_WORKERS:
            text = f"{limits.MAX_WORKERS} workers are connected, which is the bound"
            raise refusal(ErrorCode.OVERLOADED, text)
        if not self._policy.is_privileged(uid) and (
            self._sessions[uid] >= limits.MAX_SESSIONS_PER_USER or others >= limits.MAX_STRANGERS
        ):
            text = (
                f"user {uid} has {self._sessions[uid]} sessions, of {limits.MAX_SESSIONS_PER_USER} allowed; all users "
                f"but root and the daemon's own have {others}, of {limits.MAX_STRANGERS}; close some"
            )
            raise refusal(ErrorCode.OVERLOADED, text)
        self._sessions[uid] += 1
        now = self._loop.time()
        self._allowances[connection] = _Allowance(TokenBucket(_REQUESTS, now), TokenBucket(_STATUSES, now))

    def leave(self, uid: int, connection: int) -> None:
        """One session of this user is gone."""
        del self._allowances[connection]
        self._sessions[uid] -= 1
        if not self._sessions[uid]:
            del self._sessions[uid]

    def stolen(self, worker: str, owner: int, uid: int) -> None:
        """A user sent a message under another user's session id."""
        self._once.warn("session of another user", worker, uid, worker=worker, owner=owner, uid=uid)

    def unknown(self, uid: int) -> None:
        """A user sent a message under an id that no session has."""
        self._once.warn("message of no session", uid, uid=uid)
