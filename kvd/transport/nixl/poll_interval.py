"""How long the transport's thread may sleep between two looks at the network.

NIXL makes progress only while it is called. Its own progress thread would call it without a pause and burn a core for
each agent, so kvd's thread does it, at a pace that follows from what waits for it (measured between two processes of
one host; a look costs 1 us of CPU, waking up for it 25 to 50):

- `PROMPT`, 0.1 ms, while own slices are in flight or peers are expected to read: over TCP the side that is read from
  must answer each request, and 0.1 ms gives it full speed where 1 ms costs up to a factor of 3.
- `RECENT`, 1 ms, for `RECENT_SPAN` after a slice that waited for the network, or since a connection is being made, by
  either side: it needs several looks, which is about 5 ms of wire-up instead of 30 to 50.
- `IDLE`, 20 ms, otherwise: a daemon of two threads with nothing to do takes 1.7 % of a core, 4.8 at 5 ms, 7.7 at
  `RECENT`. Reads on the same host (CMA) need no look at all.

A command wakes the thread at once whatever the pace is.
"""

from __future__ import annotations

from typing import Final

PROMPT: Final = 0.0001
RECENT: Final = 0.001
IDLE: Final = 0.02
RECENT_SPAN: Final = 0.1
"""Seconds."""


class PollInterval:
    """Pure: time comes in, in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self.readers_expected = False
        self._last_activity = float("-inf")

    def touch(self, now: float) -> None:
        """A slice waits for the network, or has waited; or a connection is about to be made."""
        self._last_activity = now

    def seconds(self, now: float, in_flight: bool) -> float:
        """How long to sleep at most, where `in_flight` says whether own slices wait for the network."""
        if in_flight or self.readers_expected:
            return PROMPT
        return RECENT if now - self._last_activity < RECENT_SPAN else IDLE
