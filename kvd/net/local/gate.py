"""The Unix socket where peers connect: who may, how fast, how many, and how they get to libzmq's."""

import asyncio
import math
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvd import foreign, limits
from kvd.errors import Unavailable
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


class Gate:
    """Accepts peers at `path`; `inner` is where libzmq listens. With `own_user` others are refused, else all may come.

    Raises:
        OSError: nothing can be bound there.

    """

    def __init__(self, path: str, inner: PrivateListener, on_rejected: OnRejected, *, own_user: bool) -> None:
        self._inner = inner
        self._on_rejected = on_rejected
        self._own_user = own_user
        self._relays: dict[Relay, Party] = {}
        self._strange: dict[Relay, int] = {}
        """Those that have not shown that they may speak, each with its user, the oldest first."""
        self._shares: Counter[Party] = Counter()
        self._of_user: Counter[int] = Counter()
        with created_with(0o600 if own_user else 0o666):
            self._listener = Listener(path, self._accepted, Pace())

    def close(self, seconds: float) -> None:
        """Accepts nobody any more; what libzmq has sent gets out, for so long at most."""
        self._listener.close()
        finish(self._relays, seconds)

    def _accepted(self, accepted: socket.socket) -> None:
        try:
            who = party_at(accepted)
            foreign.check(who.uid)
        except (OSError, Unavailable):  # its process has ended, or has passed what nobody can close
            hang_up(accepted)
            return
        if self._own_user and who.uid != os.geteuid():
            self._reject(accepted, who, Reason.OTHER_USER)
            return
        self._forget_known()
        if not self._has_room(who):
            self._reject(accepted, who, Reason.TOO_MANY)
            return
        if len(self._strange) >= _places_of_strangers():
            self._make_room()
        self._pass_on(accepted, who)

    def _pass_on(self, accepted: socket.socket, who: Party) -> None:
        inside = None
        try:
            inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inside.setblocking(False)
            inside.connect(self._inner.path)
        except OSError:  # no descriptor is left, or libzmq does not come to accept
            if inside is not None:
                inside.close()
            self._reject(accepted, who, Reason.TOO_MANY)
            return
        relay = Relay(accepted, inside, self._ended)
        self._relays[relay] = who
        self._strange[relay] = who.uid
        self._shares[who] += 1
        self._of_user[who.uid] += 1

    def _reject(self, accepted: socket.socket, who: Party, reason: Reason) -> None:
        hang_up(accepted)
        self._on_rejected(Rejection(reason, address=f"user {who.uid}"))

    def _forget_known(self) -> None:
        for relay in [relay for relay in self._strange if relay.outbound.bytes > _BEFORE_READY or self._own_user]:
            del self._strange[relay]

    def _has_room(self, who: Party) -> bool:
        own = self._shares[who] if who.process else 0
        within = own < limits.MAX_PEERS_PER_PROCESS and self._of_user[who.uid] < limits.MAX_PEERS_PER_USER
        # libzmq accepts by itself, and must have a descriptor for it.
        unanswered = sum(relay.outbound.bytes == 0 for relay in self._strange)
        return within and len(self._relays) < limits.MAX_PEERS and unanswered < limits.MAX_PEERS_UNANSWERED

    def _make_room(self) -> None:
        """Hangs up on the oldest stranger of the user who has most of them."""
        ((busiest, _),) = Counter(self._strange.values()).most_common(1)
        next(relay for relay, user in self._strange.items() if user == busiest).close()

    def _ended(self, relay: Relay) -> None:
        who = self._relays.pop(relay)
        self._strange.pop(relay, None)
        self._shares -= Counter([who])
        self._of_user -= Counter([who.uid])


def _places_of_strangers() -> int:
    """Each takes three descriptors, and all together a fifth of those that this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits.MAX_STRANGE_PEERS if most == resource.RLIM_INFINITY else min(limits.MAX_STRANGE_PEERS, most // 16)
