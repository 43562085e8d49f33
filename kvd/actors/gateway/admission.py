"""Who of the workers is let in, and how often each may ask: what the gateway checks before it looks any closer."""

from collections import Counter

import structlog

from kvd import limits
from kvd.actors.gateway.policy import Policy
from kvd.actors.runtime.loop import Loop
from kvd.actors.runtime.token_bucket import RateLimit, TokenBucket, TokenBuckets
from kvd.actors.runtime.warn_once import WarnOnce
from kvd.errors import BadRequest, ErrorCode, Unavailable

_ATTACHES = RateLimit(limits.MAX_ATTACHES_PER_SECOND, limits.MAX_WORKERS)
_REQUESTS = RateLimit(limits.MAX_REQUESTS_PER_SECOND, limits.MAX_REQUESTS_PER_WORKER)
_STATUSES = RateLimit(limits.MAX_STATUSES_PER_SECOND, 2 * limits.MAX_STATUSES_PER_SECOND)
_INQUIRIES = RateLimit(limits.MAX_INQUIRIES_PER_SECOND, 2 * limits.MAX_INQUIRIES_PER_SECOND)


class Allowance:
    """What one connection may still ask for."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._requests = TokenBucket(_REQUESTS, loop.time())
        self._statuses = TokenBucket(_STATUSES, loop.time())

    def take_request(self) -> None:
        """Counts an offer or a pull.

        Raises:
            Unavailable: `OVERLOADED`, they come too often.

        """
        if not self._requests.take(self._loop.time()):
            text = f"more than {_REQUESTS.per_second:g} offers and pulls a second from this worker; slow down"
            raise Unavailable(ErrorCode.OVERLOADED, text)

    def take_status(self) -> None:
        """Counts a status.

        Raises:
            Unavailable: `OVERLOADED`, they come too often.

        """
        if not self._statuses.take(self._loop.time()):
            text = f"more than {_STATUSES.per_second:g} statuses a second; read kvd's metrics instead"
            raise Unavailable(ErrorCode.OVERLOADED, text)


class Admission:
    """The policy, how much each user has and does, and who has been logged for trying what they may not."""

    def __init__(self, policy: Policy, loop: Loop) -> None:
        self._policy = policy
        self._loop = loop
        self._attaches: TokenBuckets[int] = TokenBuckets(_ATTACHES)
        self._inquiries: TokenBuckets[int] = TokenBuckets(_INQUIRIES)
        """By user."""
        self._sessions: Counter[int] = Counter()
        """By user."""
        self._once = WarnOnce(structlog.get_logger("kvd.gateway"), "kvd_requests_refused_total")

    def allowance(self) -> Allowance:
        """For a new connection."""
        return Allowance(self._loop)

    def admit(self, uid: int, gid: int, worker: str) -> int | None:
        """The bytes that all pools of this user may have together, None without a bound.

        Raises:
            BadRequest: `NOT_PERMITTED`, this user may not attach under this name.
            Unavailable: `OVERLOADED`, it attaches too often.

        """
        try:
            quota = self._policy.permit(uid, gid, worker)
        except BadRequest as error:
            self._once.warn("attach not permitted", uid, uid=uid, worker=worker, text=error.text)
            raise
        if not self._attaches.take(uid, self._loop.time()):
            text = f"user {uid} attaches more than {_ATTACHES.per_second:g} times a second; wait a second, then again"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        return quota

    def inquire(self, uid: int) -> None:
        """Counts a status that a session without a pool asks for.

        Raises:
            Unavailable: `OVERLOADED`, this user's sessions ask too often.

        """
        if not self._inquiries.take(uid, self._loop.time()):
            text = (
                f"user {uid} asks for more than {_INQUIRIES.per_second:g} statuses a second without a pool; slow down"
            )
            raise Unavailable(ErrorCode.OVERLOADED, text)

    def enter(self, uid: int) -> None:
        """One more session of this user.

        Raises:
            Unavailable: `OVERLOADED`, there are too many, of this user or altogether.

        """
        strangers = sum(count for user, count in self._sessions.items() if not self._policy.is_favoured(user))
        if self._sessions.total() >= limits.MAX_WORKERS:
            text = f"{limits.MAX_WORKERS} workers are connected, which is the bound"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        if not self._policy.is_favoured(uid) and (
            self._sessions[uid] >= limits.MAX_SESSIONS_PER_USER or strangers >= limits.MAX_STRANGERS
        ):
            text = (
                f"user {uid} has {self._sessions[uid]} sessions and all users that the daemon does not run as have "
                f"{strangers}; the bounds are {limits.MAX_SESSIONS_PER_USER} and {limits.MAX_STRANGERS}"
            )
            raise Unavailable(ErrorCode.OVERLOADED, text)
        self._sessions[uid] += 1

    def leave(self, uid: int) -> None:
        """One session of this user is gone."""
        self._sessions[uid] -= 1
        if not self._sessions[uid]:
            del self._sessions[uid]

    def stolen(self, worker: str, owner: int, uid: int) -> None:
        """A message came under another user's session id."""
        self._once.warn("session of another user", worker, uid, worker=worker, owner=owner, uid=uid)

    def unknown(self, uid: int) -> None:
        """A message came under a session id that is nobody's."""
        self._once.warn("message of no session", uid, uid=uid)
