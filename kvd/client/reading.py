"""Until when a client has read all that came for it. Pure: times are monotonic seconds on the caller's clock."""

from kvd import limits


class Reading:
    """After a standstill of this process or its engine, what came in time may wait in a socket: it gets a moment.

    If every step follows one, what was there at the last step has been read now.
    """

    def __init__(self) -> None:
        self.until = 0.0
        """All that had come by then is read for sure."""
        self.next_at = 0.0
        """When that can be said of a later time."""
        self._stepped_at = 0.0

    def step(self, now: float, *, unread: bool) -> None:
        """What there was has been read, except what is still `unread`."""
        before, self._stepped_at = self._stepped_at, now
        if unread:
            self.next_at = now + limits.LAST_LOOK_SECONDS
        elif now - before > limits.STANDSTILL_SECONDS:
            self.until, self.next_at = before, now + limits.LAST_LOOK_SECONDS
        elif now >= self.next_at:
            self.until = now
