"""The Unix socket where peers connect: who may, how fast, and how many; with keys, how they get to libzmq's."""

import asyncio
import math
import resource
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kvd import foreign, limits
from kvd.errors import Unavailable
from kvd.limits import LINGER_MS
from kvd.net.local.connect import connect_to
from kvd.net.local.listener import Listener, hang_up
from kvd.net.local.relay import PrivateListener, Relay, finish
from kvd.net.trust import OnRejected, Reason, Rejection
from kvd.net.unix import Party, created_with, party_at

_REST_SECONDS: Final = 0.02
"""uvloop's timers count milliseconds: one that is due sooner fires at once, and again and again."""


class Pace:
    """A `kvd.net.interface.Intake`: as many as a fleet has at once, then `limits.MAX_ACCEPTS_PER_SECOND`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_at = -math.inf
        """When the last one would have been accepted at this pace."""

    def admits(self, again: Callable[[], None]) -> bool:
        """Whether one more may be accepted now; if not, `again` is called when it may."""
        step = 1.0 / limits.MAX_ACCEPTS_PER_SECOND
        now = self._loop.time()
        self._free_at = max(self._free_at, now - limits.MAX_ACCEPTS_AT_ONCE * step)
        if self._free_at > now - step:
            self._loop.call_at(now + _REST_SECONDS, again)
            return False
        self._free_at += step
        return True


_BEFORE_READY: Final = 64 + 170 + 12
"""Bytes that a ROUTER with CURVE says to those who have no allowed key: its greeting, its WELCOME, and an ERROR, after
which they may stay for as long as a handshake may take. Those who have one get its READY, of 67 bytes."""


class Gate(ABC):
    """Accepts peers at `path`, whose file has `mode`: so many of one process, of one user, and together.

    Raises:
        OSError: nothing can be bound there.

    """

    def __init__(self, path: str, on_rejected: OnRejected, mode: int) -> None:
        self._on_rejected = on_rejected
        self._of_party: Counter[Party] = Counter()
        self._of_user: Counter[int] = Counter()
        with created_with(mode):
            self._listener = Listener(path, self._accepted, Pace())

    def close(self) -> None:
        """Accepts nobody any more; what was sent gets out, within `LINGER_MS`."""
        self._listener.close()

    @abstractmethod
    def _enter(self, accepted: socket.socket, who: Party) -> None:
        """Takes a connection over, and calls `_left` at its end."""

    def _refuses(self, who: Party) -> Reason | None:
        """Why one more is not taken; None if it is."""
        own = self._of_party[who] if who.process else 0
        within = own < limits.MAX_PEERS_PER_PROCESS and self._of_user[who.uid] < limits.MAX_PEERS_PER_USER
        return None if within and self._of_user.total() < limits.MAX_PEERS else Reason.TOO_MANY

    def _left(self, who: Party) -> None:
        self._of_party -= Counter([who])
        self._of_user -= Counter([who.uid])

    def _reject(self, accepted: socket.socket, who: Party, reason: Reason) -> None:
        hang_up(accepted)
        self._on_rejected(Rejection(reason, address=f"user {who.uid}"))

    def _accepted(self, accepted: socket.socket) -> None:
        try:
            who = party_at(accepted)
            foreign.check(who.uid)
        except (OSError, Unavailable):  # its process has ended, or has passed what nobody can close
            hang_up(accepted)
            return
        reason = self._refuses(who)
        if reason is not None:
            self._reject(accepted, who, reason)
            return
        self._of_party[who] += 1
        self._of_user[who.uid] += 1
        self._enter(accepted, who)


class KeyGate(Gate):
    """Lets all users in, to prove a key to libzmq, which listens at `inner`."""

    def __init__(self, path: str, on_rejected: OnRejected, inner: PrivateListener) -> None:
        self._inner = inner
        self._relays: set[Relay] = set()
        self._strange: dict[Relay, int] = {}
        """Those that have not shown a key that they may speak with, each with its user, the oldest first."""
        super().__init__(path, on_rejected, 0o666)

    def close(self) -> None:
        """See `Gate`."""
        super().close()
        finish(self._relays, LINGER_MS / 1000)

    def _refuses(self, who: Party) -> Reason | None:
        for relay in [relay for relay in self._strange if relay.outbound.bytes > _BEFORE_READY]:
            del self._strange[relay]
        # libzmq accepts by itself, and must have a descriptor for it.
        unanswered = sum(relay.outbound.bytes == 0 for relay in self._strange)
        return super()._refuses(who) if unanswered < limits.MAX_PEERS_UNANSWERED else Reason.TOO_MANY

    def _enter(self, accepted: socket.socket, who: Party) -> None:
        if len(self._strange) >= _places_of_strangers():
            self._make_room()
        try:
            inside = connect_to(self._inner.path)
        except OSError:  # no descriptor is left, or libzmq does not come to accept
            self._left(who)
            self._reject(accepted, who, Reason.TOO_MANY)
            return
        relay = Relay(accepted, inside, partial(self._ended, who))
        self._relays.add(relay)
        self._strange[relay] = who.uid

    def _make_room(self) -> None:
        """Hangs up on the oldest stranger of the user who has most of them."""
        ((busiest, _),) = Counter(self._strange.values()).most_common(1)
        next(relay for relay, user in self._strange.items() if user == busiest).close()

    def _ended(self, who: Party, relay: Relay) -> None:
        self._relays.discard(relay)
        self._strange.pop(relay, None)
        self._left(who)


def _places_of_strangers() -> int:
    """Each takes three descriptors, and all together a fifth of those that this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits.MAX_STRANGE_PEERS if most == resource.RLIM_INFINITY else min(limits.MAX_STRANGE_PEERS, most // 16)
