"""The attackers of one kind, a process of its own: attacks take turns until each has sent its messages.

Prints how many messages each attack has sent, a line a second; ends when standard input does.
"""

import contextlib
import os
import resource
import select
import sys
import time
import traceback
from collections.abc import Iterator
from random import Random

import msgspec
import zmq

from kvd.errors import KvdError
from tests.fuzz import on_descriptors, on_links, on_peers, on_ports, on_requests, on_router, on_sessions, on_users
from tests.fuzz.attack import REGISTRY, Attack, Place

MODULES = (on_sessions, on_ports, on_requests, on_peers, on_links, on_descriptors, on_users, on_router)
"""Where attacks are."""

REBUFFS = (OSError, zmq.ZMQError, KvdError)
"""How a daemon that defends itself breaks an attack off."""

NOBODY = 65534
REST_SECONDS = 0.001
REBUFFED_SECONDS = 0.02


class Orders(msgspec.Struct, frozen=True):
    """What a process is told: `shares` are messages by attack; `idle` only keeps a core busy."""

    place: Place
    seed: int
    shares: dict[str, int]
    seconds: float
    become_nobody: bool = False
    idle: bool = False


class Counts(msgspec.Struct):
    """What it tells: messages sent, and times broken off, by attack."""

    sent: dict[str, int]
    rebuffed: dict[str, int]
    error: str = ""


class Turns:
    """One attack and what it has done."""

    def __init__(self, attack: Attack, share: int) -> None:
        self.attack, self.share, self.sent, self.rebuffed = attack, share, 0, 0
        self._strike: Iterator[int] | None = None
        self._rest = 0.0

    @property
    def done(self) -> bool:
        return self.sent >= self.share

    def take(self, now: float) -> bool:
        """A turn; whether anything was sent."""
        if now < self._rest:
            return False
        if self._strike is None:
            self._strike = self.attack.strike()
        try:
            number = next(self._strike)
        except StopIteration:
            self._strike = None
            return False
        except REBUFFS:
            self._strike, self._rest = None, now + REBUFFED_SECONDS
            self.rebuffed += 1
            return False
        self.sent += number
        if self.done:
            self.close()
        return number > 0

    def close(self) -> None:
        """Closes what the attack has open."""
        if self._strike is not None:
            with contextlib.suppress(*REBUFFS):
                self._strike.close()  # type: ignore[attr-defined]  # strikes are generators
            self._strike = None


def told_to_end() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def attack(orders: Orders) -> Counts:
    """Attacks until every share is sent, the time is over, or standard input ends."""
    turns = {
        name: Turns(REGISTRY[name](orders.place, Random(f"{orders.seed}/{name}")), share)  # noqa: S311
        for name, share in orders.shares.items()
    }
    counts, until, told = Counts({}, {}), time.monotonic() + orders.seconds, 0.0
    try:
        while not told_to_end() and (now := time.monotonic()) < until:
            left = [turn for turn in turns.values() if not turn.done]
            if not left:
                break
            sent = [turn.take(now) for turn in left]
            if not any(sent):
                time.sleep(REST_SECONDS)  # the daemon takes nothing more just now
            counts.sent = {name: turn.sent for name, turn in turns.items()}
            counts.rebuffed = {name: turn.rebuffed for name, turn in turns.items()}
            if now - told > 1.0:
                told = now
                tell(counts)
    finally:
        for turn in turns.values():
            turn.close()
    return counts


def tell(counts: Counts) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(counts) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Runs the orders that the first argument has, as JSON."""
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if orders.idle:
        while not told_to_end():
            Random(0).randbytes(1 << 16)  # noqa: S311
        return
    if orders.become_nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        tell(attack(orders))
    except Exception:
        tell(Counts({}, {}, traceback.format_exc()))
        raise


if __name__ == "__main__":
    main()
