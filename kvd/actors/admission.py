"""Who of the workers is let in, and how often each may ask: what the gateway checks before it looks any closer."""

import structlog

from kvd import limits
from kvd.actors.loop import Loop
from kvd.actors.once import Once
from kvd.actors.policy import Policy
from kvd.actors.rate import Pace, Rate
from kvd.errors import BadRequest, ErrorCode, Unavailable

_ATTACHES = Pace(limits.MAX_ATTACHES_PER_SECOND, limits.MAX_WORKERS)
_REQUESTS = Pace(limits.MAX_REQUESTS_PER_SECOND, limits.MAX_REQUESTS_PER_WORKER)
_STATUSES = Pace(limits.MAX_STATUSES_PER_SECOND, 2 * limits.MAX_STATUSES_PER_SECOND)


class Allowance:
    """What one connection may still ask for."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._requests = Rate(_REQUESTS, loop.time())
        self._statuses = Rate(_STATUSES, loop.time())

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
    """The policy, how often each user attaches, and who has been logged for trying what they may not."""

    def __init__(self, policy: Policy, loop: Loop) -> None:
        self._policy = policy
        self._loop = loop
        self._attaches: dict[int, Rate] = {}
        """By user; those that are full again are forgotten."""
        self._once = Once(structlog.get_logger("kvd.gateway"), "kvd_requests_refused_total")

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
        now = self._loop.time()
        self._attaches = {user: rate for user, rate in self._attaches.items() if not rate.is_full(now)}
        if not self._attaches.setdefault(uid, Rate(_ATTACHES, now)).take(now):
            text = f"user {uid} attaches more than {_ATTACHES.per_second:g} times a second; wait a second, then again"
            raise Unavailable(ErrorCode.OVERLOADED, text)
        return quota

    def stolen(self, worker: str, owner: int, uid: int) -> None:
        """A message came under another user's session id."""
        self._once.warn("session of another user", worker, uid, worker=worker, owner=owner, uid=uid)

    def unknown(self, uid: int) -> None:
        """A message came under a session id that is nobody's."""
        self._once.warn("message of no session", uid, uid=uid)
