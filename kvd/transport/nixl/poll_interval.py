"""How long the transport's process may sleep between two polls of the network.

NIXL makes progress only while it is called. Its own progress thread would call it without a pause and burn a core per
agent, so kvd's loop polls at an interval that depends on what is waiting (measured between two processes of one
host; a poll costs 1 us of CPU, waking up for it 25 to 50):

- `PROMPT`, 0.1 ms, while own slices are in flight or peers are expected to read: over TCP the side that is read from
  must answer each request. 0.1 ms gives full speed; 1 ms is up to 3 times slower.
- `RECENT`, 1 ms, for `RECENT_SPAN` after a slice waited for the network, or after either side began to connect: with
  the several polls that a connection needs, it takes about 5 ms instead of 30 to 50.
- `IDLE`, 20 ms, otherwise: an idle daemon of two threads takes 1.7 % of a core; at 5 ms it takes 4.8 %, at `RECENT`
  7.7 %.

A command wakes the thread at once, whatever the interval.
"""

from __future__ import annotations

from typing import Final

PROMPT: Final = 0.0001
RECENT: Final = 0.001
IDLE: Final = 0.02
RECENT_SPAN: Final = 0.1
"""Seconds."""


class PollInterval:
    """Pure: time comes in, in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.readers_expected = False
        self._last_activity = float("-inf")

    def touch(self, now: float) -> None:
        """A slice waits for the network, or has waited; or a connection is about to be made."""
        self._last_activity = now

    def seconds(self, now: float, in_flight: bool) -> float:
        """How long to sleep at most; `in_flight` says whether own slices wait for the network."""
        if in_flight or self.readers_expected:
            return PROMPT
        return RECENT if now - self._last_activity < RECENT_SPAN else IDLE
